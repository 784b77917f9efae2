"""Bradley–Terry on games small enough to check by hand, and what must hold for any games."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ratings import Board, Games, rate
from app.ratings.bradley_terry import PRIOR_WEIGHT, SCALE, fit
from app.ratings.games import Cells
from app.ratings.intervals import Z

Played = list[tuple[str, str, float]]


def record(*results: tuple[str, str, int, int]) -> Played:
    """Games of (one, other, wins of the one, wins of the other)."""
    return [
        (one, other, score)
        for one, other, wins, losses in results
        for score, times in ((1.0, wins), (0.0, losses))
        for _ in range(times)
    ]


def ratings(board: Board) -> dict[str, float]:
    return {row.model: row.rating for row in board.rows}


def test_ten_to_one_is_400_points():
    board = rate(Games.of(record(("ant", "bee", 10, 1))))
    assert ratings(board) == pytest.approx({"ant": 1200, "bee": 800})
    assert [(row.votes, row.wins) for row in board.rows] == [(11, 10), (11, 1)]


def test_published_worked_example():
    """Four players, 22 games (the example of Wikipedia's article): strengths with geometric mean 1."""
    board = rate(Games.of(record(("A", "B", 2, 3), ("A", "D", 1, 4), ("B", "C", 5, 3), ("C", "D", 1, 3))))
    strengths = {model: math.exp((rating - 1000) / SCALE) for model, rating in ratings(board).items()}
    assert strengths == pytest.approx({"A": 0.640, "B": 1.043, "C": 0.660, "D": 2.270}, abs=5e-4)


def test_interval_of_two_models_by_hand():
    """9 to 3: p = 3/4. One parameter d = b_1 - b_2 with information 12 p (1 - p) = 9/4 and squared slopes
    9 (1 - p)^2 + 3 p^2 = 9/4: its variance is (9/4) / (9/4)^2 = 4/9, and each model has half of d."""
    board = rate(Games.of(record(("ant", "bee", 9, 3))))
    for row in board.rows:
        assert row.upper - row.rating == pytest.approx(Z * SCALE * (2 / 3) / 2)
        assert row.rating - row.lower == pytest.approx(Z * SCALE * (2 / 3) / 2)


def test_tie_is_half_a_win_and_half_a_loss_and_surer_than_both():
    ties = rate(Games.of([("ant", "bee", 0.5)] * 4 + record(("ant", "bee", 4, 2))))
    split = rate(Games.of(record(("ant", "bee", 6, 4))))
    assert ratings(ties) == pytest.approx(ratings(split))
    assert ties.rows[0].upper < split.rows[0].upper


def test_model_that_won_everything_is_finite_and_the_prior_is_told():
    board = rate(Games.of(record(("ant", "bee", 20, 0), ("bee", "cat", 10, 10))))
    assert board.prior_weight == PRIOR_WEIGHT
    assert any("weak prior" in note for note in board.notes)
    assert board.rows[0].model == "ant" and all(math.isfinite(row.rating) for row in board.rows)
    # at the optimum the slope of the likelihood is that of the prior
    strengths = {model: (rating - 1000) / SCALE for model, rating in ratings(board).items()}
    lost_chance = 1 / (1 + math.exp(strengths["ant"] - strengths["bee"]))
    assert 20 * lost_chance == pytest.approx(PRIOR_WEIGHT * strengths["ant"])


def test_first_vote_proves_nothing():
    board = rate(Games.of([("ant", "bee", 1.0)]))
    assert [(row.model, row.rank_best, row.rank_worst) for row in board.rows] == [("ant", 1, 2), ("bee", 1, 2)]
    assert any("fewer than 20 votes: 2 of 2" in note for note in board.notes)


def test_islands_are_named_and_not_ranked_across():
    board = rate(Games.of(record(("ant", "bee", 40, 20), ("bee", "cat", 40, 20), ("cow", "dog", 60, 1))))
    assert board.islands == (("ant", "bee", "cat"), ("cow", "dog"))
    assert any("ant, bee, cat; cow, dog" in note for note in board.notes)
    spread = {row.model: (row.rank_best, row.rank_worst) for row in board.rows}
    assert spread["cow"] == (1, 4), "surely above dog, perhaps below all of the other island"
    assert spread["dog"] == (2, 5)
    for island in board.islands:
        assert np.mean([ratings(board)[model] for model in island]) == pytest.approx(1000)


def test_no_games_are_an_empty_board():
    board = rate(Games.of([]))
    assert (board.rows, board.votes, board.notes) == ((), 0, ())


def test_games_all_tied_are_one_rating():
    board = rate(Games.of([("ant", "bee", 0.5), ("bee", "cat", 0.5)] * 30))
    assert ratings(board) == pytest.approx({"ant": 1000, "bee": 1000, "cat": 1000})
    assert {(row.rank_best, row.rank_worst) for row in board.rows} == {(1, 3)}, "no decided vote, no certain order"


@pytest.mark.parametrize("ci", ["sandwich", "bootstrap"])
def test_model_that_only_tied_has_the_interval_of_as_many_tossed_coins(ci):
    """50 ties with bee, whose own place is known from 4,000 votes: the error is nearly 1 / sqrt(50 / 4)."""
    known = record(("bee", "cow", 1000, 1000), ("bee", "dog", 1000, 1000), ("cow", "dog", 1000, 1000))
    board = rate(Games.of([*known, *[("ant", "bee", 0.5)] * 50]), ci=ci)
    ant = next(row for row in board.rows if row.model == "ant")
    error = SCALE / math.sqrt(50 / 4) * 3 / 4  # of the distance to the mean of four, of which ant is one
    assert (ant.upper - ant.lower) / (2 * Z) == pytest.approx(error, rel=0.15)


def test_sandwich_covers_the_truth_as_often_as_it_says():
    """Of 95% intervals over 120 simulated boards of 5 models and 400 games, 93 to 97 of a hundred hold the truth."""
    rng = np.random.default_rng(1)
    truth = np.array([-1.0, -0.4, 0.0, 0.5, 0.9])
    held = []
    for _ in range(120):
        left = rng.integers(5, size=400)
        right = (left + rng.integers(1, 5, size=400)) % 5
        score = (rng.random(400) < 1 / (1 + np.exp(truth[right] - truth[left]))).astype(float)
        board = rate(Games(tuple("abcde"), left, right, score))
        right_ratings = dict(zip("abcde", 1000 + SCALE * truth, strict=True))
        held += [row.lower <= right_ratings[row.model] <= row.upper for row in board.rows]
    assert 0.93 <= np.mean(held) <= 0.97


# What must hold for any games

models = st.sampled_from(["ant", "bee", "cat", "cow", "dog"])
games_played = st.lists(
    st.tuples(models, models, st.sampled_from([0.0, 0.5, 1.0])).filter(lambda game: game[0] != game[1]),
    min_size=1,
    max_size=40,
)


def assert_same(one: Board, other: Board, name=lambda model: model) -> None:
    rows = {row.model: row for row in other.rows}
    assert {name(row.model) for row in one.rows} == rows.keys()
    for row in one.rows:
        same = rows[name(row.model)]
        assert (row.rating, row.lower, row.upper) == pytest.approx((same.rating, same.lower, same.upper), abs=1e-5)
        assert (row.votes, row.wins) == (same.votes, same.wins)


@settings(max_examples=40)
@given(games_played, st.randoms(use_true_random=False))
def test_order_of_votes_does_not_matter(played, random):
    shuffled = random.sample(played, len(played))
    assert_same(rate(Games.of(played)), rate(Games.of(shuffled)))


@settings(max_examples=40)
@given(games_played)
def test_swapping_the_sides_of_votes_does_not_matter(played):
    assert_same(rate(Games.of(played)), rate(Games.of([(right, left, 1 - score) for left, right, score in played])))


@settings(max_examples=40)
@given(games_played)
def test_swapping_wins_and_losses_mirrors_the_ratings(played):
    board = rate(Games.of(played))
    mirrored = rate(Games.of([(left, right, 1 - score) for left, right, score in played]))
    opposite = {model: 2000 - rating for model, rating in ratings(mirrored).items()}
    assert ratings(board) == pytest.approx(opposite, abs=1e-5)


@settings(max_examples=40)
@given(games_played)
def test_renaming_only_relabels(played):
    def renamed(model: str) -> str:
        return model[::-1]

    other = Games.of([(renamed(left), renamed(right), score) for left, right, score in played])
    assert_same(rate(Games.of(played)), rate(other), renamed)


@settings(max_examples=40)
@given(games_played)
def test_ratings_are_finite_centred_and_inside_their_intervals(played):
    board = rate(Games.of(played))
    assert np.mean([row.rating for row in board.rows]) == pytest.approx(1000)
    for row in board.rows:
        assert math.isfinite(row.lower) and math.isfinite(row.upper)
        assert row.lower <= row.rating <= row.upper
        assert 1 <= row.rank_best <= row.rank_worst <= len(board.rows)
    assert sum(row.votes for row in board.rows) == 2 * board.votes == 2 * len(played)
    assert sum(row.wins for row in board.rows) == sum(score != 0.5 for _, _, score in played)


@settings(max_examples=40)
@given(games_played)
def test_fit_is_a_maximum_where_no_prior_is_needed(played):
    """What a model scored is what its strength made one expect: the equation of the maximum."""
    games = Games.of(played)
    fitted = fit(Cells.of(games))
    if fitted.prior_weight:
        return
    scored, expected = np.zeros(len(games.models)), np.zeros(len(games.models))
    for left, right, score in zip(games.left, games.right, games.score, strict=True):
        chance = 1 / (1 + math.exp(fitted.strengths[right] - fitted.strengths[left]))
        scored[left] += score
        scored[right] += 1 - score
        expected[left] += chance
        expected[right] += 1 - chance
    assert scored == pytest.approx(expected, abs=1e-6)


@settings(max_examples=100)
@given(games_played)
def test_prior_is_used_exactly_where_some_models_never_lost_to_the_others(played):
    """Brute force over all ways to part the models in two."""
    games = Games.of(played)
    n = len(games.models)
    beat = set()
    for left, right, score in zip(games.left, games.right, games.score, strict=True):
        beat |= {(left, right)} if score > 0 else set()
        beat |= {(right, left)} if score < 1 else set()
    parted = any(
        not any((part >> winner) & 1 and not (part >> loser) & 1 for winner, loser in beat)
        for part in range(1, 2**n - 1)
    )
    assert (fit(Cells.of(games)).prior_weight > 0) == parted


@settings(max_examples=20)
@given(games_played)
def test_bootstrap_is_the_same_each_time(played):
    one, other = (rate(Games.of(played), ci="bootstrap", rounds=20) for _ in range(2))
    assert one == other
    assert all(math.isfinite(row.lower) and math.isfinite(row.upper) for row in one.rows)
