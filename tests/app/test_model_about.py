"""What is said of a model besides what runs it: who made it, its licence and size, and how often it is drawn."""

from __future__ import annotations

import json

import pytest

from app.cli import main
from app.errors import ModelRefused
from app.model_rules import checked


def test_command_line_keeps_maker_licence_size_and_weight(tmp_path, capsys):
    about = ["--organisation", " Acme ", "--licence", "MIT", "--parameters", "135M", "--sampling-weight", "2"]
    assert main(["models", "add", "m", "hf:a/b", *about, "--json", "--data-folder", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [told[key] for key in ("organisation", "licence", "parameters", "sampling_weight")] == [
        "Acme",
        "MIT",
        "135M",
        2,
    ]


@pytest.mark.parametrize("weight", [-1, 101, float("nan"), float("inf"), True, "2"])
def test_weight_that_is_none_is_refused(weight):
    with pytest.raises(ModelRefused, match="sampling_weight must be from 0 to 100"):
        checked(source="hf:a/b", sampling_weight=weight)


def test_longest_text_about_a_model_is_120_characters():
    assert checked(source="hf:a/b", licence="x" * 120)["licence"] == "x" * 120
    with pytest.raises(ModelRefused, match="licence must be text of at most 120"):
        checked(source="hf:a/b", licence="x" * 121)


def test_blank_text_about_a_model_is_none():
    assert checked(source="hf:a/b", organisation="  ")["organisation"] is None
