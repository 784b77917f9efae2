"""The vote log: votes and the decisions on them, two chains in which each entry's hash covers the one before.

An entry is hashed as canonical JSON (sorted keys, no spaces, UTF-8, times in UTC with microseconds), version included.
What may have to be forgotten (visitor, texts, an imported file's details) enters through one digest under a random
salt: without the salt the digest says nothing, and the chain still holds. The head of a chain is signed by whoever
appends, so that a removed end shows as well. Knows neither the key nor where it comes from: `sign` is an argument.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

VERSION = 1  # of the hashed shape: these bytes are published, and never change under this number
START = "0" * 64  # what the first entry follows
VOTES, DECISIONS = "votes", "decisions"
VOTE_FIELDS = ("battle", "model_a", "model_b", "kind", "created_at", "private")
DECISION_FIELDS = ("vote", "counted", "reason", "decided_by", "note", "created_at")

Sign = Callable[[str], str]


@dataclass(frozen=True)
class Entry:
    """One row of a chain as it is published. `body` is what it says, numbered and linked by the other three."""

    number: int
    previous_hash: str
    chain_hash: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Head:
    """`signed_from`: the entries up to there were in the chain before there was a valid signature over it."""

    name: str
    entries: int = 0
    chain_hash: str = START
    signed_from: int = 0
    signature: str | None = None

    @property
    def text(self) -> str:
        """What is signed."""
        return f"{self.name} {self.entries} {self.chain_hash} {self.signed_from}"

    def is_signed(self, sign: Sign) -> bool:
        return self.signature is not None and sign(self.text) == self.signature


def vote_body(
    *, battle: str, model_a: str, model_b: str, kind: str, created_at: datetime, private_digest: str
) -> dict[str, Any]:
    return {
        "battle": battle,
        "model_a": model_a,
        "model_b": model_b,
        "kind": kind,
        "created_at": as_text(created_at),
        "private": private_digest,
    }


def decision_body(
    *, vote: int, counted: bool, reason: str, decided_by: str, note: str, created_at: datetime
) -> dict[str, Any]:
    """`vote` is the number of a vote."""
    return {
        "vote": vote,
        "counted": counted,
        "reason": reason,
        "decided_by": decided_by,
        "note": note,
        "created_at": as_text(created_at),
    }


def private_digest(
    salt: str, visitor: str | None, conversation: Sequence[Mapping[str, str]], details: Mapping[str, Any] | None
) -> str:
    """`visitor` by its public id; `conversation` is one {"prompt", "a", "b"} a turn."""
    said = {"salt": salt, "visitor": visitor, "conversation": list(conversation), "details": details}
    return digest(said)


def chain_hash(number: int, previous_hash: str, body: Mapping[str, Any]) -> str:
    return digest({"version": VERSION, "number": number, "previous": previous_hash, **body})


def digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def as_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def append(head: Head, body: Mapping[str, Any], sign: Sign | None) -> tuple[Entry, Head]:
    """The next entry, and the head after it. A head that comes without a valid signature is not covered up: the new
    one says from which entry on it vouches."""
    number = head.entries + 1
    entry = Entry(number, head.chain_hash, chain_hash(number, head.chain_hash, body), body)
    signed_from = head.signed_from
    if head.entries and not (sign and head.is_signed(sign)):
        signed_from = head.entries
    after = Head(head.name, number, entry.chain_hash, signed_from)
    return entry, signed(after, sign)


def signed(head: Head, sign: Sign | None) -> Head:
    return Head(head.name, head.entries, head.chain_hash, head.signed_from, sign and sign(head.text))


# Verifying


@dataclass(frozen=True)
class KeptVote:
    """A vote of the log with what is kept beside the chain: `private` is None where nothing of it is left."""

    entry: Entry
    salt: str | None
    private: Mapping[str, Any] | None  # visitor, conversation and details
    counted: bool
    reason: str | None


@dataclass(frozen=True)
class Report:
    """`faults` is empty for a log that is whole. `forgotten` votes have lost their texts at their visitor's wish."""

    faults: tuple[str, ...]
    votes: int
    decisions: int
    counted: int
    forgotten: int
    heads: Mapping[str, Head]
    hashes: frozenset[str] = frozenset()  # of the votes: one that was published must be among them


