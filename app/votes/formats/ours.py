"""Our own JSON lines: the whole vote log, with all that verifies it and all that a new arena needs to go on from it.

The first line is {"schema": "paged-arena-votes", "version": 1, ...}; then one {"vote": ...} a vote, in the order of
the log, one {"decision": ...} for each decision on them, and last {"heads": ...}. docs/votes.md describes the fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from app.votes.formats.records import BadRow, DecisionRecord, Row, Said, VoteRecord, checked, with_details
from app.votes.formats.rows import Columns, VotesSource
from db import vote_log
from db.vote_kinds import VOTE_KINDS

SCHEMA, VERSION = "paged-arena-votes", 1
LINK = ("number", "previous_hash", "chain_hash")

Moment = Annotated[AwareDatetime, BeforeValidator(datetime.fromisoformat)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Chance = Annotated[float, Field(ge=0, le=1)]


class Link(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    number: Annotated[int, Field(ge=1)]
    previous_hash: Hash
    chain_hash: Hash


class SaidLine(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    a: str
    b: str


class VoteLine(Link):
    """What stands under "vote" in a line, and what its values may be."""

    battle: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    model_a: str
    model_b: str
    kind: str
    created_at: Moment
    private: Hash
    counted: bool
    reason: str | None
    visitor: str | None
    conversation: list[SaidLine]
    details: dict[str, Any] | None
    salt: str | None
    pair_probability: Chance | None = None
    side_coin: bool | None = None
    imported_from: str | None = None


class DecisionLine(Link):
    """What stands under "decision"."""

    vote: int
    counted: bool
    reason: str
    decided_by: str
    note: str
    created_at: Moment


class OurFormat:
    name = "arena"
    title = "our own JSON lines"
    documented = "docs/votes.md"

    def read(self, file: VotesSource) -> Iterator[Row]:
        for line, columns in file.rows({}):
            if isinstance(columns, BadRow):
                yield columns
                continue
            try:
                yield from _read_line(line, columns)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                yield BadRow(line, f"not a line of {self.title}: {_why(error)}")

    def loses(self, record: VoteRecord) -> None:
        return None


def header(program: str, exported_at: datetime) -> str:
    return _line(
        {"schema": SCHEMA, "version": VERSION, "program": program, "exported_at": vote_log.as_text(exported_at)}
    )


def vote_line(entry: vote_log.Entry, record: VoteRecord) -> str:
    vote = {
        "number": entry.number,
        "previous_hash": entry.previous_hash,
        "chain_hash": entry.chain_hash,
        **entry.body,
        "counted": record.counted,
        "reason": record.reason,
        "visitor": record.visitor,
        "conversation": [vars(turn) for turn in record.conversation],
        "details": record.details,
        "salt": record.salt,
        "pair_probability": record.pair_probability,
        "side_coin": record.side_coin,
        "imported_from": record.imported_from,
    }
    return _line({"vote": vote})


def decision_line(entry: vote_log.Entry) -> str:
    link = {name: getattr(entry, name) for name in LINK}
    return _line({"decision": {**link, **entry.body}})


def heads_line(heads: Mapping[str, vote_log.Head]) -> str:
    return _line({"heads": {name: vars(head) for name, head in heads.items()}})


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _read_line(line: int, columns: Columns) -> Iterator[Row]:
    if "schema" in columns:
        if (columns["schema"], columns.get("version")) != (SCHEMA, VERSION):
            raise ValueError(f"schema is {columns['schema']!r} version {columns.get('version')}; this reads {VERSION}")
    elif "vote" in columns:
        yield checked(_record(line, columns["vote"]))
    elif "decision" in columns:
        yield _decision(line, columns["decision"])
    elif "heads" not in columns:
        raise ValueError(f"a line is a schema, a vote, a decision or heads, not {', '.join(columns)}")


def _record(line: int, columns: Columns) -> VoteRecord:
    vote = VoteLine.model_validate(columns)
    if vote.kind not in VOTE_KINDS:
        raise ValueError(f"kind is {vote.kind!r}, and not one of {', '.join(VOTE_KINDS)}")
    said = tuple(Said(turn.prompt, turn.a, turn.b) for turn in vote.conversation)
    kept = vote.model_dump(exclude={"conversation", "previous_hash", "chain_hash", "counted", "reason"})
    return with_details(VoteRecord(**kept, conversation=said, line=line), vote.details)


def _decision(line: int, columns: Columns) -> DecisionRecord:
    decision = DecisionLine.model_validate(columns)
    return DecisionRecord(**decision.model_dump(exclude=set(LINK)), line=line)


def _why(error: Exception) -> str:
    """In a sentence; of a line with several faults the first."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}" if place else "its vote or decision is no object"
    return f"{type(error).__name__} {error}" if not isinstance(error, ValueError) else str(error)


# Verifying a file


def verify(file: VotesSource, sign: vote_log.Sign | None) -> vote_log.Report:
    """Of a file as it was exported. Raises ValueError where it is none, with the line."""
    votes: list[vote_log.KeptVote] = []
    decisions: list[vote_log.Entry] = []
    heads: dict[str, vote_log.Head] = {}
    for line, columns in file.rows({}):
        try:
            if isinstance(columns, BadRow):
                raise ValueError(columns.reason)
            list(_read_line(line, columns))
            if "vote" in columns:
                votes.append(_kept(columns["vote"]))
            elif "decision" in columns:
                decisions.append(_entry(columns["decision"], vote_log.DECISION_FIELDS))
            elif "heads" in columns:
                heads = {name: vote_log.Head(**head) for name, head in columns["heads"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {line}: {_why(error)}") from error
    if heads.keys() != {vote_log.VOTES, vote_log.DECISIONS}:
        raise ValueError("the last line, with the heads of the log, is missing")
    return vote_log.verify(votes, decisions, heads, sign)


def _entry(fields: Columns, names: Iterable[str]) -> vote_log.Entry:
    return vote_log.Entry(*(fields[name] for name in LINK), {name: fields[name] for name in names})


def _kept(vote: Columns) -> vote_log.KeptVote:
    private = {name: vote[name] for name in ("visitor", "conversation", "details")}
    return vote_log.KeptVote(_entry(vote, vote_log.VOTE_FIELDS), vote["salt"], private, vote["counted"], vote["reason"])


FORMAT = OurFormat()
