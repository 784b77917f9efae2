"""The ratings of real votes: LLMFAO, 8,931 votes on 59 models, against the exact optimum and the field's own code."""

from __future__ import annotations

import csv

import pytest

from app.formats import any_csv
from app.ratings import Games, rate
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
