"""Intervals: how far a rating can be trusted, and which ranks that leaves open."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
Z = 1.959963984540054  # of a normal deviate, LEVEL lies within
ROUNDS = 1000  # of a bootstrap
SEED = 0  # of its draws: the same votes give the same board


@dataclass(frozen=True)
class Rated:
    """What a method says: [model] each; `prior_weight` 0 and `rounds` 0 where there was none."""

    ratings: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    prior_weight: float = 0.0
    rounds: int = 0


def from_errors(ratings: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ratings - Z * errors, ratings + Z * errors


def from_rounds(rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`rounds` [round, model] ratings."""
    lower, upper = np.quantile(rounds, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return lower, upper


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
