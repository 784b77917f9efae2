"""Which prompts are counted, and which are let through uncounted because they must fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from app.errors import PromptTooLong
from app.prompt_room import PromptRoom
from app.registry import ReadyModel

MODEL = ReadyModel(1, "alpha", "path:/alpha", "Be brief.", {}, 1000, 20, None)
REMOTE = ReadyModel(2, "far", "openai:http://far/v1#far", "", {}, None, 0, None)


class Counter:
    """Counts a token a byte, blanks excepted (a token holds 64), how often it was asked, and how much at most."""

    def __init__(self) -> None:
        self.asked = self.most_characters = 0

    async def count_tokens(self, model: str, messages) -> int:
        self.asked += 1
        self.most_characters = max(self.most_characters, *(len(message["content"]) for message in messages))
        if messages[-1]["content"].isspace():
            return 20 + len(messages[-1]["content"]) // 64
        return 20 + sum(len(message["content"].encode()) for message in messages)


def asked_for(prompt: str, history=(), models=(MODEL,)) -> int:
    counter = Counter()
    asyncio.run(PromptRoom(counter, 512).check(models, [list(history)] if history else [], prompt))
    return counter.asked


def test_a_short_question_is_not_counted():
    assert asked_for("Why is the sky blue?") == asked_for("Why?", models=(MODEL, REMOTE)) == 0


def test_what_may_not_fit_is_counted():
    assert asked_for("x" * 400) == 1
    assert asked_for("Why?", history=[{"role": "user", "content": "天" * 140}]) == 1
    with pytest.raises(PromptTooLong, match="2,020 tokens"):
        asked_for("x" * 2000)


def test_models_of_one_checkpoint_are_counted_once_those_of_an_adapter_apart():
    """An adapter may bring a chat template of its own."""
    adapted = replace(MODEL, name="tuned", adapter="path:/adapter")
    assert asked_for("x" * 400, models=(MODEL, replace(MODEL, name="beta"), adapted)) == 2


def test_a_long_paste_is_refused_by_a_part_of_it_though_a_token_holds_many_of_its_blanks():
    counter = Counter()
    with pytest.raises(PromptTooLong, match="about 16,041 tokens"):
        asyncio.run(PromptRoom(counter, 512).check([MODEL], [], " " * 1_000_000 + "a"))
    assert counter.most_characters < 100_000
