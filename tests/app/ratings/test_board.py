"""The board as a value: its methods, its ranks, its JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from app.ratings import METHODS, Games, rate
from app.ratings.intervals import rank_spread

GAMES = Games.of([("ant", "bee", 1), ("bee", "cat", 1), ("cat", "ant", 1), ("ant", "bee", 0.5)])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_every_interval_it_names(method):
    for ci in METHODS[method].intervals:
        board = rate(GAMES, method, ci, rounds=10)
        assert (board.method, board.ci, len(board.rows)) == (method, ci, 3)
        assert [row.rating for row in board.rows] == sorted((row.rating for row in board.rows), reverse=True)


@pytest.mark.parametrize(("method", "ci"), [("elo", "sandwich"), ("bt", "none"), ("glicko", None)])
def test_method_or_interval_that_is_not_there_is_refused(method, ci):
    with pytest.raises(ValueError, match=r"has no|no rating method"):
        rate(GAMES, method, ci)


def test_json_is_the_agreed_shape():
    board = rate(GAMES, input_sha256="ab", version="1.2.3")
    document = json.loads(json.dumps(board.as_dict(), allow_nan=False))
    assert list(document) == ["rows", "votes", "method", "ci", "input_sha256", "version"]
    assert list(document["rows"][0]) == [
        "model", "rating", "lower", "upper", "rank_best", "rank_worst", "votes", "elo",
    ]  # fmt: skip
    assert (document["votes"], document["input_sha256"], document["version"]) == (4, "ab", "1.2.3")


def test_ranks_are_what_the_intervals_leave_open():
    """Three intervals: [10, 20], [15, 30], [21, 40] on one island."""
    lower, upper = np.array([10.0, 15.0, 21.0]), np.array([20.0, 30.0, 40.0])
    best, worst = rank_spread(lower, upper, np.zeros(3, int))
    assert best.tolist() == [2, 1, 1]
    assert worst.tolist() == [3, 3, 2]


def test_elo_that_was_kept_vote_by_vote_is_taken_as_it_is():
    kept = {"ant": 1.0, "bee": 2.0, "cat": 3.0}
    assert {row.model: row.elo for row in rate(GAMES, live_elo=kept).rows} == kept
