"""A name in the conversation is found as people write it, and no other word is taken for one."""

from __future__ import annotations

import pytest

from app.identity import Named, find, terms

BARD = {"a": ("bard",), "b": ("SmolLM2-135M", "Hugging Face")}


@pytest.mark.parametrize(
    "text",
    [
        "I am Bard.",
        "(BARD)",
        "bard's answer",
        "ｂａｒｄ",
        "b\u200bard",
        "_bard_",
        "我是Bard模型",
        "저는 Bard입니다",
        "Bard\u00a0",
        "-bard-",
    ],
)
def test_own_name_is_found_as_people_write_it(text):
    assert find([text], BARD) == Named("a", "bard")


@pytest.mark.parametrize("text", ["bombard", "bards", "Lombardy", "bardo", "barđ", "b a r d", "Бard", "bard7", ""])
def test_other_words_are_not_taken_for_the_name(text):
    assert find([text], BARD) is None


@pytest.mark.parametrize(
    "text", ["smollm2 135m", "SmolLM2-135M-Instruct", "SMOLLM2_135M", "HuggingFace", "hugging-face!"]
)
def test_name_of_several_words_is_found_however_they_are_joined(text):
    assert find([text], BARD).side == "b"


def test_name_in_a_script_without_spaces_is_found_inside_a_sentence():
    assert find(["你好我是文心一言呀"], {"a": ("文心一言",), "b": ()}) == Named("a", "文心一言")


def test_terms_are_name_family_checkpoint_and_organisation():
    found = terms("my-qwen2.5-poet", "hf:Acme/Qwen2.5-0.5B-Instruct@main", "Alibaba Cloud")
    assert found == ("my-qwen2.5-poet", "Alibaba Cloud", "Acme", "Qwen2.5-0.5B-Instruct", "qwen")
    assert terms("poet", "path:/x", adapter="hf:Acme/gemma-lyric") == ("poet", "Acme", "gemma-lyric", "gemma")


def test_everyday_word_in_a_name_gives_nothing_away_by_itself():
    assert terms("phi-4-mini") == ("phi-4-mini",)
    assert find(["The golden ratio phi is 1.618"], {"a": terms("phi-4-mini"), "b": ()}) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("smollm2-135m-brief", "I am SmolLM2."),
        ("gemma3-270m-brief", "I am Gemma3, made by Google."),
        ("my-qwen2.5-poet", "I am Qwen2.5, by Alibaba."),
        ("llama-small", "I'm Llama3"),
    ],
)
def test_family_is_found_with_its_version_behind_it(name, text):
    assert find([text], {"a": terms(name), "b": ()}).side == "a"


@pytest.mark.parametrize("text", ["a herd of llamas", "gptzero found it", "codellama"])
def test_family_is_not_found_inside_another_word(text):
    assert find([text], {"a": terms("gpt-x"), "b": terms("llama-small")}) is None


def test_pathological_text_takes_no_time():
    assert find(["smollm2" + "-" * 200_000], BARD) is None
