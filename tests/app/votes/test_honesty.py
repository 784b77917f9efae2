"""Riggers are found, honest visitors mostly are not, and a frequent prompt counts only so often."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np

from app.votes.honesty import anomalous, frequent, rules, share
from app.votes.honesty.casts import Cast
from app.votes.honesty.simulate import simulate

NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def cast(visitor: str, seconds: float, address: str | None = None, kind: str = "a", vote: int = 0) -> Cast:
    return Cast.of(vote, visitor, address, NOON + timedelta(seconds=seconds), 1, 2, kind)


def test_outcome_is_that_of_the_pair_whichever_side_each_was_on():
    assert Cast.of(1, "v", None, NOON, 2, 1, "a").outcome == Cast.of(1, "v", None, NOON, 1, 2, "b").outcome == "second"


def test_p_value_is_the_share_of_outcomes_as_rare():
    others = Counter(first=70, second=20, tie=9)
    assert anomalous.p_value(others, "tie", 1.0) == 10 / 100
    assert anomalous.p_value(others, "tie", 0.5) == 5 / 100
    assert anomalous.p_value(others, "first", 1.0) == 1.0
    assert anomalous.p_value(Counter(), "first", 0.25) == 0.25


def test_p_values_of_who_votes_like_the_others_are_uniform():
    rng = np.random.default_rng(0)
    outcomes = rng.choice(["first", "second", "tie"], p=[0.6, 0.3, 0.1], size=20_000)
    others = Counter(outcomes.tolist())
    drawn = [anomalous.p_value(others, outcome, 1 - rng.random()) for outcome in outcomes.tolist()]
    assert np.allclose(np.quantile(drawn, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.02)


def test_moments_of_looking_are_the_same_every_time_and_not_told_by_the_visitor_alone():
    assert anomalous.looks("v", 1) == anomalous.looks("v", 1) != anomalous.looks("v", 2)
    assert len(set(anomalous.looks("v", 1))) == 5


def test_planted_riggers_are_found_and_honest_visitors_left_alone():
    rates = simulate(runs=2, seed=1)
    assert rates.true_positive_rate > 0.7
    assert rates.false_positive_rate < 0.2


def test_without_riggers_one_in_ten_at_most_is_accused():
    assert simulate(runs=2, riggers=1, honest=100, seed=2).false_positive_rate < 0.1 + 2 * (0.1 * 0.9 / 200) ** 0.5


def test_eleven_votes_in_a_minute_are_a_burst_and_ten_are_none():
    fast = [cast("fast", 5.9 * n) for n in range(11)]
    steady = [cast("steady", 6.1 * n) for n in range(11)]
    assert rules.bursts(fast + steady, rules.Limits()) == {"fast": 11}


def test_burst_from_one_address_is_one_even_by_many_visitors():
    assert len(rules.bursts([cast(f"v{n}", n, "home") for n in range(11)], rules.Limits())) == 11
    assert rules.bursts([cast(f"v{n}", n, f"home {n}") for n in range(11)], rules.Limits()) == {}


def test_each_visitor_is_told_the_most_votes_and_visitors_of_any_window_that_holds_a_vote_of_theirs():
    rng = np.random.default_rng(5)
    limits = rules.Limits(burst_votes=2, burst=timedelta(seconds=60), visitors=2, day=timedelta(seconds=90))
    for _ in range(60):
        casts = [cast(f"v{rng.integers(6)}", int(rng.integers(400)), "home") for _ in range(rng.integers(30))]

        def windows(width, casts=casts):
            """Of each vote, the votes in the time that ends at it."""
            return [[other for other in casts if each.at - width <= other.at <= each.at] for each in casts]

        def most(visitor, groups, size):
            return max((size(group) for group in groups if any(cast.visitor == visitor for cast in group)), default=0)

        for visitor in {each.visitor for each in casts}:
            votes = most(visitor, windows(limits.burst), len)
            assert rules.bursts(casts, limits).get(visitor, 0) == (votes if votes > 2 else 0)
            crowd = most(visitor, windows(limits.day), lambda group: len({each.visitor for each in group}))
            assert rules.crowded(casts, limits).get(visitor, 0) == (crowd if crowd > 2 else 0)


def test_more_than_twenty_visitors_behind_one_address_in_a_day_are_crowded():
    crowd = [cast(f"v{n}", 3600 * n, "office") for n in range(21)]
    assert len(rules.crowded(crowd, rules.Limits())) == 21
    assert rules.crowded(crowd[:20], rules.Limits()) == {}
    assert rules.crowded([cast(f"v{n}", 7200 * n, "office") for n in range(21)], rules.Limits()) == {}


def test_prompt_above_the_percentile_is_sampled_down_to_it_and_the_sample_stays():
    prompts = {n: f"question {n}" for n in range(2000)} | {n: " HELLO  there" for n in range(2000, 2050)}
    prompts[2050] = "hello there"
    excess = frequent.too_frequent(prompts)
    assert len(excess) == 50 and set(excess) < set(range(2000, 2051))
    assert frequent.too_frequent(prompts) == excess != frequent.too_frequent(prompts, seed=1)
    assert frequent.too_frequent(prompts, percentile=100) == []
    assert frequent.too_frequent({}) == []


def test_alarm_rings_when_the_share_drops_and_not_by_chance():
    assert share.alarm([True] * 500 + [True, False] * 25).newest == 0.5
    assert share.alarm([True] * 19 + [False] + [True] * 480 + [True] * 48 + [False] * 2) is None
    assert share.alarm([False] * 60) is None
    assert share.alarm([True, False] * 300) is None
