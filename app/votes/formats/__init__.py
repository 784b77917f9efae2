"""Formats: votes from and for files of others. A format is a module here and a line in FORMATS.

None knows the database.

A format has `name`, `title`, `documented` (where its fields are described), `read(source)`, which gives a record for
every vote and the line and reason of every row that is none, `write(records)`, which gives the file's text, and
`loses(record)`, a sentence on what of a vote it cannot say. What is read and written again is what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Protocol

from app.votes.formats.records import Row, VoteRecord
from app.votes.formats.rows import VotesSource


class Format(Protocol):
    name: str
    title: str
    documented: str

    def read(self, file: VotesSource) -> Iterator[Row]: ...

    def write(self, records: Iterable[VoteRecord]) -> Iterator[str]: ...

    def loses(self, record: VoteRecord) -> str | None: ...


FORMATS = {  # name: module
    "arena": "ours",
    "fastchat_log": "fastchat_log",
    "lmsys_33k": "lmsys_33k",
    "lmsys_55k": "lmsys_55k",
    "lmarena_100k": "lmarena_100k",
    "lmarena_140k": "lmarena_140k",
    "comparia_votes": "comparia_votes",
    "comparia_reactions": "comparia_reactions",
    "csv": "any_csv",
}


def format_named(name: str) -> Format:
    return import_module(f"app.votes.formats.{FORMATS[name]}").FORMAT
