"""`arena ratings simulate` as a user types it."""

from __future__ import annotations

import json

import pytest

from app.cli import main


def simulate(*words: str) -> int:
    return main(["ratings", "simulate", *words])


def test_active_sampling_needs_fewer_votes_than_uniform(capsys, tmp_path):
    plot = tmp_path / "curves.svg"
    assert (
        simulate("--models", "12", "--spread", "3", "--width", "0.3", "--seed", "0", "--json", "--plot", str(plot)) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["rules"]["active"]["needed"] < found["rules"]["uniform"]["needed"]
    assert (found["seed"], found["paper"]["active"]) == (0, 4400)
    assert plot.read_text().startswith("<svg ") and "uniform" in plot.read_text()


def test_same_seed_gives_the_same_numbers_and_another_others(capsys):
    told = []
    for seed in ("1", "1", "2"):
        simulate("coverage", "--models", "3", "--votes", "300", "--runs", "4", "--seed", seed, "--json")
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1] != told[2]


def test_coverage_is_of_as_many_models_as_docs_ratings_says(capsys):
    told = []
    for models in ((), ("--models", "5")):
        simulate("coverage", "--votes", "300", "--runs", "2", "--json", *models)
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "words", [("--models", "1"), ("--models", "0"), ("--width", "3"), ("coverage", "--plot", "x.svg")]
)
def test_what_cannot_be_simulated_is_said(words, capsys):
    assert simulate(*words) == 1
    assert capsys.readouterr().err.startswith("arena: ")
