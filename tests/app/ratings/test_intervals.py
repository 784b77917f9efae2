"""Plain, simultaneous and always-valid intervals, clusters of votes, weights, and boards of many votes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from app.ratings import Games, rate
from app.ratings.intervals import TIGHTEST_AT, Rated, Z, max_t, sequence_factor
from app.ratings.simulate import coverage, random_games
from tests.app.ratings.test_bradley_terry import record

VOTES = record(("ant", "bee", 30, 20), ("bee", "cat", 25, 20), ("ant", "cat", 30, 25))


def half_widths(games: Games, **options) -> dict[str, float]:
    return {row.model: row.upper - row.rating for row in rate(games, **options).rows}


def test_max_t_of_independent_ratings_is_the_quantile_of_their_maximum():
    rated = Rated(np.arange(8.0), np.zeros(8), np.zeros(8), np.eye(8))
    exact = norm.ppf(0.5 + 0.5 * 0.95 ** (1 / 8))
    assert max_t(rated) == pytest.approx(exact, abs=0.03)


def test_max_t_of_one_rating_said_eight_times_is_that_of_one():
    assert max_t(Rated(np.arange(8.0), np.zeros(8), np.zeros(8), np.ones((8, 8)))) == pytest.approx(Z, abs=0.05)


def test_simultaneous_and_always_valid_intervals_hold_the_plain_one():
    for row in rate(Games.of(VOTES)).rows:
        assert row.sure_lower <= row.lower < row.upper <= row.sure_upper
        assert row.always_lower < row.lower < row.upper < row.always_upper
        assert row.sure_rank_best <= row.rank_best <= row.rank_worst <= row.sure_rank_worst


def test_confidence_sequence_is_tightest_where_it_is_tuned_for():
    factors = sequence_factor(np.array([TIGHTEST_AT / 50, TIGHTEST_AT, TIGHTEST_AT * 50]))
    assert factors.argmin() == 1 and 2.5 < factors[1] < 3.2


def test_always_valid_intervals_hold_the_truth_at_every_look_and_plain_ones_do_not():
    found = coverage(models=4, votes=1200, look_every=60, runs=60, seed=2)
    assert found.always_valid >= 0.95
    assert found.plain_each_look == pytest.approx(0.95, abs=0.03)
    assert found.plain_every_look < 0.85, "who looks twenty times is misled far more often than once in twenty"


def test_votes_of_many_visitors_one_each_are_independent_votes():
    games = Games.of(VOTES)
    alone = games.knowing(visitor=np.arange(len(games)))
    assert half_widths(alone) == pytest.approx(half_widths(games))


def test_visitor_who_votes_ten_times_the_same_counts_as_one():
    once = Games.of(VOTES)
    tenfold = Games.of(VOTES * 10).knowing(visitor=np.tile(np.arange(len(VOTES)), 10))
    assert half_widths(tenfold) == pytest.approx(half_widths(once), rel=1e-6)
    assert half_widths(Games.of(VOTES * 10)) == pytest.approx(
        {model: width / np.sqrt(10) for model, width in half_widths(once).items()}, rel=1e-6
    )


def test_equal_weights_change_nothing():
    games = Games.of(VOTES)
    weighted = games.knowing(weight=np.full(len(games), 0.2))
    assert half_widths(weighted) == pytest.approx(half_widths(games))
    assert half_widths(weighted, ci="bootstrap", rounds=50) == pytest.approx(
        half_widths(games, ci="bootstrap", rounds=50)
    )


def test_position_of_the_sides_is_found_and_held_constant():
    """Votes of one strength, where the left side won 60 of 100: 400 log10(1.5) points, and no model is better."""
    votes = [(a, b, s) for a, b in (("ant", "bee"), ("bee", "ant")) for s in [1.0] * 60 + [0.0] * 40]
    board = rate(Games.of(votes).knowing(covariates={"position": np.ones(len(votes))}))
    (position,) = board.effects
    assert position.points == pytest.approx(400 * np.log10(1.5), abs=1e-3)
    assert position.lower < position.points < position.upper
    assert [row.rating for row in board.rows] == pytest.approx([1000, 1000], abs=1e-6)


def test_covariate_that_decides_every_vote_stays_finite():
    votes = [("ant", "bee", 1.0)] * 5 + [("bee", "ant", 1.0)] * 5
    board = rate(Games.of(votes).knowing(covariates={"position": np.ones(10)}))
    assert np.isfinite(board.effects[0].points)
    assert all(np.isfinite([row.lower, row.upper]).all() for row in board.rows)


def test_bootstrap_climbs_to_the_very_maximum_of_each_round():
    """The chord that all rounds share ends where Newton's own fit of a round does."""
    from app.ratings import bradley_terry, likelihood
    from app.ratings.games import Cells

    games = random_games(np.linspace(-1, 1, 6), 500, np.random.default_rng(0))
    cells = Cells.of(games)
    fitted = bradley_terry.fit(cells)
    drawn = likelihood.bootstrap(bradley_terry.LIKELIHOOD, cells, fitted, 5, np.random.default_rng(7))
    counts = np.random.default_rng(7).multinomial(500, cells.count / 500, 5).astype(float)
    for one, count in zip(drawn, counts, strict=True):
        assert one == pytest.approx(bradley_terry.fit(cells.counted(count)).strengths, abs=1e-6)


def test_games_of_a_choice_are_the_games_themselves():
    games = Games.of(VOTES).knowing(visitor=np.arange(len(VOTES)), covariates={"x": np.arange(len(VOTES)) * 1.0})
    some = games.only((games.left == 0) | (games.right == 0))
    assert set(some.models) == {"ant", "bee", "cat"}
    assert (rate(some.only(some.left == 0)).rows[0].votes) == 105
    assert some.covariates["x"].tolist() == some.visitor.tolist()
