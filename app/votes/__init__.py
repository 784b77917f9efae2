"""Votes as data: which count, how they go out to files and come in from them, who tampered with them."""
