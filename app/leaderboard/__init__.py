"""The leaderboard: boards of the votes in the database or in a file, and what is drawn and exported of them."""
