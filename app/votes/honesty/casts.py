"""A vote as the tests of honesty see it: who, from where, when, on which pair, and how."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Cast:
    """`first` and `second` are model ids in their order; `outcome` is of the first: first, second, tie or both_bad."""

    vote: int  # id
    visitor: str
    address: str | None  # a hash
    at: datetime
    first: int
    second: int
    outcome: str

    @classmethod
    def of(cls, vote: int, visitor: str, address: str | None, at: datetime, a: int, b: int, kind: str) -> Cast:
        won = {"a": a, "b": b}.get(kind)
        first, second = min(a, b), max(a, b)
        outcome = kind if won is None else "first" if won == first else "second"
        return cls(vote, visitor, address, at, first, second, outcome)
