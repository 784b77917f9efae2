"""Elo by hand, in order, and vote by vote."""

from __future__ import annotations

import numpy as np
import pytest

from app.ratings import Games, rate
from app.ratings.elo import bootstrap, elo, update


def test_first_win_moves_two_points():
    assert update(1000, 1000, 1) == (1002, 998)
    assert update(1000, 1000, 0.5) == (1000, 1000)


def test_win_that_was_expected_moves_less():
    """400 points ahead: expected 10/11 of a win, so that a win moves 4/11 and a loss 40/11."""
    assert update(1200, 800, 1) == pytest.approx((1200 + 4 / 11, 800 - 4 / 11))
    assert update(1200, 800, 0) == pytest.approx((1200 - 40 / 11, 800 + 40 / 11))


def test_order_of_votes_matters():
    won_then_lost = elo(Games.of([("ant", "bee", 1), ("ant", "bee", 0)]))
    lost_then_won = elo(Games.of([("ant", "bee", 0), ("ant", "bee", 1)]))
    assert won_then_lost[0] < 1000 < lost_then_won[0]


def test_points_are_only_passed_on():
    rng = np.random.default_rng(0)
    left = rng.integers(4, size=500)
    games = Games(tuple("abcd"), left, (left + 1) % 4, rng.choice([0, 0.5, 1], size=500))
    assert elo(games).sum() == pytest.approx(4000)


def test_board_ranks_by_elo_with_bootstrap_intervals():
    games = Games.of([("ant", "bee", 1), ("bee", "cat", 1), ("ant", "cat", 0.5)] * 20)
    board = rate(games, "elo")
    assert [row.model for row in board.rows] == ["ant", "bee", "cat"]
    assert board.ci == "bootstrap" and board.rounds == 1000
    for row in board.rows:
        assert row.rating == row.elo
        assert row.lower <= row.upper


def test_rounds_in_batches_are_as_many_and_each_keeps_the_order_of_play(monkeypatch):
    games = Games.of([("ant", "bee", 1)] * 5)
    monkeypatch.setattr("app.ratings.elo.MAX_DRAWN", 10)
    rounds = bootstrap(games, 7, np.random.default_rng(0))
    assert rounds.shape == (7, 2)
    assert rounds == pytest.approx(np.tile(elo(games), (7, 1))), "five wins drawn from five wins are five wins"
