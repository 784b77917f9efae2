"""Which pair of models to ask about next, so that the fewest votes say the most. Pure: counts in, chances out.

Active sampling (Chiang et al. 2024, equation 9): a pair is drawn in proportion to how much one more vote would narrow
its interval, sqrt(S / n) - sqrt(S / (n + 1)), where S is the variance of its votes and n their number. On top: new
models are drawn more often until they have NEW_BATTLES battles, an admin's weight multiplies a model's chances, and a
share of all draws ignores what is known, so that no pair is ever out of reach and its chance can be divided by.
"""

from __future__ import annotations

import numpy as np

NEW_BATTLES = 100  # of a model, before which it is boosted
NEW_BOOST = 3.0  # of a model without any battle; falls evenly to 1
FLOOR_SHARE = 0.2  # of draws that weigh every pair by the admin's weights alone


def draw_weights(played: np.ndarray, won: np.ndarray, prior: float = 1.0) -> np.ndarray:
    """[pair] of equation 9. `won` is the summed score of one side. Variance and number begin with `prior` made-up
    votes of variance 1/4, so that a pair without votes has a finite weight, the largest."""
    votes = played + prior
    share = (won + prior / 2) / votes
    spread = np.sqrt(share * (1 - share))
    return spread * (1 / np.sqrt(votes) - 1 / np.sqrt(votes + 1))


def pair_chances(played: np.ndarray, won: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[model, model] symmetric chances of the pairs, each pair once above and once below the diagonal.

    `played` and `won` [model, model]: votes of each against each, and what the row's model scored in them; `weights`
    [model] the admin's. Every pair has at least FLOOR_SHARE of what the weights alone would give it. A weight of 0
    keeps a model out of draws, unless that leaves no pair: then the weights do not count.
    """
    if (weights > 0).sum() < 2:
        weights = np.ones(len(weights))
    upper = np.triu_indices(len(weights), 1)
    by_admin = (weights[:, None] * weights)[upper]
    boost = 1 + (NEW_BOOST - 1) * np.clip(1 - played.sum(axis=1) / NEW_BATTLES, 0, 1)
    active = draw_weights(played[upper], won[upper]) * by_admin * (boost[:, None] * boost)[upper]
    chances = FLOOR_SHARE * by_admin / by_admin.sum() + (1 - FLOOR_SHARE) * active / active.sum()
    whole = np.zeros_like(played, dtype=float)
    whole[upper] = chances
    return whole + whole.T
