"""Formats of one vote a row: JSON lines, a JSON array, or CSV with nested values as JSON or Python literals.

Nothing is lost on the way: after a row is parsed it is written again, and every column that does not come out as it
was is kept in the record's details, from where the writer of the same format takes it. Knows no column by name.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.errors import BadInput
from app.votes.formats.records import BadRow, OtherRow, Row, VoteRecord, as_stored, checked, with_details

MAX_FIELD = 2**31 - 1
Columns = dict[str, Any]


class NoVote(ValueError):
    """Raised by `parse` for a row that is not a vote, and is no mistake either."""


@dataclass(frozen=True)
class RowFormat:
    """`parse` and `row` are each other's inverse as far as a record reaches; `parse` raises ValueError with the reason.

    `kinds`: of columns whose cells in CSV are no text: int, float, bool or "value" (nested). `documented`: where the
    columns are described. `lacks`: kinds of vote that it has no word for, and what they are written as.
    """

    name: str
    title: str
    documented: str
    parse: Callable[[Columns], VoteRecord]
    row: Callable[[VoteRecord], Columns]
    kinds: Mapping[str, str] = None
    lacks: Mapping[str, str] = None

    def read(self, file: VotesSource) -> Iterator[Row]:
        for line, columns in file.rows(self.kinds or {}):
            if isinstance(columns, BadRow):
                yield columns
                continue
            try:
                yield replace(self._record(columns), line=line)
            except NoVote as error:
                yield OtherRow(line, str(error))
            except ValueError as error:
                yield BadRow(line, str(error))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                yield BadRow(line, f"not a row of {self.title}: {type(error).__name__} {error}")

    def _record(self, columns: Columns) -> VoteRecord:
        record = checked(self.parse(columns))
        stored = as_stored(record, self.name)
        built = self.row(stored)
        kept = {name: value for name, value in columns.items() if name not in built or not same(built[name], value)}
        absent = sorted(built.keys() - columns.keys())
        return with_details(stored, {"format": self.name, "columns": kept, "absent": absent})

    def write(self, records: Iterable[VoteRecord]) -> Iterator[str]:
        for record in records:
            yield json.dumps(self.columns_of(record), ensure_ascii=False) + "\n"

    def columns_of(self, record: VoteRecord) -> Columns:
        columns = self.row(record)
        details = record.details or {}
        if details.get("format") != self.name:
            return columns
        return {k: v for k, v in (columns | details["columns"]).items() if k not in details["absent"]}

    def loses(self, record: VoteRecord) -> str | None:
        """What of a vote this format cannot say, as a sentence; None where it says all."""
        if not record.counted:
            return "is not counted, which the format cannot say"
        if record.kind in (self.lacks or {}):
            return f"is {record.kind}, and written as {self.lacks[record.kind]}: the format has no word for it"
        return None


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1, 1.0 and true are three values."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def kind_of(words: Mapping[str, str], winner: Any, column: str = "winner") -> str:
    """Raises ValueError for a word that means nothing here."""
    if winner not in words:
        raise ValueError(f"{column} is {winner!r}, and not one of {', '.join(map(repr, words))}")
    return words[winner]


def needed(columns: Columns, *names: str) -> list[Any]:
    """Raises ValueError where one is missing or empty."""
    missing = [name for name in names if columns.get(name) in (None, "")]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    return [columns[name] for name in names]


# Files


class VotesSource:
    """A file read once, from its first byte to its last; `sha256` is of what was read so far. Raises BadInput."""

    def __init__(self, path: Path):
        self.path = path
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def lines(self) -> Iterator[tuple[int, str | BadRow]]:
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    self._digest.update(line)
                    if number == 1 and line[:4] == b"PAR1":
                        raise BadInput(f"{self.path} is Parquet; write its rows as JSON lines or CSV first")
                    try:
                        yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                    except UnicodeDecodeError as error:
                        yield number, BadRow(number, f"not UTF-8 text ({error.reason})")
        except OSError as error:
            raise BadInput(f"cannot read {self.path}: {error.strerror}") from error

    def rows(self, kinds: Mapping[str, str]) -> Iterator[tuple[int, Columns | BadRow]]:
        """Columns by name with the line on which the row begins."""
        lines = self.lines()
        first = next(lines, (1, ""))
        start = first[1] if isinstance(first[1], str) else ""
        if start.lstrip().startswith("["):
            yield from _array(first, lines)
        elif start.lstrip().startswith("{") or isinstance(first[1], BadRow):
            yield from _json_lines(first, lines)
        else:
            yield from _csv(first, lines, kinds)


def _json_lines(first: tuple, lines: Iterator[tuple]) -> Iterator[tuple[int, Columns | BadRow]]:
    for number, line in _chained(first, lines):
        if isinstance(line, BadRow):
            yield number, line
        elif line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                yield number, BadRow(number, f"not JSON: {error}")
            else:
                yield number, value if isinstance(value, dict) else BadRow(number, "not a table of columns")


def _chained(first: tuple, lines: Iterator[tuple]) -> Iterator[tuple]:
    yield first
    yield from lines


def _array(first: tuple, lines: Iterator[tuple]) -> Iterator[tuple[int, Columns | BadRow]]:
    """A JSON array is read whole; a row's line is that of its opening brace as far as the file tells."""
    text, bad = [], None
    for _, line in _chained(first, lines):
        if isinstance(line, BadRow):
            bad = bad or line
            line = ""
        text.append(line)
    if bad:
        yield bad.line, bad
        return
    whole, decoder = "".join(text), json.JSONDecoder()
    place = whole.index("[") + 1
    number, counted = 1, 0
    while True:
        while place < len(whole) and whole[place] in " \t\r\n,":
            place += 1
        number += whole.count("\n", counted, place)
        counted = place
        if place >= len(whole) or whole[place] == "]":
            return
        try:
            value, place = decoder.raw_decode(whole, place)
        except ValueError as error:
            yield number, BadRow(number, f"not JSON: {error}")
            return
        yield number, value if isinstance(value, dict) else BadRow(number, "not a table of columns")


