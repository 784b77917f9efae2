"""Guesses from times alone which side was the slow one, as well as a simple classifier can. Pure.

A battle is a row of features, each how much more of it there was on side a than on side b: so that no side is named.
Logistic regression without intercept on standardised features, L2, scored out of fold; the area under its ROC curve
is 1/2 where the times tell nothing, give or take what a permutation of the sides shows: folds are not independent, and
a bootstrap of their scores promises more than it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import expit
from scipy.stats import rankdata

FEATURES = ("first", "last", "ended", "pieces", "mean gap", "longest gap", "spread of gaps")
FOLDS, PENALTY = 5, 1.0
LEVEL, ROUNDS = 0.95, 400


@dataclass(frozen=True)
class Guess:
    """`auc`, and the bounds between which it lies for 95 of 100 classifiers that are told the sides by lot: blind where
    it is no higher. Far below 1/2 is chance as well: of few battles those left out are the opposite of those seen."""

    auc: float
    lower: float
    upper: float
    battles: int

    @property
    def is_blind(self) -> bool:
        return self.auc <= self.upper


def features(times: Sequence[float], ended: float) -> list[float]:
    """Of one side: `times` at which its pieces came, in seconds after the question was sent."""
    gaps = np.diff(times) if len(times) > 1 else np.zeros(1)
    first, last = (times[0], times[-1]) if len(times) else (ended, ended)
    return [first, last, ended, len(times), float(gaps.mean()), float(gaps.max()), float(gaps.std())]


def guess(differences: np.ndarray, is_slow_a: np.ndarray, seed: int = 0) -> Guess:
    """`differences` [battle, feature], side a less side b; `is_slow_a` [battle] bool, both kinds among them."""
    rng = np.random.default_rng(seed)
    told = auc(out_of_fold(differences, is_slow_a, rng), is_slow_a)
    by_lot = []
    for _ in range(ROUNDS):
        drawn = rng.permutation(is_slow_a)
        by_lot.append(auc(out_of_fold(differences, drawn, rng), drawn))
    lower, upper = np.quantile(by_lot, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Guess(told, float(lower), float(upper), len(differences))


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The chance that one of the positive is scored above one of the others (Mann-Whitney)."""
    n, m = int(positive.sum()), int((~positive).sum())
    return float((rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * m))


def out_of_fold(differences: np.ndarray, positive: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[battle] scores, each by a classifier that has not seen that battle."""
    folds = rng.permutation(np.arange(len(differences)) % FOLDS)
    scores = np.zeros(len(differences))
    for fold in range(FOLDS):
        seen = folds != fold
        scale = np.sqrt((differences[seen] ** 2).mean(axis=0))
        scaled = differences / np.where(scale > 0, scale, 1.0)
        scores[~seen] = scaled[~seen] @ _fit(scaled[seen], positive[seen])
    return scores


def _fit(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Newton's method for logistic regression without intercept, penalty PENALTY / 2 * |w|^2."""
    weights = np.zeros(x.shape[1])
    for _ in range(50):
        expected = expit(x @ weights)
        slope = x.T @ (positive - expected) - PENALTY * weights
        information = (x * (expected * (1 - expected))[:, None]).T @ x + PENALTY * np.eye(x.shape[1])
        step = np.linalg.solve(information, slope)
        weights = weights + step
        if np.abs(step).max() < 1e-9:
            break
    return weights
