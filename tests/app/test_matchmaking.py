"""Which two models meet."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from app.matchmaking import pick_pair


@dataclass(frozen=True)
class Entry:
    id: int


def test_every_pair_and_every_side_is_as_likely():
    models = [Entry(number) for number in (3, 1, 2, 4)]
    rng = random.Random(1)
    pairs = [pick_pair(models, rng) for _ in range(6000)]
    counts = Counter((pair.a.id, pair.b.id) for pair in pairs)
    assert len(counts) == 12 and all(400 < count < 600 for count in counts.values())
    assert {pair.probability for pair in pairs} == {1 / 6}


def test_the_coin_says_whether_the_pair_was_swapped():
    for seed in range(20):
        pair = pick_pair([Entry(9), Entry(5)], random.Random(seed))
        assert pair.side_coin == (pair.a.id > pair.b.id) and pair.probability == 1


def test_a_model_never_meets_itself():
    with pytest.raises(ValueError):
        pick_pair([Entry(1)], random.Random(0))
