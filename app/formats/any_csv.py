"""Votes in any CSV file: three columns, named by the user, say who met whom and how it ended.

The winner is `left` or `right` (or the name of that column, or of that model), or one of the words for a tie. A row
that cannot be understood refuses the whole file, with its line: a vote is never dropped, nor turned into a tie.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.errors import BadInput
from app.ratings import Games

DEFAULT_COLUMNS = ("left", "right", "winner")
DELIMITERS = (",", ";", "\t")
LEFT_WORDS = ("left", "model_a")
RIGHT_WORDS = ("right", "model_b")
TIE_WORDS = ("tie", "draw")
BOTH_BAD_WORDS = ("both_bad", "both bad", "bothbad", "tie (bothbad)", "tie (both bad)", "neither")
SCORES = (
    dict.fromkeys(LEFT_WORDS, 1.0) | dict.fromkeys(RIGHT_WORDS, 0.0) | dict.fromkeys((*TIE_WORDS, *BOTH_BAD_WORDS), 0.5)
)
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
    words = {columns[0].lower(): 1.0, columns[1].lower(): 0.0} | SCORES
    left, right, scores, bad = [], [], [], []
    line = 2  # where the row begins; one with line breaks in its fields ends further down
    try:
        for row in rows:
            if row:
                try:
                    pair, score = _read_row(row, places, words)
                except ValueError as error:
                    bad.append(f"line {line}: {error}")
                else:
                    left.append(pair[0])
                    right.append(pair[1])
                    scores.append(score)
            line = rows.line_num + 2
    except csv.Error as error:
        raise BadInput(f"line {line}: {error}") from error
    if bad:
        raise BadInput(_list_bad_rows(bad, len(bad) + len(scores)))
    return Games.between(left, right, scores)


def _decoded(file: Iterable[bytes], digest) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        digest.update(line)
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"line {number}: not UTF-8 text ({error.reason})") from error


def _open(lines: Iterator[str], columns: tuple[str, str, str]) -> tuple:
    """A reader that stands after the header, and the places of the columns in a row."""
    header = next(lines, "")
    csv.field_size_limit(MAX_FIELD)
    for delimiter in DELIMITERS:
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        if all(names.count(column) == 1 for column in columns):
            return csv.reader(lines, delimiter=delimiter), [names.index(column) for column in columns]
    names = [name.strip() for name in next(csv.reader([header]), [])]
    trouble = [
        f"{column!r} {'twice' if column in names else 'missing'}" for column in columns if names.count(column) != 1
    ]
    raise BadInput(f"{', '.join(trouble)} among the columns: {', '.join(names) or 'the file is empty'}")


def _read_row(row: list[str], places: list[int], words: dict[str, float]) -> tuple[tuple[str, str], float]:
    if len(row) <= max(places):
        raise ValueError(f"has {len(row)} fields and needs {max(places) + 1}")
    left, right, winner = (row[place].strip() for place in places)
    if not left or not right:
        raise ValueError("a model has no name")
    if left == right:
        raise ValueError(f"{left!r} against itself")
    meanings = {score for word, score in ((left, 1.0), (right, 0.0)) if winner == word}
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
