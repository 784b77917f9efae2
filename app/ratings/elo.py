"""Elo: each game moves its two players by what it surprised. Right only in the order of play."""

from __future__ import annotations

import numpy as np

from app.ratings.games import Cells, Games
from app.ratings.intervals import Rated, from_rounds

K = 4.0
SCALE = 400.0
BASE = 10.0
START = 1000.0
MAX_DRAWN = 100_000_000  # games, 4 bytes each


def update(left: float, right: float, score: float) -> tuple[float, float]:
    """The ratings of both after a game that gave the left one `score` (1 won, 0 lost, 0.5 tied or both bad)."""
    expected = 1 / (1 + BASE ** ((right - left) / SCALE))
    moved = K * (score - expected)
    return left + moved, right - moved


def elo(games: Games) -> np.ndarray:
    """[model] ratings after all games."""
    ratings = [START] * len(games.models)
    for left, right, score in zip(games.left.tolist(), games.right.tolist(), games.score.tolist(), strict=True):
        ratings[left], ratings[right] = update(ratings[left], ratings[right], score)
    return np.array(ratings)


def rate(games: Games, cells: Cells, ci: str, rounds: int, rng: np.random.Generator) -> Rated:
    """Covariates, weights and visitors are not its business: Elo is kept vote by vote, for comparison."""
    drawn = bootstrap(games, rounds, rng)
    return Rated(elo(games), *from_rounds(drawn), np.atleast_2d(np.cov(drawn.T)), rounds=rounds)


def bootstrap(games: Games, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """[round, model]: Elo over as many games drawn with replacement, each round's in the order of play.

    The rounds of a batch advance together, drawn game by drawn game; a batch holds at most MAX_DRAWN draws at once.
    """
    batch = max(1, min(rounds, MAX_DRAWN // len(games)))
    sizes = [min(batch, rounds - done) for done in range(0, rounds, batch)]
    return np.concatenate([_bootstrap_batch(games, size, rng) for size in sizes])


def _bootstrap_batch(games: Games, rounds: int, rng: np.random.Generator) -> np.ndarray:
    ratings = np.full((rounds, len(games.models)), START)
    drawn = np.sort(rng.integers(len(games), size=(len(games), rounds), dtype=np.int32), axis=0)
    each = np.arange(rounds)
    for game in drawn:
        left, right = games.left[game], games.right[game]
        ratings[each, left], ratings[each, right] = update(ratings[each, left], ratings[each, right], games.score[game])
    return ratings
