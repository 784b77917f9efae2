"""Davidson's ties: equal to Bradley–Terry where there are none, right at its maximum, and true to simulated votes."""

from __future__ import annotations

import numpy as np
import pytest

from app.ratings import Games, likelihood, rate
from app.ratings.davidson import LIKELIHOOD, chances
from app.ratings.games import Cells
from tests.app.ratings.test_bradley_terry import assert_same, ratings, record


def test_without_ties_it_is_bradley_terry():
    games = Games.of(record(("ant", "bee", 9, 5), ("bee", "cat", 8, 6), ("cat", "ant", 4, 7)))
    tied = rate(games, "davidson")
    assert ratings(tied) == pytest.approx(ratings(rate(games)), abs=0.01)
    assert tied.tie_odds < 1e-4


def test_two_models_by_hand():
    """12 wins, 3 losses, 10 ties of two: exp(d) = 12 / 3, and nu = 10 / sqrt(12 * 3)."""
    board = rate(Games.of([*record(("ant", "bee", 12, 3)), *[("ant", "bee", 0.5)] * 10]), "davidson")
    assert ratings(board)["ant"] - ratings(board)["bee"] == pytest.approx(400 * np.log10(4), abs=1e-3)
    assert board.tie_odds == pytest.approx(10 / 6, abs=1e-4)


def simulated(rng: np.random.Generator, truth: np.ndarray, votes: int, tie: float) -> Games:
    left = rng.integers(len(truth), size=votes)
    right = (left + rng.integers(1, len(truth), size=votes)) % len(truth)
    won, lost, _ = chances(truth[left] - truth[right], tie)
    draw = rng.random(votes)
    score = np.where(draw < won, 1.0, np.where(draw < won + lost, 0.0, 0.5))
    return Games(tuple(f"m{i}" for i in range(len(truth))), left, right, score)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(3)
    truth = np.array([-0.8, -0.2, 0.3, 0.7])
    held = []
    for _ in range(100):
        board = rate(simulated(rng, truth, 300, 0.2), "davidson")
        held += [row.lower <= 1000 + likelihood.SCALE * truth[int(row.model[1])] <= row.upper for row in board.rows]
    assert 0.91 <= np.mean(held) <= 0.98


def test_bootstrap_agrees_with_the_sandwich():
    games = simulated(np.random.default_rng(4), np.array([-0.8, -0.2, 0.3, 0.7]), 800, 0.2)
    drawn = {row.model: row.upper - row.lower for row in rate(games, "davidson", "bootstrap", rounds=400).rows}
    assert drawn == pytest.approx({row.model: row.upper - row.lower for row in rate(games, "davidson").rows}, rel=0.15)


def test_slope_and_curvature_are_the_derivatives_of_the_height():
    score, lead, own, tiny = np.array([0.0, 0.5, 1.0]), np.array([0.4, -1.0, 2.0]), 0.3, 1e-5
    by_lead, by_own = LIKELIHOOD.slope(score, lead, own)
    rise = LIKELIHOOD.height(score, lead + tiny, own) - LIKELIHOOD.height(score, lead - tiny, own)
    assert by_lead == pytest.approx(rise / (2 * tiny), abs=1e-8)
    rise = LIKELIHOOD.height(score, lead, own + tiny) - LIKELIHOOD.height(score, lead, own - tiny)
    assert by_own == pytest.approx(rise / (2 * tiny), abs=1e-8)
    lead_lead, lead_own, own_own = LIKELIHOOD.curvature(lead, own)
    higher, lower = LIKELIHOOD.slope(score, lead + tiny, own), LIKELIHOOD.slope(score, lead - tiny, own)
    assert lead_lead == pytest.approx(-(higher[0] - lower[0]) / (2 * tiny), abs=1e-8)
    assert lead_own == pytest.approx(-(higher[1] - lower[1]) / (2 * tiny), abs=1e-8)
    higher, lower = LIKELIHOOD.slope(score, lead, own + tiny), LIKELIHOOD.slope(score, lead, own - tiny)
    assert own_own == pytest.approx(-(higher[1] - lower[1]) / (2 * tiny), abs=1e-8)


def test_swapping_sides_and_names_changes_only_labels():
    games = simulated(np.random.default_rng(1), np.array([-0.5, 0.1, 0.4]), 200, -0.3)
    swapped = Games(games.models, games.right, games.left, 1 - games.score)
    assert_same(rate(games, "davidson"), rate(swapped, "davidson"))
    renamed = Games(("m0", "m1", "m2"), 2 - games.left, 2 - games.right, games.score)
    assert_same(rate(games, "davidson"), rate(renamed, "davidson"), lambda name: f"m{2 - int(name[1])}")


def test_only_ties_are_finite_and_leave_the_order_open():
    board = rate(Games.of([("ant", "bee", 0.5), ("bee", "cat", 0.5)] * 15), "davidson")
    assert ratings(board) == pytest.approx({"ant": 1000, "bee": 1000, "cat": 1000}, abs=1e-6)
    assert {(row.rank_best, row.rank_worst) for row in board.rows} == {(1, 3)}
    assert Cells.of(Games.of([("ant", "bee", 0.5)])).open_ties().all()
