"""Davidson's Bradley–Terry with ties (Davidson 1970): a tie is an outcome of its own and not half of two others.

P(i beats j) : P(tie) : P(j beats i) = exp(d / 2) : exp(t) : exp(-d / 2), where d = b_i - b_j, and exp(t) is Davidson's
nu, the same for all pairs. Ties are likeliest between equals, so that a tie against a strong model says more than half
a win does. "Both are bad" is a tie here too. Scale and centre of the ratings are those of Bradley–Terry.
"""

from __future__ import annotations

import numpy as np

from app.ratings import likelihood
from app.ratings.games import Cells, Games
from app.ratings.intervals import Rated, from_likelihood


class Davidson:
    own_parameters = 1

    def height(self, score, lead, own):
        return np.where(score == 0.5, own, (score - 0.5) * lead) - np.logaddexp(np.logaddexp(lead / 2, -lead / 2), own)

    def slope(self, score, lead, own):
        won, lost, tied = chances(lead, own)
        return score - 0.5 - (won - lost) / 2, (score == 0.5) - tied

    def curvature(self, lead, own):
        won, lost, tied = chances(lead, own)
        return (won + lost) / 4 - (won - lost) ** 2 / 4, -tied * (won - lost) / 2, tied * (1 - tied)


def chances(lead: np.ndarray, own: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a win, a loss and a tie of the first."""
    whole = np.logaddexp(np.logaddexp(lead / 2, -lead / 2), own)
    return np.exp(lead / 2 - whole), np.exp(-lead / 2 - whole), np.exp(own - whole)


LIKELIHOOD = Davidson()


def rate(games: Games, cells: Cells, ci: str, rounds: int, rng: np.random.Generator) -> Rated:
    return from_likelihood(LIKELIHOOD, games, cells, cells, likelihood.fit(LIKELIHOOD, cells), ci, rounds, rng)
