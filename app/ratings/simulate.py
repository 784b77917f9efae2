"""Simulations that show what the methods promise: intervals that hold, and pairs drawn so that fewer votes do.

Pure and seeded: the same seed gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from app.ratings import bradley_terry
from app.ratings.games import Cells, Games
from app.ratings.intervals import Z, always_valid, from_errors
from app.ratings.likelihood import CENTRE, SCALE
from app.ratings.pairing import draw_weights

PAPER = {"uniform": 6800, "active": 4400, "width": 0.2}  # Chiang et al. 2024, section 7.1, figure 7
MOST_VOTES = 100_000


def random_games(strengths: np.ndarray, votes: int, rng: np.random.Generator) -> Games:
    """Votes on uniformly drawn pairs of models of these strengths, in natural units; without ties."""
    n = len(strengths)
    left = rng.integers(n, size=votes)
    right = (left + rng.integers(1, n, size=votes)) % n
    score = (rng.random(votes) < expit(strengths[left] - strengths[right])).astype(float)
    return Games(tuple(f"model {i:03}" for i in range(n)), left, right, score)


@dataclass(frozen=True)
class Coverage:
    """Shares of (run, model) whose interval held the truth: at a look, at all looks; always-valid ones at all looks."""

    plain_each_look: float
    plain_every_look: float
    always_valid: float
    looks: int
    runs: int
    seed: int


def coverage(*, models: int, votes: int = 2000, look_every: int = 50, runs: int = 100, seed: int = 0) -> Coverage:
    """Boards looked at again and again while their votes come in."""
    rng = np.random.default_rng(seed)
    looks = range(look_every * 2, votes + 1, look_every)
    plain, always = [], []
    for _ in range(runs):
        strengths = rng.normal(0, 0.7, models)
        strengths -= strengths.mean()
        truth = CENTRE + SCALE * strengths
        games = random_games(strengths, votes, rng)
        held = np.array([_holds(games.only(np.arange(look)), truth) for look in looks])  # [look, kind, model]
        plain.append(held[:, 0])
        always.append(held[:, 1])
    plain_held, always_held = np.array(plain), np.array(always)  # [run, look, model]
    return Coverage(
        float(plain_held.mean()),
        float(plain_held.all(axis=1).mean()),
        float(always_held.all(axis=1).mean()),
        len(looks),
        runs,
        seed,
    )


def _holds(games: Games, truth: np.ndarray) -> np.ndarray:
    """[kind, model] whether the plain and the always-valid interval hold the truth."""
    cells = Cells.of(games)
    rated = bradley_terry.rate(games, cells, "sandwich", 0, np.random.default_rng(0))
    bounds = (from_errors(rated.ratings, rated.covariance), always_valid(rated, games.tally()))
    return np.array([(lower <= truth) & (truth <= upper) for lower, upper in bounds])


@dataclass(frozen=True)
class PairingCurve:
    """`votes` [step] and the mean width of the intervals after so many, of the win matrix and of the ratings (in
    natural units, as in the paper); `needed` votes for the width asked for, None where it was not reached."""

    rule: str
    votes: list[int]
    matrix_width: list[float]
    rating_width: list[float]
    needed: int | None


def pairing(
    *, strengths: np.ndarray, width: float, seed: int, rules: tuple[str, ...] = ("uniform", "active"), step: int = 50
) -> list[PairingCurve]:
    """How many votes each rule of drawing pairs needs until the win matrix is known to a mean width.

    Votes are of Bradley–Terry at the given strengths. A pair's chance of winning is estimated by its share of wins,
    with a 95% interval of Wald's kind around it, (wins + 1/2) / (votes + 1); width is upper less lower bound.
    """
    return [_curve(rule, strengths, width, np.random.default_rng(seed), step) for rule in rules]


def _curve(rule: str, strengths: np.ndarray, width: float, rng: np.random.Generator, step: int) -> PairingCurve:
    n = len(strengths)
    first, second = np.triu_indices(n, 1)
    chance = expit(strengths[first] - strengths[second])
    played, won = np.zeros(len(first)), np.zeros(len(first))
    votes, matrix_width, rating_width, needed = [], [], [], None
    while sum(votes[-1:]) < MOST_VOTES and needed is None:
        for _ in range(step):
            weights = np.ones(len(first)) if rule == "uniform" else draw_weights(played, won)
            pair = rng.choice(len(first), p=weights / weights.sum())
            played[pair] += 1
            won[pair] += rng.random() < chance[pair]
        votes.append(int(played.sum()))
        share = (won + 0.5) / (played + 1)
        matrix_width.append(float(np.mean(2 * Z * np.sqrt(share * (1 - share) / np.maximum(played, 1)))))
        rating_width.append(_rating_width(n, first, second, played, won))
        if matrix_width[-1] <= width:
            needed = votes[-1]
    return PairingCurve(rule, votes, matrix_width, rating_width, needed)


def _rating_width(n: int, first: np.ndarray, second: np.ndarray, played: np.ndarray, won: np.ndarray) -> float:
    """Mean width of the 95% intervals of the strengths, in natural units."""
    count = np.concatenate([won, played - won])
    score = np.concatenate([np.ones(len(won)), np.zeros(len(won))])
    there = count > 0
    twice = np.concatenate([first, first])[there], np.concatenate([second, second])[there]
    cells = Cells(n, *twice, score[there], count[there], count[there], np.zeros((int(there.sum()), 0)))
    games = Games(tuple(map(str, range(n))), *(np.zeros(0, int),) * 2, np.zeros(0))
    rated = bradley_terry.rate(games, cells, "sandwich", 0, np.random.default_rng(0))
    return float(np.mean(rated.upper - rated.lower) / SCALE)
