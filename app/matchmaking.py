"""Which two models meet, and on which side. `pick_pair` is pure: models, what is known of them and chance in, pair out.

The rule is `app.ratings.pairing`: pairs whose vote would say the most come more often, none never. The chance that a
pair had is stored with its battle, so that ratings can divide by it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from sqlalchemy.orm import Session

from app.ratings.pairing import pair_chances
from db import queries
from db.vote_kinds import VOTE_KINDS


class HasId(Protocol):
    id: int


M = TypeVar("M", bound=HasId)


@dataclass(frozen=True)
class Pair(Generic[M]):
    """`probability` is that of the unordered pair; `side_coin`: the pair, in order of model id, was swapped."""

    a: M
    b: M
    probability: float
    side_coin: bool


@dataclass(frozen=True)
class Known:
    """What drawing a pair goes by. By (lower id, higher id): votes so far, and what the lower scored in them; by id:
    the admin's weight, 1 where none is given."""

    votes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    scores: Mapping[tuple[int, int], float] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)


def pick_pair(models: Sequence[M], rng: random.Random, known: Known | None = None) -> Pair[M]:
    """Two different models by `pair_chances`; then a fair coin for the sides. Needs two models.

    Where nothing is known every pair is as likely.
    """
    in_order = sorted(models, key=lambda model: model.id)
    if len(in_order) < 2:
        raise ValueError("a pair takes two models")
    chances = _chances([model.id for model in in_order], known or Known())
    first, second = np.triu_indices(len(in_order), 1)
    drawn = rng.choices(range(len(first)), weights=chances[first, second])[0]
    low, high = in_order[first[drawn]], in_order[second[drawn]]
    swapped = rng.random() < 0.5
    a, b = (high, low) if swapped else (low, high)
    return Pair(a, b, float(chances[first[drawn], second[drawn]]), swapped)


def _chances(ids: Sequence[int], known: Known) -> np.ndarray:
    """[model, model] of ids in rising order."""
    played, won = np.zeros((len(ids), len(ids))), np.zeros((len(ids), len(ids)))
    for i, low in enumerate(ids):
        for j, high in enumerate(ids[i + 1 :], i + 1):
            played[i, j] = played[j, i] = known.votes.get((low, high), 0)
            won[i, j] = known.scores.get((low, high), 0.0)
            won[j, i] = played[i, j] - won[i, j]
    return pair_chances(played, won, np.array([known.weights.get(model_id, 1.0) for model_id in ids]))


class KnownPairs:
    """What is known of the pairs of one database: votes are read once, those that came since at each look."""

    def __init__(self):
        self._lock = threading.Lock()
        self._seen = (0, 0)  # last vote, last decision
        self._votes: dict[tuple[int, int], int] = {}
        self._scores: dict[tuple[int, int], float] = {}

    def look(self, session: Session) -> Known:
        with self._lock:
            now = (queries.last_vote_id(session), queries.last_decision(session))
            if now[1] != self._seen[1] or now[0] < self._seen[0]:  # votes were recounted
                self._seen, self._votes, self._scores = (0, 0), {}, {}
            votes = queries.votes_in_order(session, after=self._seen[0]) if now[0] > self._seen[0] else []
            for vote in votes:
                low, high = sorted((vote.model_a_id, vote.model_b_id))
                score = VOTE_KINDS[vote.kind].score_a
                self._votes[low, high] = self._votes.get((low, high), 0) + 1
                self._scores[low, high] = self._scores.get((low, high), 0.0) + (
                    score if low == vote.model_a_id else 1 - score
                )
            self._seen = (votes[-1].vote_id if votes else now[0], now[1])  # some may have come since `now`
            return Known(dict(self._votes), dict(self._scores), queries.sampling_weights(session))
