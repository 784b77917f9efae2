"""Intervals: how far a rating can be trusted, and which ranks that leaves open.

Three kinds beside each other. *Plain*: each model's holds its true rating 95 times in 100. *Simultaneous*: all models'
hold at once 95 times in 100, which is what a statement about ranks needs; wider by the 95% quantile of the largest
of all deviations (max-t). *Always valid*: holds at every moment at once, so that looking after each vote and stopping
when it pleases is safe: an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy and Oh 2024, "Time-
uniform central limit theory and asymptotic confidence sequences", eq. 3 and appendix B.2 for its tuning).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from app.ratings import likelihood
from app.ratings.games import Cells, Games
from app.ratings.likelihood import CENTRE, SCALE, Fit, Likelihood

LEVEL = 0.95
Z = 1.959963984540054  # of a normal deviate, LEVEL lies within
ROUNDS = 1000  # of a bootstrap
SEED = 0  # of its draws: the same votes give the same board
MAX_T_DRAWS = 10_000
TIGHTEST_AT = 500  # votes on a model at which its confidence sequence is as narrow as one can be


@dataclass(frozen=True)
class Effect:
    """What a covariate does to a vote: rating points for a full step of it, with its 95% interval."""

    name: str
    points: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Rated:
    """What a method says: [model] each; `covariance` [model, model] of the ratings; `prior_weight` 0 and `rounds` 0
    where there was none; `tie_odds` of a tie between equals, where the method has it."""

    ratings: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    covariance: np.ndarray
    prior_weight: float = 0.0
    rounds: int = 0
    effects: tuple[Effect, ...] = ()
    tie_odds: float | None = None

    @property
    def errors(self) -> np.ndarray:
        return np.sqrt(np.maximum(np.diag(self.covariance), 0.0))


def from_likelihood(
    model: Likelihood,
    games: Games,
    cells: Cells,
    resampled: Cells,
    fitted: Fit,
    ci: str,
    rounds: int,
    rng: np.random.Generator,
) -> Rated:
    """Ratings and effects of a fitted likelihood, with intervals of one kind; a bootstrap draws from `resampled`."""
    n = fitted.num_models
    own = model.own_parameters
    if ci == "sandwich":
        found = likelihood.sandwich(model, cells, fitted)
        rated = Rated(fitted.ratings, *from_errors(fitted.ratings, found.ratings), found.ratings)
        other_bounds = _around(fitted.parameters[n:], np.sqrt(np.diag(found.others)))
    else:
        drawn = likelihood.bootstrap(model, resampled, fitted, rounds, rng)
        ratings = CENTRE + SCALE * drawn[:, :n]
        rated = Rated(fitted.ratings, *from_rounds(ratings), np.atleast_2d(np.cov(ratings.T)), rounds=rounds)
        other_bounds = from_rounds(drawn[:, n:])
    coefficients = zip(games.covariates, fitted.parameters[n:], *other_bounds, strict=False)
    return replace(
        rated,
        prior_weight=fitted.prior_weight,
        effects=tuple(Effect(name, *(SCALE * value for value in values)) for name, *values in coefficients),
        tie_odds=math.exp(fitted.parameters[-1]) if own else None,
    )


def from_errors(ratings: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _around(ratings, np.sqrt(np.maximum(np.diag(covariance), 0.0)))


def from_rounds(rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`rounds` [round, model] ratings."""
    lower, upper = np.quantile(rounds, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return lower, upper


def _around(values: np.ndarray, errors: np.ndarray, factor: float | np.ndarray = Z) -> tuple[np.ndarray, np.ndarray]:
    return values - factor * errors, values + factor * errors


def simultaneous(rated: Rated) -> tuple[np.ndarray, np.ndarray]:
    """[model] bounds that hold all at once."""
    return _around(rated.ratings, rated.errors, max_t(rated))


def max_t(rated: Rated) -> float:
    """The LEVEL quantile of the largest |deviation / its error| over all models, by draws from the covariance.

    Models are put in order of rating before the draws, and the root of their correlation is the symmetric one, so
    that new names change nothing.
    """
    errors = rated.errors
    known = np.flatnonzero(errors > 0)
    if len(known) < 2:
        return Z
    known = known[np.lexsort((errors[known], rated.ratings[known]))]
    correlation = rated.covariance[np.ix_(known, known)] / np.outer(errors[known], errors[known])
    values, vectors = np.linalg.eigh(correlation)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    draws = np.random.default_rng(SEED).standard_normal((MAX_T_DRAWS, len(known))) @ root
    return max(Z, float(np.quantile(np.abs(draws).max(axis=1), LEVEL)))


def always_valid(rated: Rated, votes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[model] bounds that hold at every moment at once; `votes` [model] so far."""
    return _around(rated.ratings, rated.errors, sequence_factor(votes))


def sequence_factor(votes: np.ndarray | float) -> np.ndarray:
    """By how many standard errors a confidence sequence reaches out after so many votes.

    sqrt(2 (n r^2 + 1) / (n r^2) * log(sqrt(n r^2 + 1) / alpha)), with r chosen so that it is least at TIGHTEST_AT.
    """
    alpha = 1 - LEVEL
    square = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1) / TIGHTEST_AT
    spent = np.asarray(votes) * square
    return np.sqrt(2 * (spent + 1) / spent * np.log(np.sqrt(spent + 1) / alpha))


def rank_spread(lower: np.ndarray, upper: np.ndarray, islands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[model] best and worst rank, from 1.

    Best: 1 + the number of others whose lower bound is above my upper one. Worst: 1 + the number of others whose upper
    bound is above my lower one. Games say nothing across `islands` [model]: who lives on another is never surely
    above me, and always may be.
    """
    same = islands[:, None] == islands
    surely_above = same & (lower > upper[:, None])
    maybe_above = ~same | (upper > lower[:, None])
    np.fill_diagonal(maybe_above, False)
    return 1 + surely_above.sum(axis=1), 1 + maybe_above.sum(axis=1)
