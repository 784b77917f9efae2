"""Bradley–Terry: the strengths under which the games as they ended were the most likely.

P(i beats j) = 1 / (1 + exp(b_j - b_i)); a tie counts as half a win and half a loss, and so does "both are bad". The
rating of a model is 1000 + 400 / ln 10 * b, with the mean of b at 0. Without a prior where one finite maximum exists
(the graph of "beat or tied with" is strongly connected); otherwise with PRIOR_WEIGHT / 2 * sum(b^2) taken from the log
likelihood, so that who won everything stays finite.

Intervals: the sandwich (Huber 1967; Chiang et al. 2024, section 5), which holds also where the model does not, or the
bootstrap over games.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from app.ratings.games import Cells, Games
from app.ratings.intervals import Rated, from_errors, from_rounds

CENTRE = 1000.0
SCALE = 400.0 / math.log(10.0)
PRIOR_WEIGHT = 0.01
MAX_STEPS = 200


@dataclass(frozen=True)
class Fit:
    """`strengths` [model] in natural units with mean 0; `prior_weight` 0 where none was needed."""

    strengths: np.ndarray
    prior_weight: float

    @property
    def ratings(self) -> np.ndarray:
        return CENTRE + SCALE * self.strengths


def rate(games: Games, cells: Cells, ci: str, rounds: int, rng: np.random.Generator) -> Rated:
    fitted = fit(cells)
    if ci == "sandwich":
        bounds = from_errors(fitted.ratings, sandwich(cells, fitted))
        return Rated(fitted.ratings, *bounds, prior_weight=fitted.prior_weight)
    bounds = from_rounds(bootstrap(cells, fitted, rounds, rng))
    return Rated(fitted.ratings, *bounds, prior_weight=fitted.prior_weight, rounds=rounds)


def fit(cells: Cells, start: np.ndarray | None = None) -> Fit:
    """Newton's method with halved steps where a whole one would not climb. Milliseconds for hundreds of models."""
    prior_weight = 0.0 if cells.is_strongly_connected() else PRIOR_WEIGHT
    strengths = np.zeros(cells.num_models) if start is None else start
    height = _log_likelihood(cells, strengths, prior_weight)
    for _ in range(MAX_STEPS if cells.num_models else 0):
        expected = _expected(cells, strengths)
        slope = _scattered(cells, cells.count * (cells.score - expected)) - prior_weight * strengths
        step = np.linalg.solve(_information(cells, expected, prior_weight), slope)
        for _ in range(60):
            taken = _log_likelihood(cells, strengths + step, prior_weight)
            if taken >= height - 1e-12 * abs(height):
                break
            step = step / 2
        strengths, height = strengths + step, taken
        if np.abs(step).max() < 1e-10:
            break
    return Fit(strengths - strengths.mean() if cells.num_models else strengths, prior_weight)


def sandwich(cells: Cells, fitted: Fit) -> np.ndarray:
    """[model] standard errors of the ratings: sqrt of the diagonal of H^-1 M H^-1, games being independent.

    H is the information, M the sum over games of the squared slope. A prior counts as one more observation a model,
    whose slope varies by its weight: so what only the prior knows has the prior's own wide error, and a first vote
    proves nothing. Errors are those of the distance to the mean of the model's island.
    """
    expected = _expected(cells, fitted.strengths)
    bread = np.linalg.inv(_information(cells, expected, fitted.prior_weight))
    meat = _laplacian(cells, cells.count * (cells.score - expected) ** 2)
    meat += fitted.prior_weight * np.eye(cells.num_models)
    same_island = (islands := cells.islands())[:, None] == islands
    centred = bread - (same_island / same_island.sum(axis=1)) @ bread
    return SCALE * np.sqrt(np.einsum("ij,jk,ik->i", centred, meat, centred, optimize=True))


def bootstrap(cells: Cells, fitted: Fit, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """[round, model] ratings of resampled games, each fitted by the same rule, a prior where one is needed included."""
    return np.stack([fit(cells.resampled(rng), start=fitted.strengths).ratings for _ in range(rounds)])


def _expected(cells: Cells, strengths: np.ndarray) -> np.ndarray:
    return expit(strengths[cells.first] - strengths[cells.second])


def _log_likelihood(cells: Cells, strengths: np.ndarray, prior_weight: float) -> float:
    lead = strengths[cells.first] - strengths[cells.second]
    return float(
        np.sum(cells.count * (cells.score * lead - np.logaddexp(0, lead))) - prior_weight / 2 * np.sum(strengths**2)
    )


def _scattered(cells: Cells, values: np.ndarray) -> np.ndarray:
    """[model]: each cell's value added to its first model and taken from its second."""
    n = cells.num_models
    return np.bincount(cells.first, values, n) - np.bincount(cells.second, values, n)


def _laplacian(cells: Cells, weights: np.ndarray) -> np.ndarray:
    """[model, model]: the sum over cells of weight * (e_first - e_second)(e_first - e_second)^T."""
    n = cells.num_models
    matrix = np.bincount(cells.first * n + cells.second, weights, n * n).reshape(n, n)
    matrix = matrix + matrix.T
    return np.diag(matrix.sum(axis=0)) - matrix


def _information(cells: Cells, expected: np.ndarray, prior_weight: float) -> np.ndarray:
    """What the games (and the prior) say about the strengths; without a prior the mean, of which they say nothing, is
    held where it is."""
    n = cells.num_models
    anchor = prior_weight * np.eye(n) if prior_weight else np.full((n, n), 1 / n)
    return _laplacian(cells, cells.count * expected * (1 - expected)) + anchor
