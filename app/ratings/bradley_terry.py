"""Bradley–Terry: the strengths under which the games as they ended were the most likely.

P(i beats j) = 1 / (1 + exp(b_j - b_i)); a tie counts as half a win and half a loss, and so does "both are bad". The
rating of a model is 1000 + 400 / ln 10 * b, with the mean of b at 0.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from app.ratings import likelihood
from app.ratings.games import Cells, Games
from app.ratings.intervals import Rated, from_likelihood
from app.ratings.likelihood import PRIOR_WEIGHT, SCALE, Fit

__all__ = ["LIKELIHOOD", "PRIOR_WEIGHT", "SCALE", "BradleyTerry", "fit", "rate"]


class BradleyTerry:
    own_parameters = 0

    def height(self, score, lead, own):
        return score * lead - np.logaddexp(0, lead)

    def slope(self, score, lead, own):
        return score - expit(lead), np.float64(0)

    def curvature(self, lead, own):
        chance = expit(lead)
        return chance * (1 - chance), np.float64(0), np.float64(0)


LIKELIHOOD = BradleyTerry()


def rate(games: Games, cells: Cells, ci: str, rounds: int, rng: np.random.Generator) -> Rated:
    resampled = cells.with_ties_opened() if ci == "bootstrap" else cells
    return from_likelihood(LIKELIHOOD, games, cells, resampled, fit(cells), ci, rounds, rng)


def fit(cells: Cells, start: np.ndarray | None = None) -> Fit:
    return likelihood.fit(LIKELIHOOD, cells, start)
