"""Votes in any CSV file: three columns, named by the user, say who met whom and how it ended.

The winner is `left` or `right` (or the name of that column, or of that model), or one of the words for a tie. A row
that cannot be understood refuses the whole file, with its line: a vote is never dropped, nor turned into a tie.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.errors import BadInput
from app.ratings import Games
from app.votes.formats.records import BadRow, Row, VoteRecord, check_length
from app.votes.formats.rows import VotesSource
from db.vote_kinds import VOTE_KINDS

DEFAULT_COLUMNS = ("left", "right", "winner")
DELIMITERS = (",", ";", "\t")
LEFT_WORDS = ("left", "model_a")
RIGHT_WORDS = ("right", "model_b")
TIE_WORDS = ("tie", "draw")
BOTH_BAD_WORDS = ("both_bad", "both bad", "bothbad", "tie (bothbad)", "tie (both bad)", "neither")
KINDS = (
    dict.fromkeys(LEFT_WORDS, "a")
    | dict.fromkeys(RIGHT_WORDS, "b")
    | dict.fromkeys(TIE_WORDS, "tie")
    | dict.fromkeys(BOTH_BAD_WORDS, "both_bad")
)
WINNERS = {"a": "left", "b": "right", "tie": "tie", "both_bad": "both_bad"}
SHOWN_BAD_ROWS = 20
MAX_FIELD = 2**31 - 1  # a column that we do not read may hold a whole conversation


@dataclass(frozen=True)
class VotesFile:
    games: Games
    sha256: str  # of the file's bytes, as `sha256sum` prints it


def read(path: Path, columns: tuple[str, str, str] = DEFAULT_COLUMNS) -> VotesFile:
    """Reads the file once, from its first byte to its last, so that a pipe will do. Raises BadInput."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            games = parse(_decoded(file, digest), columns)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    return VotesFile(games, digest.hexdigest())


