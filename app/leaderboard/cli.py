"""`arena leaderboard`: the board as a table, as one JSON document, or as a file to publish."""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import date
from pathlib import Path

from app.config import AppConfig
from app.errors import BadInput
from app.leaderboard import boards
from app.leaderboard.exports import EXPORTS, spread
from app.leaderboard.sheet import Sheet
from app.leaderboard.votes import ALL, Selection
from app.numbers import many
from app.ratings import METHODS, Board
from app.ratings.board import FEW_VOTES
from app.ratings.categories import CATEGORIES
from app.votes.files import guess_format
from app.votes.formats import FORMATS
from app.votes.formats.any_csv import DEFAULT_COLUMNS
from db.connect import Database

NO_VOTES = "No votes yet."
SWITCHES = {
    "style": "hold style constant: length, headers, lists, bold",
    "position": "hold constant on which side a model was",
    "cluster": "do not take one visitor's votes for independent",
    "propensity": "weigh each vote by one over the chance that its pair had",
}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "leaderboard",
        help="rate the votes of the arena, or of a file",
        description="Rates the votes of the arena, or of a file, and prints the leaderboard.",
    )
    intervals = list(dict.fromkeys(ci for method in METHODS.values() for ci in method.intervals))
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a file of votes; without it, the arena's")
    parser.add_argument(
        "--columns",
        metavar="LEFT,RIGHT,WINNER",
        help=f"names of a CSV file's columns (default: {','.join(DEFAULT_COLUMNS)}); the winner is left, right, tie, "
        "both_bad, or the name of a model or of its column",
    )
    parser.add_argument("--format", choices=list(FORMATS), help="of the FILE (default: told by its columns)")
    parser.add_argument("--method", choices=list(METHODS), default="bt", help="rating method (default: %(default)s)")
    parser.add_argument("--ci", choices=intervals, help="kind of 95%% intervals (default: the method's usual one)")
    parser.add_argument("--category", choices=[ALL, *CATEGORIES], default=ALL, help="which votes (default: all)")
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--since", type=date.fromisoformat, metavar="DAY", help="first day, UTC, as 2026-01-31")
    parser.add_argument("--until", type=date.fromisoformat, metavar="DAY", help="last day, UTC")
    parser.add_argument("--min-votes", type=int, default=0, metavar="N", help="leave out models with fewer votes")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--as", dest="export", choices=list(EXPORTS), help="print the board as such a file")
    parser.add_argument("--database-url", help="database of the arena (default: its file in the data folder)")
    parser.add_argument("--data-folder", type=Path, help="the arena's data folder (default: data)")
    parser.set_defaults(run=leaderboard_command)


def leaderboard_command(args: argparse.Namespace) -> int:
    """Prints the board on standard output. Raises BadInput, ConfigError or DatabaseError."""
    if args.json and args.export not in (None, "json"):
        raise BadInput(f"--json and --as {args.export} are two documents, and one is printed")
    selection = Selection(**{each.name: getattr(args, each.name) for each in fields(Selection)})
    sheet = _sheet_of_file(args, selection) if args.file else _sheet_of_database(args, selection)
    export = "json" if args.json else args.export
    sys.stdout.write(EXPORTS[export].write(sheet) if export else as_text(sheet) + "\n")
    for note in (*sheet.board.notes, *decisions(sheet.board)):
        print(note, file=sys.stderr)
    return 0


def _sheet_of_file(args: argparse.Namespace, selection: Selection) -> Sheet:
    if args.database_url or args.data_folder:
        raise BadInput("give a FILE, or say where the arena's votes are, not both")
    columns = next(csv.reader([args.columns])) if args.columns else ()
    name = args.format or _format_of(args.file, columns)
    if name != "csv":
        if args.columns:
            raise BadInput(f"--columns is for CSV files; {name} has its own")
        sheet = boards.sheet_from_file(args.file, name, selection)
        return replace(sheet, file=(str(args.file), "--format", name))
    columns = columns or DEFAULT_COLUMNS
    if len(columns) != 3:
        raise BadInput(f"--columns takes three names, LEFT,RIGHT,WINNER, not {len(columns)}: {args.columns}")
    named = ("--columns", args.columns) if args.columns else ()
    return replace(boards.sheet_from_csv(args.file, tuple(columns), selection), file=(str(args.file), *named))


def _format_of(file: Path, columns: Sequence[str]) -> str:
    """By its columns; what is read only once, as a pipe, and what no format knows, is taken for CSV."""
    with contextlib.suppress(BadInput):
        if file.is_file():
            return guess_format(file, columns).name
    return "csv"


def _sheet_of_database(args: argparse.Namespace, selection: Selection) -> Sheet:
    if args.columns:
        raise BadInput("--columns names the columns of a FILE, and none was given")
    if args.format:
        raise BadInput("--format is that of a FILE, and none was given")
    flags = {name: value for name in ("database_url", "data_folder") if (value := getattr(args, name)) is not None}
    config = AppConfig.load(flags, file=args.config)
    config.require_database()
    database = Database(config.database)
    try:
        database.upgrade_to_head()
        return boards.sheet(database, selection)
    finally:
        database.close()


def as_text(sheet: Sheet) -> str:
    """A table of fixed columns; below it what the board was made of."""
    board = sheet.board
    if not board.rows:
        return f"None of the {many(sheet.all_votes, 'vote')} is left by this choice." if sheet.all_votes else NO_VOTES
    width = max(len("model"), *(len(row.model) for row in board.rows))
    head = (
        f"{'rank':>7}  {'model':<{width}}  {'rating':>7}  {'95% interval':>17}  {'votes':>7}  {'wins':>7}  {'elo':>7}"
    )
    lines = [head, "-" * len(head)]
    for row in board.rows:
        rank = spread(row.rank_best, row.rank_worst).replace("–", "-")
        interval = f"{row.lower:.1f} - {row.upper:.1f}"
        lines.append(
            f"{rank:>7}  {row.model:<{width}}  {row.rating:>7.1f}  {interval:>17}  {row.votes:>7,}  {row.wins:>7,}  "
            f"{row.elo:>7.1f}"
        )
    made_of = f"{many(board.votes, 'vote')}, {METHODS[board.method].label}, {board.ci} intervals"
    return "\n".join([*lines, f"{made_of}; version {board.version}; input sha256 {board.input_sha256}"])


def decisions(board: Board) -> list[str]:
    """What the covariates did, and how sure the first place is; a sentence each."""
    told = [
        f"{effect.name}: {effect.points:+.1f} points ({effect.lower:.1f} to {effect.upper:.1f})"
        for effect in board.effects
    ]
    if board.is_early:
        told.append(f"It is far too early to say who is first: that takes {FEW_VOTES} votes or more on each model.")
        return told
    if found := board.separation:
        if found.votes == 0:
            told.append(f"{found.first} and {found.second} are apart.")
        elif found.votes:
            told.append(f"About {many(found.votes, 'vote')} more would part {found.first} from {found.second}.")
    if found := board.fragility:
        told.append(f"Without {found.votes:,} of the votes ({found.share:.2%}) {found.successor} would be first.")
    return told
