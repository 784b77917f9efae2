"""Which two models meet, and on which side. Pure: models in, pair out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Generic, Protocol, TypeVar


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


def pick_pair(models: Sequence[M], rng: random.Random) -> Pair[M]:
    """Any two different models, each pair as likely; then a fair coin for the sides. Needs two models."""
    first, second = sorted(rng.sample(list(models), 2), key=lambda model: model.id)
    swapped = rng.random() < 0.5
    a, b = (second, first) if swapped else (first, second)
    return Pair(a, b, 1 / comb(len(models), 2), swapped)
