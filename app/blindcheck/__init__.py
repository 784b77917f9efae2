"""Is the arena blind? Plays battles between a fast and a slow engine, and looks whether anything tells which is which.

Before the vote a visitor's browser is sent bytes at certain times. `play` sets up the battles and records both,
`search` looks through the bytes for whatever names a model, `guess` trains a classifier on the times.
"""