def _csv(first: tuple, lines: Iterator[tuple], kinds: Mapping[str, str]) -> Iterator[tuple[int, Columns | BadRow]]:
    csv.field_size_limit(MAX_FIELD)
    bad: list[BadRow] = []

    def text() -> Iterator[str]:
        for _, line in _chained(first, lines):
            if isinstance(line, BadRow):
                bad.append(line)
                line = "\n"
            yield line

    reader = csv.reader(text())
    header = next(reader, [])
    start = reader.line_num + 1
    for cells in _unbroken(reader, bad):
        while bad:
            yield bad[0].line, bad.pop(0)
        line, start = start, reader.line_num + 1
        if not cells:
            continue
        if len(cells) != len(header):
            yield line, BadRow(line, f"has {len(cells)} fields and the header {len(header)}")
            continue
        try:
            yield line, {name: read_cell(cell, kinds.get(name)) for name, cell in zip(header, cells, strict=True)}
        except ValueError as error:
            yield line, BadRow(line, str(error))
    for row in bad:
        yield row.line, row


def _unbroken(reader: Any, bad: list[BadRow]) -> Iterator[list[str]]:
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.append(BadRow(reader.line_num, str(error)))


BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


def read_cell(cell: str, kind: str | None) -> Any:
    """The value of a CSV cell; what is empty is None except for text. Raises ValueError."""
    if kind is None:
        return cell
    if cell == "":
        return None
    if kind == "bool":
        if cell.strip().lower() not in BOOLEANS:
            raise ValueError(f"{cell!r} is not true or false")
        return BOOLEANS[cell.strip().lower()]
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](cell)
    try:
        return json.loads(cell)
    except ValueError:
        pass
    try:
        return ast.literal_eval(cell)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{cell[:60]!r}... is neither JSON nor a Python literal") from None


def csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
