"""The table of sentences is whole in both languages and has what the scripts and templates ask for. No browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.errors import SIDE_FAILED, ArenaError, ConfigError, PromptTooLong
from app.views.admin import FIELDS
from app.views.words import LANGUAGES, TABLE, accepted, choose_language, words_for
from db.decisions import REASONS

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {  # keys that are put together where they are used
    "side": ("streaming", "done", "failed", "stopped", "interrupted"),
    "status": ("waiting", "loading", "ready", "failed", "disabled", "retired"),
    "voted": ("a", "b", "tie", "both_bad"),
    "model": ("a", "b"),
    "field": FIELDS,
    "help": FIELDS,
    "reason": tuple(REASONS),
}


@pytest.mark.parametrize("key", TABLE)
def test_sentence_has_both_languages_and_the_same_blanks(key):
    blanks = [set(re.findall(r"{(\w+)}", sentence)) for sentence in TABLE[key]]
    assert len(TABLE[key]) == len(LANGUAGES)
    assert all(sentence.strip() for sentence in TABLE[key])
    assert blanks[0] == blanks[1]


def test_scripts_and_templates_ask_for_sentences_that_there_are():
    asked = set()
    for script in (ROOT / "static/js").glob("*.js"):
        for arguments in re.findall(r"\bsay\(([^)]*)", script.read_text()):
            asked |= set(re.findall(r'"([a-z]\w+)"', arguments))
    for source in [*(ROOT / "app/views").glob("*.jinja"), *(ROOT / "app/views").glob("*.py")]:
        found = re.findall(r'\bwords(?:\.(\w+)|\["(\w+)"\])', source.read_text())
        asked |= {attribute or item for attribute, item in found}
    asked |= {f"{family}_{name}" for family, names in FAMILIES.items() for name in names}
    assert asked - set(TABLE) - {"format", "items"} == set()


def refusals(kind: type[ArenaError] = ArenaError) -> set[type[ArenaError]]:
    return {kind, *(each for child in kind.__subclasses__() for each in refusals(child))}


def test_every_refusal_that_reaches_a_page_has_a_sentence():
    assert {f"error_{refusal.code}" for refusal in refusals() - {ConfigError}} - set(TABLE) == set()


def test_refusal_with_numbers_carries_what_its_sentence_leaves_blank():
    for sentence in TABLE["error_prompt_too_long"]:
        assert set(re.findall(r"{(\w+)}", sentence)) <= PromptTooLong(5_000, 4_000).as_dict()["error"].keys()


def test_failed_answer_reads_as_the_server_says_it():
    assert TABLE["side_failed_message"][0] == SIDE_FAILED


def test_language_is_what_was_asked_then_remembered_then_preferred():
    assert choose_language("zh", "en", "en") == "zh"
    assert choose_language(None, "zh", "en") == "zh"
    assert choose_language("xx", None, "fr-FR, zh-CN;q=0.9, en;q=0.8") == "zh"
    assert choose_language(None, None, "de") == "en"
    assert choose_language(None, None, None) == "en"


def test_preferences_are_read_by_weight_and_odd_ones_skipped():
    assert accepted("en;q=0.2, zh-Hans-CN, fr;q=oops, de;q=0") == ["zh", "en"]


def test_table_of_a_language_has_every_key():
    assert words_for("zh").keys() == words_for("en").keys() == TABLE.keys()
