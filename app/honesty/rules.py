"""Two plain rules on hashed addresses: many votes at once, and many visitors from one address."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from app.honesty.casts import Cast


@dataclass(frozen=True)
class Limits:
    """A vote needs two answers to be read: more than `burst_votes` in `burst` is no reading. An office shares an
    address; more than `visitors` new cookies from one within `day` that all vote is no office of the usual size."""

    burst_votes: int = 10
    burst: timedelta = timedelta(minutes=1)
    visitors: int = 20
    day: timedelta = timedelta(days=1)


def bursts(casts: Sequence[Cast], limits: Limits) -> dict[str, int]:
    """By visitor, the most votes within `limits.burst`, of the visitor or of the address, where they are too many."""
    found: dict[str, int] = {}
    for key in (lambda cast: cast.visitor, lambda cast: cast.address):
        for group in _grouped(casts, key).values():
            for start, end in _windows(group, limits.burst):
                if end - start > limits.burst_votes:
                    for cast in group[start:end]:
                        found[cast.visitor] = max(found.get(cast.visitor, 0), end - start)
    return found


def crowded(casts: Sequence[Cast], limits: Limits) -> dict[str, int]:
    """By visitor, how many visitors voted from the same address within `limits.day`, where they are too many."""
    found: dict[str, int] = {}
    for group in _grouped(casts, lambda cast: cast.address).values():
        for start, end in _windows(group, limits.day):
            visitors = {cast.visitor for cast in group[start:end]}
            if len(visitors) > limits.visitors:
                found |= {visitor: max(found.get(visitor, 0), len(visitors)) for visitor in visitors}
    return found


def _grouped(casts: Sequence[Cast], key: Callable[[Cast], str | None]) -> dict[str, list[Cast]]:
    groups: dict[str, list[Cast]] = defaultdict(list)
    for cast in sorted(casts, key=lambda cast: cast.at):
        if (name := key(cast)) is not None:
            groups[name].append(cast)
    return groups


def _windows(group: list[Cast], width: timedelta):
    """The longest run of votes within `width` that ends at each vote: its start and its end."""
    start = 0
    for end, cast in enumerate(group, 1):
        while cast.at - group[start].at > width:
            start += 1
        yield start, end
