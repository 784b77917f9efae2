"""Visitors who vote unlike everybody else: the sequential test of "Chatbot Arena" (arXiv 2403.04132, section 5.3).

Each vote gets a p-value against what others voted on its pair before: the share of votes, itself included, on outcomes
rarer than its own, plus a random part of those on its own outcome. If the visitor votes as the others do it is uniform,
whatever they vote. (The paper's counts ratings at least as high, one-sided; by rarity a rigger shows whichever side the
model is on. The random part is drawn by a seeded hash of the vote; without it four outcomes would find nobody.) After j
votes Fisher's M_j = -2 sum(ln p) is beyond the 1 - alpha/5 quantile of chi-square with 2j degrees with a chance of
alpha/5; it is looked at after five random j from 1 to 100, so that nobody knows when. The votes of whoever is found
leave the history: else the first riggers would make the next look ordinary.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from scipy.special import chdtrc

from app.votes.honesty.casts import Cast

LOOKS, HORIZON = 5, 100
ALPHA = 0.1
Votes = dict[tuple[int, int], Counter[str]]  # by pair


@dataclass(frozen=True)
class Finding:
    """The look at which a visitor was found out: after `votes` of theirs, with a p-value below alpha / LOOKS."""

    visitor: str
    votes: int
    p: float


def p_value(others: Counter[str], outcome: str, part: float) -> float:
    """Of one vote against those of others on its pair; `part`, uniform in (0, 1], of those on the same outcome."""
    counts = others + Counter([outcome])
    own = counts[outcome]
    rarer = sum(count for count in counts.values() if count < own)
    as_rare = sum(count for count in counts.values() if count == own)
    return (rarer + part * as_rare) / counts.total()


def looks(visitor: str, seed: int) -> list[int]:
    """After which votes to look at this visitor: the same every time, and known to nobody without the seed."""
    return sorted(random.Random(f"{seed} {visitor}").sample(range(1, HORIZON + 1), LOOKS))


def find(casts: Sequence[Cast], *, alpha: float = ALPHA, seed: int = 0) -> list[Finding]:
    """Visitors found anomalous, in the order in which they were; of each the first HORIZON votes are looked at."""
    history: Votes = defaultdict(Counter)
    records: dict[str, Record] = {}
    for cast in sorted(casts, key=lambda cast: (cast.at, cast.vote)):
        record = records.get(cast.visitor)
        if record is None:
            record = records[cast.visitor] = Record(frozenset(looks(cast.visitor, seed)))
        if record.finding:
            continue
        pair = cast.first, cast.second
        part = 1 - random.Random(f"{seed} vote {cast.vote}").random()
        record.add(cast, p_value(history[pair] - record.own[pair], cast.outcome, part), alpha)
        if record.finding:
            for each, counts in record.own.items():
                history[each] -= counts
        else:
            history[pair][cast.outcome] += 1
    return [record.finding for record in records.values() if record.finding]


@dataclass
class Record:
    """What was seen of one visitor so far."""

    looks: frozenset[int]
    own: Votes = field(default_factory=lambda: defaultdict(Counter))
    votes: int = 0
    statistic: float = 0.0
    finding: Finding | None = None

    def add(self, cast: Cast, p: float, alpha: float) -> None:
        self.votes += 1
        self.statistic -= 2 * math.log(p)
        if self.votes in self.looks:
            tail = float(chdtrc(2 * self.votes, self.statistic))
            if tail < alpha / LOOKS:
                self.finding = Finding(cast.visitor, self.votes, tail)
        if not self.finding:
            self.own[cast.first, cast.second][cast.outcome] += 1
