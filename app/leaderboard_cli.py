"""`arena leaderboard`: the board as a table, or as one JSON document."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from app import leaderboard
from app.config import AppConfig
from app.errors import BadInput
from app.formats.any_csv import DEFAULT_COLUMNS
from app.ratings import METHODS, Board
from db.connect import Database


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "leaderboard",
        help="rate the votes of the arena, or of a CSV file",
        description="Rates the votes of the arena, or of a CSV file with a header, and prints the leaderboard.",
    )
    intervals = list(dict.fromkeys(ci for method in METHODS.values() for ci in method.intervals))
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="votes in a CSV file; without it, the arena's"
    )
    parser.add_argument(
        "--columns",
        metavar="LEFT,RIGHT,WINNER",
        help=f"names of the file's columns (default: {','.join(DEFAULT_COLUMNS)}); the winner is left, right, tie, "
        "both_bad, or the name of a model or of its column",
    )
    parser.add_argument("--method", choices=list(METHODS), default="bt", help="rating method (default: %(default)s)")
    parser.add_argument("--ci", choices=intervals, help="kind of 95%% intervals (default: the method's usual one)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--database-url", help="database of the arena (default: its file in the data folder)")
    parser.add_argument("--data-folder", type=Path, help="the arena's data folder (default: data)")
    parser.set_defaults(run=leaderboard_command)


def leaderboard_command(args: argparse.Namespace) -> int:
    """Prints the board on standard output. Raises BadInput, ConfigError or DatabaseError."""
    try:
        board = _board_of_file(args) if args.file else _board_of_database(args)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if args.json:
        print(json.dumps(board.as_dict(), ensure_ascii=False, indent=2))
    else:
        print(as_text(board))
    for note in board.notes:
        print(note, file=sys.stderr)
    return 0


def _board_of_file(args: argparse.Namespace) -> Board:
    if args.database_url or args.data_folder:
        raise BadInput("give a FILE, or say where the arena's votes are, not both")
    columns = next(csv.reader([args.columns])) if args.columns else DEFAULT_COLUMNS
    if len(columns) != 3:
        raise BadInput(f"--columns takes three names, LEFT,RIGHT,WINNER, not {len(columns)}: {args.columns}")
    return leaderboard.board_from_csv(args.file, tuple(columns), method=args.method, ci=args.ci)


def _board_of_database(args: argparse.Namespace) -> Board:
    if args.columns:
        raise BadInput("--columns names the columns of a FILE, and none was given")
    flags = {name: value for name in ("database_url", "data_folder") if (value := getattr(args, name)) is not None}
    config = AppConfig.load(flags, file=args.config)
    database = Database(config.database)
    try:
        database.upgrade_to_head()
        return leaderboard.board(database, method=args.method, ci=args.ci)
    finally:
        database.close()


def as_text(board: Board) -> str:
    """A table of fixed columns; below it what the board was made of."""
    if not board.rows:
        return "No votes yet."
    width = max(len("model"), *(len(row.model) for row in board.rows))
    head = (
        f"{'rank':>7}  {'model':<{width}}  {'rating':>7}  {'95% interval':>17}  {'votes':>7}  {'wins':>7}  {'elo':>7}"
    )
    lines = [head, "-" * len(head)]
    for row in board.rows:
        rank = f"{row.rank_best}" if row.rank_best == row.rank_worst else f"{row.rank_best}-{row.rank_worst}"
        interval = f"{row.lower:.1f} - {row.upper:.1f}"
        lines.append(
            f"{rank:>7}  {row.model:<{width}}  {row.rating:>7.1f}  {interval:>17}  {row.votes:>7,}  {row.wins:>7,}  "
            f"{row.elo:>7.1f}"
        )
    votes = "1 vote" if board.votes == 1 else f"{board.votes:,} votes"
    made_of = f"{votes}, {METHODS[board.method].label}, {board.ci} intervals"
    return "\n".join([*lines, f"{made_of}; version {board.version}; input sha256 {board.input_sha256}"])
