"""The board as a value: its methods, its ranks, its JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from app.ratings import METHODS, Board, Games, rate
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
    assert list(document)[:6] == ["rows", "votes", "method", "ci", "input_sha256", "version"]
    assert list(document["rows"][0])[:8] == [
        "model", "rating", "lower", "upper", "rank_best", "rank_worst", "votes", "elo",
    ]  # fmt: skip
    assert (document["votes"], document["input_sha256"], document["version"]) == (4, "ab", "1.2.3")


@pytest.mark.parametrize("method", METHODS)
def test_board_comes_back_whole_from_its_json(method):
    games = GAMES.knowing(both_bad=np.array([False, False, False, True]))
    if METHODS[method].takes_covariates:
        games = games.knowing(covariates={"position": np.ones(4)})
    board = rate(games, method, rounds=20)
    assert Board.from_dict(json.loads(json.dumps(board.as_dict()))) == board


def test_both_bad_is_told_apart_from_ties():
    games = Games.of([("ant", "bee", 0.5), ("ant", "bee", 0.5), ("ant", "cat", 0.5), ("bee", "cat", 1)])
    board = rate(games.knowing(both_bad=np.array([True, False, True, False])))
    assert (board.ties, board.both_bad) == (1, 2)
    told = {row.model: (row.ties, row.both_bad, row.wins, row.votes) for row in board.rows}
    assert told == {"ant": (1, 2, 0, 3), "bee": (1, 1, 1, 3), "cat": (0, 1, 0, 2)}


def test_row_is_provisional_with_few_votes_or_few_opponents():
    many = [("ant", "bee", 1), ("ant", "bee", 0), ("bee", "cat", 1), ("bee", "cat", 0), ("cat", "ant", 0.5)] * 20
    board = rate(Games.of([*many, ("dog", "ant", 1), *[("eel", "ant", 1), ("eel", "ant", 0)] * 20]))
    assert {row.model for row in board.rows if row.provisional} == {"dog", "eel", "cat", "bee"} - {"bee", "cat"} | {
        row.model for row in board.rows if row.opponents < 3
    }
    assert not any(row.provisional for row in rate(Games.of(many[:5] * 20)).rows), "two others are all there are"


def test_covariates_are_refused_by_a_method_that_cannot_hold_them():
    with pytest.raises(ValueError, match="Elo cannot hold position constant"):
        rate(GAMES.knowing(covariates={"position": np.ones(4)}), "elo")


def test_ranks_are_what_the_intervals_leave_open():
    """Three intervals: [10, 20], [15, 30], [21, 40] on one island."""
    lower, upper = np.array([10.0, 15.0, 21.0]), np.array([20.0, 30.0, 40.0])
    best, worst = rank_spread(lower, upper, np.zeros(3, int))
    assert best.tolist() == [2, 1, 1]
    assert worst.tolist() == [3, 3, 2]


def test_elo_that_was_kept_vote_by_vote_is_taken_as_it_is():
    kept = {"ant": 1.0, "bee": 2.0, "cat": 3.0}
    assert {row.model: row.elo for row in rate(GAMES, live_elo=kept).rows} == kept