def write(rows: Iterable[tuple[str, str, str]]) -> bytes:
    """A file that `read` takes without being told its columns. Rows of left model, right model, winner."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([DEFAULT_COLUMNS, *rows])
    return text.getvalue().encode()


def parse(lines: Iterator[str], columns: tuple[str, str, str]) -> Games:
    """Games of the lines of a CSV file with a header. Raises BadInput."""
    rows, places = _open(lines, columns)
    words = _words(columns)
    left, right, kinds, bad = [], [], [], []
    line = 2  # where the row begins; one with line breaks in its fields ends further down
    try:
        for row in rows:
            if row:
                try:
                    pair, kind = _read_row(row, places, words)
                except ValueError as error:
                    bad.append(f"line {line}: {error}")
                else:
                    left.append(pair[0])
                    right.append(pair[1])
                    kinds.append(kind)
            line = rows.line_num + 2
    except csv.Error as error:
        raise BadInput(f"line {line}: {error}") from error
    if bad:
        raise BadInput(_list_bad_rows(bad, len(bad) + len(kinds)))
    scores = [VOTE_KINDS[kind].score_a for kind in kinds]
    return Games.between(left, right, scores, both_bad=np.array([kind == "both_bad" for kind in kinds], bool))


@dataclass(frozen=True)
class CsvFormat:
    """The file as votes to import; its other columns, and the words of its winners, are kept and written again."""

    columns: tuple[str, str, str] = DEFAULT_COLUMNS
    name = "csv"
    title = "any CSV by column names"
    documented = "docs/votes.md"

    def read(self, file: VotesSource) -> Iterator[Row]:
        bad: list[BadRow] = []
        rows, places, header, delimiter = _open_named((_text(file, bad)), self.columns)
        words = _words(self.columns)
        line = 2
        try:
            for cells in rows:
                while bad:
                    yield bad.pop(0)
                if cells:
                    try:
                        (left, right), kind = _read_row(cells, places, words)
                        if len(cells) != len(header):
                            raise ValueError(f"has {len(cells)} fields and the header {len(header)}")
                    except ValueError as error:
                        yield BadRow(line, str(error))
                    else:
                        details = {"format": self.name, "header": header, "delimiter": delimiter, "cells": cells}
                        yield VoteRecord(left, right, kind, details=details, line=line)
                line = rows.line_num + 2
        except csv.Error as error:
            yield BadRow(line, str(error))
        yield from bad

    def write(self, records: Iterable[VoteRecord]) -> Iterator[str]:
        """Under the header of the first vote; where that came from no CSV file, under our three columns."""
        header: list[str] = []
        for record in records:
            details = record.details if (record.details or {}).get("format") == self.name else {}
            if not header:
                header, delimiter = details.get("header", list(self.columns)), details.get("delimiter", ",")
                yield _cells(header, delimiter)
            ours = dict(zip(self.columns, (record.model_a, record.model_b, WINNERS[record.kind]), strict=True))
            same = details.get("header") == header
            yield _cells(details["cells"] if same else [ours.get(name, "") for name in header], delimiter)

    def loses(self, record: VoteRecord) -> str | None:
        return None if record.counted else "is not counted, which the format cannot say"


def _cells(cells: Sequence[str], delimiter: str) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", delimiter=delimiter).writerow(cells)
    return text.getvalue()


def _text(file: VotesSource, bad: list[BadRow]) -> Iterator[str]:
    for _, line in file.lines():
        if isinstance(line, BadRow):
            bad.append(line)
            line = "\n"
        yield line


def _decoded(file: Iterable[bytes], digest) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        digest.update(line)
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"line {number}: not UTF-8 text ({error.reason})") from error


def _open(lines: Iterator[str], columns: Sequence[str]) -> tuple:
    """A reader that stands after the header, and the places of the columns in a row. Raises BadInput."""
    return _open_named(lines, columns)[:2]


def _open_named(lines: Iterator[str], columns: Sequence[str]) -> tuple:
    """With the header and the delimiter."""
    header = next(lines, "")
    csv.field_size_limit(MAX_FIELD)
    for delimiter in DELIMITERS:
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        if all(names.count(column) == 1 for column in columns):
            places = [names.index(column) for column in columns]
            return csv.reader(lines, delimiter=delimiter), places, names, delimiter
    names = [name.strip() for name in next(csv.reader([header]), [])]
    trouble = [
        f"{column!r} {'twice' if column in names else 'missing'}" for column in columns if names.count(column) != 1
    ]
    raise BadInput(f"{', '.join(trouble)} among the columns: {', '.join(names) or 'the file is empty'}")


def _words(columns: Sequence[str]) -> dict[str, str]:
    """What a winner's word means: a kind of vote."""
    return {columns[0].lower(): "a", columns[1].lower(): "b"} | KINDS


def _read_row(row: list[str], places: list[int], words: dict[str, str]) -> tuple[tuple[str, str], str]:
    if len(row) <= max(places):
        raise ValueError(f"has {len(row)} fields and needs {max(places) + 1}")
    left, right, winner = (row[place].strip() for place in places)
    if not left or not right:
        raise ValueError("a model has no name")
    if left == right:
        raise ValueError(f"{left!r} against itself")
    check_length(left, right)
    meanings = {kind for word, kind in ((left, "a"), (right, "b")) if winner == word}
    if winner.lower() in words:
        meanings.add(words[winner.lower()])
    if not meanings:
        raise ValueError(f"winner is {winner!r}, and not left, right, tie, both_bad, {left!r} or {right!r}")
    if len(meanings) > 1:
        raise ValueError(f"winner {winner!r} is the name of a model and the word for something else")
    return (left, right), meanings.pop()


def _list_bad_rows(bad: list[str], rows: int) -> str:
    shown = bad[:SHOWN_BAD_ROWS]
    if len(bad) > len(shown):
        shown.append(f"and {len(bad) - len(shown):,} more")
    return "\n  ".join([f"{len(bad):,} of {rows:,} rows cannot be read, so that none was:", *shown])


FORMAT = CsvFormat()
