"""How sure the first place is: votes still needed, and votes that it hangs on."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from app.ratings import Games, bradley_terry, rate
from app.ratings.games import Cells
from tests.app.ratings.test_bradley_terry import record


def test_votes_still_needed_are_those_after_which_the_two_are_apart():
    """The same votes over and over: error and votes go together, so that the number asked for is just enough."""
    votes = record(("ant", "bee", 12, 9), ("bee", "cat", 12, 10), ("ant", "cat", 13, 9))
    needed = rate(Games.of(votes)).separation
    assert needed.first == "ant" and needed.votes > len(votes)
    times = -(-(needed.votes + len(votes)) // len(votes))
    assert rate(Games.of(votes * times)).separation.votes == 0
    assert rate(Games.of(votes * (times - 2))).separation.votes > 0


def test_direct_votes_needed_by_hand():
    """Two models, so that all votes are direct; 60 to 40 of 100. z^2 v / d^2 - 1 times as many are wanted."""
    found = rate(Games.of(record(("ant", "bee", 60, 40)))).separation
    d, v = np.log(1.5), 1 / 24
    assert found.votes == 0 and found.gap == pytest.approx(400 * np.log10(1.5))
    found = rate(Games.of(record(("ant", "bee", 6, 4)))).separation
    want = int(np.ceil(10 * (1.96**2 * 10 * v / d**2 - 1)))
    assert found.votes == found.direct == want


def test_nothing_parts_two_that_are_level_or_on_different_islands():
    level = rate(Games.of(record(("ant", "bee", 5, 5)))).separation
    assert level.votes is None and level.direct is None
    assert rate(Games.of(record(("ant", "bee", 9, 1), ("cat", "dog", 9, 1)))).separation is None


def fewest(games: Games, most: int) -> int | None:
    """Brute force: the fewest games whose removal puts another first."""

    def first(kept: np.ndarray) -> str | None:
        left = games.only(kept)
        if len(left.models) < 2:
            return None
        strengths = bradley_terry.fit(Cells.of(left)).strengths
        best = np.flatnonzero(strengths > strengths.max() - 1e-9)
        return left.models[best[0]] if len(best) == 1 else None

    leader = first(np.arange(len(games)))
    for size in range(1, most + 1):
        for gone in combinations(range(len(games)), size):
            now = first(np.setdiff1d(np.arange(len(games)), gone))
            if now not in (leader, None):
                return size
    return None


def test_fewest_removals_are_those_of_brute_force():
    rng = np.random.default_rng(5)
    compared = 0
    for _ in range(12):
        left = rng.integers(3, size=14)
        right = (left + rng.integers(1, 3, size=14)) % 3
        games = Games(("ant", "bee", "cat"), left, right, rng.choice([0.0, 1.0, 0.5], size=14, p=[0.45, 0.45, 0.1]))
        board = rate(games)
        if board.prior_weight or (board.separation and board.separation.gap < 1):
            continue
        exact = fewest(games, 3)
        if exact is not None:
            compared += 1
            assert board.fragility.votes in (exact, exact + 1), "never fewer than there are, and seldom one more"
    assert compared >= 3


def test_removal_it_names_does_put_another_first():
    """Two models, 6 to 4: with three of the six gone bee leads."""
    board = rate(Games.of(record(("ant", "bee", 6, 4))))
    assert (board.fragility.votes, board.fragility.successor) == (3, "bee")
    assert board.fragility.share == pytest.approx(0.3)


def test_firm_first_place_hangs_on_many_votes():
    firm = rate(Games.of(record(("ant", "bee", 300, 100), ("bee", "cat", 200, 200))))
    close = rate(Games.of(record(("ant", "bee", 205, 195), ("bee", "cat", 200, 200))))
    assert firm.fragility.votes > 100 > 20 > close.fragility.votes
