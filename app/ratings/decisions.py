"""What a reader wants to decide: who is first, how many votes that still needs, and how few it hangs on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from app.ratings import bradley_terry, likelihood
from app.ratings.games import Cells
from app.ratings.intervals import Rated, Z
from app.ratings.likelihood import SCALE, Fit

UNREACHABLE = 10**9  # votes: more than that are none
RIVALS = 3  # that an attack on the first place is worked out for
ROUNDS_OF_AIM = 4  # in which it aims anew, at where it has come to


@dataclass(frozen=True)
class Separation:
    """Of the first from the second, at the gap there is now. `votes` more, spread as the votes so far: 0 where they
    are apart already, None where nothing parts them (no gap, or no votes between them). `direct`: if all of them were
    on battles between these two."""

    first: str
    second: str
    gap: float
    error: float
    votes: int | None
    direct: int | None


@dataclass(frozen=True)
class Fragility:
    """`votes` is the fewest found whose removal puts `successor` first; `share` of all votes. Each count is proved by
    fitting again without them; that no fewer would do is not (the search follows influence, largest first)."""

    votes: int
    share: float
    successor: str


def separation(rated: Rated, models: tuple[str, ...], votes: int, islands: np.ndarray) -> Separation | None:
    """None where there are not two to compare, or the two that lead never met through others."""
    if len(models) < 2:
        return None
    first, second = np.argsort(-rated.ratings, kind="stable")[:2]
    if islands[first] != islands[second]:
        return None
    gap = float(rated.ratings[first] - rated.ratings[second])
    spread = rated.covariance
    variance = float(spread[first, first] + spread[second, second] - 2 * spread[first, second])
    more = direct = None
    if gap > 1e-9:
        wanted = (Z / gap) ** 2  # one over the variance that parts them
        a_vote_tells = expit(gap / SCALE) * expit(-gap / SCALE) / SCALE**2
        apart = variance * wanted <= 1
        more = 0 if apart else _whole(votes * (variance * wanted - 1))
        direct = 0 if apart else _whole((wanted - 1 / variance) / max(a_vote_tells, 1e-300))
    return Separation(models[first], models[second], gap, math.sqrt(max(variance, 0.0)), more, direct)


def _whole(votes: float) -> int | None:
    return math.ceil(votes) if votes <= UNREACHABLE else None


def fragility(cells: Cells, fitted: Fit, models: tuple[str, ...]) -> Fragility | None:
    """How few votes the first place hangs on, under Bradley–Terry (Huang, Shen, Wei and Broderick 2025).

    For each rival that is near, the votes that hold the leader above it most are taken away until it is not above any
    more: by their influence on the gap (row . H^-1 . slope), aimed anew from where the removal has led, and the last
    step by bisection. None where there is one model, or where no removal changes the first place.
    """
    if len(models) < 2:
        return None
    order = np.argsort(-fitted.strengths, kind="stable")
    leader, rivals = order[0], order[1 : 1 + RIVALS]
    chord = likelihood.chord_of(bradley_terry.LIKELIHOOD, cells, fitted)
    best: tuple[float, int] | None = None
    for rival in rivals:
        removed = _topple(cells, fitted, leader, rival, chord, math.inf if best is None else best[0])
        if removed is not None and (best is None or removed < best[0]):
            best = (removed, rival)
    if best is None:
        return None
    return Fragility(int(best[0]), best[0] / float(cells.count.sum()), models[best[1]])


def _topple(cells: Cells, fitted: Fit, leader: int, rival: int, chord: np.ndarray, limit: float) -> float | None:
    """How many votes were taken away until `rival` stood above `leader`; None if that needs `limit` or more."""
    left, now = cells.count, fitted.parameters

    def lead_without(order: np.ndarray, votes: int) -> tuple[np.ndarray, np.ndarray]:
        counts = _without(left, order, votes)
        return counts, likelihood.refit(bradley_terry.LIKELIHOOD, cells, counts[None], now, chord)[0]

    for _ in range(ROUNDS_OF_AIM):
        holds = _hold(cells, left, now, leader, rival, chord)
        order = np.argsort(-holds, kind="stable")
        order = order[holds[order] > 0]
        enough = _predicted(left[order], holds[order], now[leader] - now[rival])
        trial, after = lead_without(order, enough)
        if after[rival] <= after[leader]:
            left, now = trial, after
            if cells.count.sum() - left.sum() >= limit or not left.any():
                return None
            continue
        low, step = 0, 1  # `low` does not topple, while `enough` does; the guess is good, so look just below it first
        while enough - low > 1:
            middle = max(enough - step, (low + enough) // 2)
            after = lead_without(order, middle)[1]
            low, enough = (low, middle) if after[rival] > after[leader] else (middle, enough)
            step *= 2
        taken = cells.count.sum() - left.sum() + enough
        return float(taken) if taken < limit else None
    return None


def _hold(cells: Cells, left: np.ndarray, now: np.ndarray, leader: int, rival: int, chord: np.ndarray) -> np.ndarray:
    """[cell] by how much a game of it widens the leader's lead, to first order."""
    slope, _ = bradley_terry.LIKELIHOOD.slope(cells.score, cells.lead(now), 0.0)
    return np.where(left > 0, slope * cells.lead(chord[leader] - chord[rival]), 0.0)


def _predicted(counts: np.ndarray, holds: np.ndarray, gap: float) -> int:
    """How many votes, in this order, hold that gap between them; all where they do not."""
    reached = np.cumsum(holds * counts)
    cell = int(np.searchsorted(reached, gap))
    if cell == len(counts):
        return int(counts.sum())
    before = reached[cell - 1] if cell else 0.0
    return int(counts[:cell].sum()) + max(1, math.ceil((gap - before) / holds[cell] - 1e-9))


def _without(left: np.ndarray, order: np.ndarray, votes: int) -> np.ndarray:
    """The counts less the first so many votes in that order of cells."""
    taken = left.copy()
    room = np.cumsum(left[order])
    whole = int(np.searchsorted(room, votes, side="right"))
    taken[order[:whole]] = 0
    if whole < len(order):
        taken[order[whole]] -= votes - (room[whole - 1] if whole else 0)
    return taken
