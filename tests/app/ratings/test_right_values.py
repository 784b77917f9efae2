"""The ratings of real votes: LLMFAO, 8,931 votes on 59 models, against the exact optimum and the field's own code."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from app.ratings import Games, rate
from app.votes.formats import any_csv
from tests.shared_data import shared_data


def read_rows(name: str) -> list[dict[str, str]]:
    with shared_data(f"llmfao/{name}").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def games() -> Games:
    return any_csv.read(shared_data("llmfao/crowd-comparisons.csv")).games


@pytest.fixture(scope="module")
def exact() -> dict[str, dict[str, str]]:
    """By model: the maximum of the likelihood, sandwich intervals, rank spreads."""
    return {row["name"]: row for row in read_rows("reference_bt_sandwich.csv")}


@pytest.fixture(scope="module")
def field(exact) -> dict[str, dict[str, str]]:
    """By model: what FastChat's own code prints. Its first column holds the numbers of the models."""
    names = {row["id"]: name for name, row in exact.items()}
    return {names[row[""]]: row for row in read_rows("fastchat_golden_bt_elo.csv")}


def test_bradley_terry_is_the_exact_optimum_with_its_sandwich(games, exact):
    board = rate(games)
    assert (board.votes, len(board.rows), board.prior_weight, board.islands) == (8931, 59, 0, ())
    for row in board.rows:
        right = exact[row.model]
        assert row.rating == pytest.approx(float(right["rating"]), abs=1e-4 + 5e-5)
        assert row.lower == pytest.approx(float(right["lo95"]), abs=0.001)
        assert row.upper == pytest.approx(float(right["hi95"]), abs=0.001)
        assert (row.rank_best, row.rank_worst) == (int(right["rank_best"]), int(right["rank_worst"]))


def test_bradley_terry_and_elo_are_what_the_field_prints(games, field):
    for row in rate(games).rows:
        assert row.rating == pytest.approx(float(field[row.model]["bt"]), abs=0.1)  # theirs stops early
        assert row.elo == pytest.approx(float(field[row.model]["elo"]), abs=1e-9)


def test_bootstrap_agrees_with_the_sandwich(games):
    sandwich = {row.model: row for row in rate(games, ci="sandwich").rows}
    for row in rate(games, ci="bootstrap", rounds=300).rows:
        same = sandwich[row.model]
        assert row.rating == same.rating
        assert row.upper - row.lower == pytest.approx(same.upper - same.lower, rel=0.25)


@pytest.fixture(scope="module")
def arena_rank() -> dict:
    """What arena-rank 0.1.1 printed for these votes, by model: rating, lower, upper."""
    return json.loads(Path(__file__).with_name("arena_rank_llmfao.json").read_text(encoding="utf-8"))


def assert_agrees(board, printed: dict) -> None:
    for row in board.rows:
        assert (row.rating, row.lower, row.upper) == pytest.approx(printed[row.model], abs=1e-3)


def test_plain_board_agrees_with_arena_rank(games, arena_rank):
    assert_agrees(rate(games), arena_rank["plain"])


def test_weighted_board_agrees_with_arena_rank(games, arena_rank):
    """Its weights: one over the number of votes on the pair, or over 50 where they are fewer."""
    low, high = np.minimum(games.left, games.right), np.maximum(games.left, games.right)
    _, pair, count = np.unique(low * 1000 + high, return_inverse=True, return_counts=True)
    assert_agrees(rate(games.knowing(weight=1 / np.maximum(count[pair], 50))), arena_rank["reweighted"])


def test_board_with_covariates_agrees_with_arena_rank(games, arena_rank):
    covariates = {"position": np.ones(len(games)), "wave": np.sin(np.arange(len(games)))}
    board = rate(games.knowing(covariates=covariates))
    assert_agrees(board, arena_rank["contextual"])
    points = [effect.points / (400 / np.log(10)) for effect in board.effects]
    assert points == pytest.approx(arena_rank["contextual_coefficients"], abs=1e-5)


# Agresti (2002), Categorical Data Analysis, second edition, table 10.10: American League East, 1987. Home team by line,
# away team by column, both in the order of TEAMS; wins-losses of the home team. Estimates: table 10.11, section 10.6.
TEAMS = ("Milwaukee", "Detroit", "Toronto", "New York", "Boston", "Cleveland", "Baltimore")
SEASON = """
 -  4-3 4-2 4-3 6-1 4-2 6-0
3-3  -  4-2 4-3 6-0 6-1 4-3
2-5 4-3  -  2-4 4-3 4-2 6-0
3-3 5-1 2-5  -  4-3 4-2 6-1
5-1 2-5 3-3 4-2  -  5-2 6-0
2-5 3-3 3-4 4-3 4-2  -  2-4
2-5 1-5 1-6 2-4 1-6 3-4  -
"""


def season() -> Games:
    played = []
    for home, line in zip(TEAMS, SEASON.strip("\n").splitlines(), strict=True):
        for away, cell in zip(TEAMS, line.split(), strict=True):
            if cell != "-":
                wins, losses = map(int, cell.split("-"))
                played += [(home, away, 1.0)] * wins + [(home, away, 0.0)] * losses
    return Games.of(played)


def over_baltimore(board) -> dict[str, float]:
    strengths = {row.model: row.rating / (400 / np.log(10)) for row in board.rows}
    return {team: strengths[team] - strengths["Baltimore"] for team in TEAMS[:-1]}


def test_baseball_of_1987_is_as_in_the_textbook():
    assert over_baltimore(rate(season())) == pytest.approx(
        dict(zip(TEAMS, (1.581, 1.436, 1.294, 1.248, 1.108, 0.684), strict=False)), abs=6e-4
    )


def test_home_advantage_in_baseball_is_as_in_the_textbook():
    """Position as a covariate: the home team is on the left in every game."""
    games = season()
    board = rate(games.knowing(covariates={"position": np.ones(len(games))}))
    (home,) = board.effects
    assert home.points / (400 / np.log(10)) == pytest.approx(0.302, abs=5e-4)
    worths = np.array([np.exp(row.rating / (400 / np.log(10))) for row in board.rows])
    assert (worths / worths.sum()).round(3).tolist() == [0.220, 0.190, 0.164, 0.157, 0.137, 0.088, 0.044]
