"""What is said of a model besides what runs it: maker, licence, size, how often it is drawn, its share of the pool."""

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


def test_models_cannot_count_on_more_of_the_pool_than_there_is(tmp_path, capsys):
    def arena(*arguments: str) -> int:
        return main(["models", *arguments, "--data-folder", str(tmp_path)])

    assert arena("add", "a", "hf:a/b", "--kv-share", "0.7") == 0
    assert arena("add", "b", "hf:a/b", "--kv-share", "0.4") == 1
    assert "kv_share is 0.4; other models count on 0.7 of the pool, so at most 0.3 is left" in capsys.readouterr().err
    assert arena("disable", "a") == arena("add", "b", "hf:a/b", "--kv-share", "0.4") == 0
    assert arena("enable", "a") == 1
    assert "kv_share is 0.7; other models count on 0.4" in capsys.readouterr().err


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True, "0.5"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ModelRefused, match="kv_share must be from 0 to 1"):
        checked(source="hf:a/b", kv_share=share)
    with pytest.raises(ModelRefused, match="no pages of our pool"):
        checked(source="openai:https://host/v1#m", kv_share=0.5)
