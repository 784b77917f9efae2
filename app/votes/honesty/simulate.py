"""How well the sequential test tells riggers from honest visitors: planted ones of three kinds, and the rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from scipy.special import expit

from app.votes.honesty.anomalous import ALPHA, find
from app.votes.honesty.casts import Cast

START = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = ("favours one model", "votes against the better", "clicks at random")
OUTCOMES = ("first", "second", "tie", "both_bad")


@dataclass(frozen=True)
class Rates:
    """Over all runs: riggers found, by kind, and honest visitors left alone."""

    runs: int
    riggers: Counter
    found: Counter
    honest: int
    left_alone: int

    @property
    def true_positive_rate(self) -> float:
        return self.found.total() / self.riggers.total()

    @property
    def false_positive_rate(self) -> float:
        return 1 - self.left_alone / self.honest


def simulate(
    *,
    runs: int = 20,
    riggers: int = 14,
    honest: int = 36,
    votes: int = 100,
    history: int = 5000,
    models: int = 10,
    alpha: float = ALPHA,
    seed: int = 0,
) -> Rates:
    """Each run: `history` votes of others, then `riggers` and `honest` visitors with `votes` votes each, mixed.

    Strengths are normal with a standard deviation of one natural unit (174 rating points); an honest vote is a tie or
    "both bad" in three of ten, else Bradley-Terry.
    """
    rng = np.random.default_rng(seed)
    planted: Counter[str] = Counter()
    found: Counter[str] = Counter()
    left_alone = 0
    for run in range(runs):
        strengths = rng.normal(size=models)
        casts = [_cast(rng, strengths, "honest", f"others {n // 20}", n) for n in range(history)]
        kinds = [KINDS[n % len(KINDS)] for n in range(riggers)] + ["honest"] * honest
        turns = rng.permutation(np.repeat(np.arange(len(kinds)), votes)).tolist()
        casts += [_cast(rng, strengths, kinds[who], f"{kinds[who]} {who}", history + n) for n, who in enumerate(turns)]
        caught = {finding.visitor for finding in find(casts, alpha=alpha, seed=run)}
        for who, kind in enumerate(kinds):
            if kind == "honest":
                left_alone += f"{kind} {who}" not in caught
            else:
                planted[kind] += 1
                found[kind] += f"{kind} {who}" in caught
    return Rates(runs, planted, found, runs * honest, left_alone)


def _cast(rng: np.random.Generator, strengths: np.ndarray, kind: str, visitor: str, number: int) -> Cast:
    first, second = sorted(rng.choice(len(strengths), 2, replace=False).tolist())
    if kind == "favours one model":
        favourite = int(np.argmin(strengths))
        if favourite not in (first, second):
            first, second = sorted((favourite, first))  # battles without it are given up
        outcome = "first" if first == favourite else "second"
    elif kind == "votes against the better":
        outcome = "second" if strengths[first] > strengths[second] else "first"
    elif kind == "clicks at random":
        outcome = OUTCOMES[rng.integers(4)]
    elif rng.random() < 0.3:
        outcome = OUTCOMES[2 + rng.integers(2)]
    else:
        outcome = "first" if rng.random() < expit(strengths[first] - strengths[second]) else "second"
    return Cast(number, visitor, None, START + timedelta(seconds=number), first, second, outcome)
