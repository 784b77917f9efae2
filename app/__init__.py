"""The website: visitors, battles, votes, leaderboard. Talks to engines over HTTP; never imports torch or `engine`."""
