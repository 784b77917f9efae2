"""Style counted as the field counts it, held constant as it should; categories by their rules."""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from app.ratings import Games, rate
from app.ratings.categories import CATEGORIES, categories_of
from app.ratings.style import FEATURES, Style, controlled, difference, style_of
from tests.shared_data import shared_data


def sample() -> list[dict[str, str]]:
    csv.field_size_limit(2**31 - 1)
    path = shared_data("lmarena_140k_sample/arena_human_preference_sample_100.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def texts(conversation: str, role: str) -> list[str]:
    parts = [said["content"] for said in ast.literal_eval(conversation) if said["role"] == role]
    return ["".join(part.get("text") or "" for part in content) for content in parts]


def test_style_counts_are_those_of_the_data_set():
    agreed = 0
    for row in sample():
        told = ast.literal_eval(row["conv_metadata"])
        for side in "ab":
            counted = style_of(texts(row[f"conversation_{side}"], "assistant"))
            sums = [sum(told[f"{name}_count_{side}"].values()) for name in ("header", "list", "bold")]
            agreed += [counted.headers, counted.lists, counted.bold] == sums
    assert agreed >= 199


def test_code_category_mostly_agrees_with_the_data_set():
    agreed = sum(
        ("code" in categories_of(texts(row["conversation_a"], "user"), texts(row["conversation_a"], "assistant")
                                 + texts(row["conversation_b"], "assistant"))) == (row["is_code"] == "True")
        for row in sample()
    )  # fmt: skip
    assert agreed >= 85


def test_language_category_agrees_with_the_data_set():
    rows = [row for row in sample() if row["language"] in ("en", "zh")]
    names = {"en": "english", "zh": "chinese"}
    agreed = sum(names[row["language"]] in categories_of(texts(row["conversation_a"], "user"), []) for row in rows)
    assert agreed >= 0.9 * len(rows)


def test_headers_lists_and_bold_are_counted_outside_of_code():
    text = "# One\n## Two\n- a\n* b\n1. c\n**bold** and __bold__\n```\n# no\n- no\n**no**\n```\n#no"
    style = style_of([text])
    assert (style.headers, style.lists, style.bold) == (2, 3, 2)


def test_difference_is_between_minus_one_and_one():
    assert difference(Style(30, 0, 4, 0), Style(10, 0, 0, 2)) == (0.5, 0, 1, -1)


def test_style_that_decides_votes_is_taken_from_the_ratings():
    """Two equal models, of which one writes longer; voters prefer the longer answer."""
    rng = np.random.default_rng(0)
    left = rng.integers(2, size=4000)
    longer = np.clip(rng.normal(np.where(left == 0, 0.4, -0.4), 0.3), -1, 1)
    score = (rng.random(4000) < expit(2 * longer)).astype(float)
    games = Games(("brief", "wordy"), 1 - left, left, score)
    differences = np.zeros((4000, len(FEATURES)))
    differences[:, 0] = longer
    plain, held = rate(games), rate(controlled(games, differences))
    assert plain.rows[0].rating - plain.rows[1].rating > 80
    assert abs(held.rows[0].rating - held.rows[1].rating) < 40
    (length,) = held.effects
    per_unit = length.points / (400 / np.log(10)) / np.sqrt((longer**2).mean())
    assert per_unit == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize(
    ("prompts", "answers", "expected"),
    [
        (["What is the capital of France?"], ["Paris"], {"english"}),
        (["法国的首都是哪里？"], ["巴黎"], {"chinese"}),
        (["Wie heißt die Hauptstadt und was ist das?"], ["Paris"], {"other"}),
        (["Столица Франции?"], [""], {"other"}),
        (["Show this"], ["```python\nprint(1)\n```"], {"code", "english"}),
        (["what is the time", "and the date?"], ["noon"], {"english", "multi_turn"}),
        (["the " * 600], [""], {"english", "long"}),
        (
            ["Prove step by step that the sum must be at most 12 cm. Why? And is it exactly 5%?"],
            [],
            {"english", "hard"},
        ),
        (["hi"], ["hello"], set()),
        ([], [], set()),
    ],
)
def test_categories_follow_their_rules(prompts, answers, expected):
    assert categories_of(prompts, answers) == expected


def test_every_category_says_its_rule():
    assert all(category.rule.endswith(".") for category in CATEGORIES.values())


PIECES = (
    *("\n", " ", " \n", "1", "1 ", "1.", "1)", "- ", "-\n", "-\n\n", "a", "a "),
    *("?", "$", "#", "*", "_", "`", "中", "中\n"),
)


def read_hostile_texts() -> None:
    for text in (*(piece * 20_000 for piece in PIECES), "中" * 50 + "a" * 100, "中a" * 59):
        categories_of([text], [text])
        style_of([text])


def test_no_text_keeps_the_rules_busy():
    """A pattern that tries a place again and again would take from minutes to for ever, and the website with it."""
    code = f"from {__name__} import read_hostile_texts; read_hostile_texts()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[3])
