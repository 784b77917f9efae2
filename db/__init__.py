"""What is remembered: tables, migrations, and named queries. Knows SQL; knows no HTTP, no engine and no ratings."""
