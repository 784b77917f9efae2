"""A vote as every format understands it, and what a reader says of a row that is none. Knows no file, no database."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from db.tables import storable

LONGEST_NAME = 200
FIRST_YEAR, LAST_YEAR = 1970, 9998  # any offset from UTC leaves such a time a time


@dataclass(frozen=True)
class Said:
    """One turn: the prompt and what both sides answered."""

    prompt: str
    a: str
    b: str


@dataclass(frozen=True)
class VoteRecord:
    """`battle` and `visitor` are what the file calls them. `details` is what else it said: {"format", "columns":
    values that the other fields do not tell, "absent": columns that this row did not have}."""

    model_a: str
    model_b: str
    kind: str  # a key of db.vote_kinds.VOTE_KINDS
    battle: str | None = None
    visitor: str | None = None
    created_at: datetime | None = None  # aware
    conversation: tuple[Said, ...] = ()
    counted: bool = True
    reason: str | None = None
    salt: str | None = None  # of the private digest; ours only
    pair_probability: float | None = None
    side_coin: bool | None = None
    imported_from: str | None = None
    number: int | None = None  # in the log of the file; ours only
    private: str | None = None  # the private digest; ours only
    details: Mapping[str, Any] | None = None
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class BadRow:
    """A vote that cannot be understood."""

    line: int
    reason: str


@dataclass(frozen=True)
class OtherRow:
    """A row that is no vote, nor wants to be one."""

    line: int
    reason: str


@dataclass(frozen=True)
class DecisionRecord:
    """Whether a vote of the same file, by its number, counts from then on; ours only."""

    vote: int
    counted: bool
    reason: str
    decided_by: str
    note: str
    created_at: datetime
    line: int = field(default=0, compare=False)


Row = VoteRecord | DecisionRecord | BadRow | OtherRow


def as_stored(record: VoteRecord, format_name: str) -> VoteRecord:
    """The record with the ids that the database gives it: a battle's from the file's own, so that the same vote is
    known when it comes twice; a visitor's apart from those of other files."""
    known = f"{format_name}\0{record.battle}" if record.battle else None
    return replace(
        record,
        battle=known and hashlib.sha256(known.encode("utf-8", "surrogatepass")).hexdigest()[:32],
        visitor=record.visitor and f"{format_name}:{record.visitor}",
    )


def with_details(record: VoteRecord, details: Mapping[str, Any] | None) -> VoteRecord:
    """Raises ValueError for numbers that JSON, and so the log, does not have."""
    try:
        json.dumps(details, allow_nan=False)
    except ValueError:
        raise ValueError("holds NaN or an infinite number, which are no JSON") from None
    return replace(record, details=details)


def check_length(*names: str) -> None:
    """Raises ValueError for what is no name of a model but a text."""
    if (longest := max(map(len, names))) > LONGEST_NAME:
        raise ValueError(f"a model's name of {longest:,} characters; at most {LONGEST_NAME} are a name")


def checked(record: VoteRecord) -> VoteRecord:
    """With its texts as the database will hold them, since the log's digest is of those. Raises ValueError for what no
    vote may be, and for what no database can hold."""
    if not record.model_a or not record.model_b:
        raise ValueError("a model has no name")
    if record.model_a == record.model_b:
        raise ValueError(f"{record.model_a!r} against itself")
    check_length(record.model_a, record.model_b)
    names = tuple(filter(None, (record.model_a, record.model_b, record.visitor)))
    if any("\0" in name for name in names):
        raise ValueError("the name of a model or a visitor holds NUL")
    texts = [text for said in record.conversation for text in (said.prompt, said.a, said.b)]
    for text in (*names, *texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("a text holds half a character (a lone surrogate)") from None
    if record.created_at and not FIRST_YEAR <= record.created_at.year <= LAST_YEAR:
        raise ValueError(f"was cast in the year {record.created_at.year}")
    kept = tuple(Said(*map(storable, vars(said).values())) for said in record.conversation)
    return replace(record, conversation=kept)


# Conversations as lists of messages, the way most data sets keep them


def messages(conversation: Sequence[Said], side: str) -> list[dict[str, Any]]:
    listed = []
    for turn in conversation:
        listed.append({"role": "user", "content": turn.prompt})
        listed.append({"role": "assistant", "content": getattr(turn, side)})
    return listed


def conversation_of(a: Any, b: Any) -> tuple[Said, ...]:
    """Turns of two lists of messages; () where they are not a plain exchange on the same questions. What does not fit
    here is kept as it is by who calls."""
    sides = [_exchange(each) for each in (a, b)]
    if None in sides or [prompt for prompt, _ in sides[0]] != [prompt for prompt, _ in sides[1]]:
        return ()
    return tuple(Said(prompt, said, other) for (prompt, said), (_, other) in zip(*sides, strict=True))


def _exchange(listed: Any) -> list[tuple[str, str]] | None:
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        return None
    said = [(each.get("role"), text_of(each.get("content"))) for each in listed if each.get("role") != "system"]
    roles = [role for role, _ in said]
    if roles != ["user", "assistant"] * (len(said) // 2) or any(text is None for _, text in said):
        return None
    return [(said[i][1], said[i + 1][1]) for i in range(0, len(said), 2)]


def text_of(content: Any) -> str | None:
    """A message's text, also where it comes in parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return None
