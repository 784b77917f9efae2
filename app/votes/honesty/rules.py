"""Two plain rules on hashed addresses: many votes at once, and many visitors from one address."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from app.votes.honesty.casts import Cast


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
            votes = [end - start for start, end in _windows(group, limits.burst)]
            _note(found, group, _most_around(group, limits.burst, votes), limits.burst_votes)
    return found


def crowded(casts: Sequence[Cast], limits: Limits) -> dict[str, int]:
    """By visitor, how many visitors voted from the same address within `limits.day`, where they are too many."""
    found: dict[str, int] = {}
    for group in _grouped(casts, lambda cast: cast.address).values():
        visitors = list(_visitors(group, limits.day))
        _note(found, group, _most_around(group, limits.day, visitors), limits.visitors)
    return found


def _grouped(casts: Sequence[Cast], key: Callable[[Cast], str | None]) -> dict[str, list[Cast]]:
    groups: dict[str, list[Cast]] = defaultdict(list)
    for cast in sorted(casts, key=lambda cast: cast.at):
        if (name := key(cast)) is not None:
            groups[name].append(cast)
    return groups


def _note(found: dict[str, int], group: Sequence[Cast], numbers: Iterable[int], limit: int) -> None:
    for cast, number in zip(group, numbers, strict=True):
        if number > limit:
            found[cast.visitor] = max(found.get(cast.visitor, 0), number)


def _windows(group: Sequence[Cast], width: timedelta) -> Iterator[tuple[int, int]]:
    """The longest run of votes within `width` that ends at each vote: its start and its end."""
    start = 0
    for end, cast in enumerate(group, 1):
        while cast.at - group[start].at > width:
            start += 1
        yield start, end


def _visitors(group: Sequence[Cast], width: timedelta) -> Iterator[int]:
    """How many visitors the window of each vote holds."""
    within: Counter[str] = Counter()
    first = 0
    for start, end in _windows(group, width):
        within[group[end - 1].visitor] += 1
        for gone in group[first:start]:
            within[gone.visitor] -= 1
            if not within[gone.visitor]:
                del within[gone.visitor]
        first = start
        yield len(within)


def _most_around(group: Sequence[Cast], width: timedelta, numbers: Sequence[int]) -> Iterator[int]:
    """For each vote the greatest of `numbers`, one a window, over the windows that hold it: a sliding maximum, in time
    proportional to the votes."""
    starts = [start for start, _ in _windows(group, width)]
    falling: deque[int] = deque()  # windows that reach this vote, each greater than all behind it
    reached = 0
    for vote in range(len(group)):
        while reached < len(group) and starts[reached] <= vote:
            while falling and numbers[falling[-1]] <= numbers[reached]:
                falling.pop()
            falling.append(reached)
            reached += 1
        while falling[0] < vote:
            falling.popleft()
        yield numbers[falling[0]]
