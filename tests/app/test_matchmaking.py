"""Which two models meet."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from math import sqrt

import numpy as np
import pytest

from app.matchmaking import Known, KnownPairs, pick_pair
from app.ratings.pairing import FLOOR_SHARE, NEW_BOOST, draw_weights, pair_chances
from db import queries
from tests.db.rows import NOW, add_models, add_visitor, add_votable_battle


@dataclass(frozen=True)
class Entry:
    id: int


def test_every_pair_and_every_side_is_as_likely_where_nothing_is_known():
    models = [Entry(number) for number in (3, 1, 2, 4)]
    rng = random.Random(1)
    pairs = [pick_pair(models, rng) for _ in range(6000)]
    counts = Counter((pair.a.id, pair.b.id) for pair in pairs)
    assert len(counts) == 12 and all(400 < count < 600 for count in counts.values())
    assert [pair.probability for pair in pairs] == pytest.approx([1 / 6] * 6000)


def test_pairs_come_as_often_as_their_stored_chance_says():
    models = [Entry(number) for number in (1, 2, 3)]
    known = Known({(1, 2): 400, (1, 3): 50, (2, 3): 5}, {(1, 2): 390.0, (1, 3): 25.0, (2, 3): 2.0}, {1: 2.0, 2: 1.0})
    rng = random.Random(2)
    pairs = [pick_pair(models, rng, known) for _ in range(6000)]
    chances = {tuple(sorted((pair.a.id, pair.b.id))): pair.probability for pair in pairs}
    assert sum(chances.values()) == pytest.approx(1)
    for pair, count in Counter(tuple(sorted((pair.a.id, pair.b.id))) for pair in pairs).items():
        assert count / 6000 == pytest.approx(chances[pair], abs=0.03)


def test_the_coin_says_whether_the_pair_was_swapped():
    for seed in range(20):
        pair = pick_pair([Entry(9), Entry(5)], random.Random(seed))
        assert pair.side_coin == (pair.a.id > pair.b.id) and pair.probability == 1


def test_a_model_never_meets_itself():
    with pytest.raises(ValueError):
        pick_pair([Entry(1)], random.Random(0))


def test_weight_of_a_pair_is_what_one_vote_more_would_narrow():
    """Equation 9 by hand for 60 wins of 99 votes, with the one made-up vote: S = .605 * .395, n = 100."""
    share = 60.5 / 100
    expected = sqrt(share * (1 - share) / 100) - sqrt(share * (1 - share) / 101)
    assert draw_weights(np.array([99.0]), np.array([60.0])) == pytest.approx([expected])


def test_few_votes_and_even_votes_make_a_pair_likelier():
    fresh, known, settled = draw_weights(np.array([0.0, 50.0, 50.0]), np.array([0.0, 25.0, 49.0]))
    assert fresh > known > settled > 0


def chances(played: list[list[float]], weights=(1.0, 1.0, 1.0)) -> np.ndarray:
    votes = np.array(played)
    return pair_chances(votes, votes / 2, np.array(weights))


MANY = [[0, 500, 500], [500, 0, 500], [500, 500, 0]]


def test_new_model_is_drawn_more_often_and_the_weight_of_the_admin_too():
    even = chances(MANY)
    assert even[np.triu_indices(3, 1)] == pytest.approx([1 / 3] * 3)
    weighed = chances(MANY, (3.0, 1.0, 1.0))
    assert weighed[0, 1] == pytest.approx(3 / 7) and weighed[1, 2] == pytest.approx(1 / 7)
    new = chances([[0, 500, 0], [500, 0, 0], [0, 0, 0]])
    assert new[0, 2] > 0.4 > new[0, 1]
    assert NEW_BOOST > 1


def test_no_pair_is_ever_out_of_reach():
    votes = [[0, 10_000_000, 3], [10_000_000, 0, 3], [3, 3, 0]]
    assert chances(votes)[0, 1] >= FLOOR_SHARE / 3


def test_weight_of_zero_keeps_a_model_out_unless_no_pair_is_left():
    assert chances(MANY, (0.0, 1.0, 1.0))[np.triu_indices(3, 1)].tolist() == [0, 0, 1]
    assert chances(MANY, (0.0, 0.0, 1.0))[np.triu_indices(3, 1)] == pytest.approx([1 / 3] * 3)


def test_memory_of_pairs_follows_votes_and_recounts(database):
    pairs = KnownPairs()

    def look() -> Known:
        with database.session(read_only=True) as session:
            return pairs.look(session)

    with database.session() as session:
        ant, bee = add_models(session, "ant", "bee")
        visitor = add_visitor(session)
    assert look() == Known({}, {}, {ant: 1.0, bee: 1.0})
    for a, b, kind in ((ant, bee, "a"), (bee, ant, "a"), (bee, ant, "tie")):
        with database.session() as session:
            battle = add_votable_battle(session, visitor, (a, b))
            vote = queries.cast_vote(session, battle_id=battle.id, visitor_id=visitor, kind=kind, now=NOW)
        with pytest.MonkeyPatch.context() as patch:  # a vote may come while one looks
            patch.setattr(queries, "last_vote_id", lambda session, before=vote.id - 1: before)
            look()
    assert (look().votes, look().scores) == ({(ant, bee): 3}, {(ant, bee): 1.5})
    with database.session() as session:
        queries.decide(session, [session.merge(vote)], False, "quarantine", "test", NOW)
    assert (look().votes, look().scores) == ({(ant, bee): 2}, {(ant, bee): 1.0})
