"""Formats: votes from files of others. A format is a module here; none knows the database."""
