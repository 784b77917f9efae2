"""Ratings: games in, board out. Pure: knows no database, no files, no clock.

A method is a module with `rate` and a line in `METHODS`.
"""

from app.ratings.board import METHODS, Board, Row, choose_interval, rate
from app.ratings.games import Games

__all__ = ["METHODS", "Board", "Games", "Row", "choose_interval", "rate"]