def verify(
    votes: Iterable[KeptVote], decisions: Iterable[Entry], heads: Mapping[str, Head], sign: Sign | None
) -> Report:
    """Reads both chains once, in the order in which they are stored. Without `sign` no signature is looked at."""
    decided: dict[int, tuple[bool, str | None]] = {}
    decision_ends, vote_ends = _End(), _End()
    faults = list(_chain_faults(DECISIONS, _noted(decisions, decided), decision_ends))
    tally = {"counted": 0, "forgotten": 0}
    beside: list[str] = []
    hashes: set[str] = set()

    def entries() -> Iterator[Entry]:
        for vote in votes:
            tally["counted"] += vote.counted
            tally["forgotten"] += vote.salt is None
            beside.extend(_faults_beside(vote, decided.pop(vote.entry.number, (True, None))))
            hashes.add(vote.entry.chain_hash)
            yield vote.entry

    faults = [*_chain_faults(VOTES, entries(), vote_ends), *beside, *faults]
    faults += [f"a decision is about vote {number}, which is not there" for number in sorted(decided)]
    for name, end in ((VOTES, vote_ends), (DECISIONS, decision_ends)):
        faults += _head_faults(heads[name], end, sign)
    return Report(
        tuple(faults), vote_ends.entries, decision_ends.entries, **tally, heads=heads, hashes=frozenset(hashes)
    )


@dataclass
class _End:
    """Where a chain was seen to end."""

    entries: int = 0
    number: int = 0
    chain_hash: str = START


def _noted(decisions: Iterable[Entry], decided: dict[int, tuple[bool, str | None]]) -> Iterator[Entry]:
    for entry in decisions:
        counted = entry.body["counted"]
        decided[entry.body["vote"]] = counted, None if counted else entry.body["reason"]
        yield entry


def _faults_beside(vote: KeptVote, decided: tuple[bool, str | None]) -> Iterator[str]:
    number = vote.entry.number
    if (vote.counted, vote.reason) != decided:
        stands = {True: "counted", False: "not counted"}
        yield (
            f"vote {number} stands as {stands[vote.counted]} ({vote.reason}); "
            f"the last decision on it says {stands[decided[0]]} ({decided[1]})"
        )
    if vote.salt is None or vote.private is None:
        return
    if private_digest(vote.salt, **vote.private) != vote.entry.body["private"]:
        yield f"vote {number}: its visitor, its texts or its details were edited"


def _chain_faults(name: str, entries: Iterable[Entry], end: _End) -> Iterator[str]:
    """A sentence for every entry that was edited, is missing or out of place; `entries` in the order stored."""
    what = name.removesuffix("s")
    for entry in entries:
        if entry.number <= end.number:
            yield f"{what} {entry.number} stands after {what} {end.number}: re-ordered, or there twice"
        elif entry.number > end.number + 1:
            first, last = end.number + 1, entry.number - 1
            yield f"{what} {first} is missing" if first == last else f"{name} {first} to {last} are missing"
        elif entry.previous_hash != end.chain_hash:
            yield f"{what} {entry.number} does not follow on the {what} that stands before it"
        if chain_hash(entry.number, entry.previous_hash, entry.body) != entry.chain_hash:
            yield f"{what} {entry.number} was edited: its hash is not that of what it says"
        end.entries += 1
        if entry.number > end.number:
            end.number, end.chain_hash = entry.number, entry.chain_hash


def _head_faults(head: Head, end: _End, sign: Sign | None) -> Iterator[str]:
    if head.entries > end.number:
        first = end.number + 1
        which = (
            f"{head.name} {first} to {head.entries} are" if head.entries > first else f"the last of the {head.name} is"
        )
        yield f"{which} missing: the head of the log tells of {head.entries}"
    elif head.entries < end.number:
        yield f"the {head.name} after {head.entries} are not in the head of the log: another hand put them there"
    elif head.chain_hash != end.chain_hash:
        yield f"the head of the {head.name} is not the hash of the last of them"
    if sign and head.entries and not head.is_signed(sign):
        yield f"the head of the {head.name} has no valid signature"
