"""Which prompts are counted, and which are let through uncounted because they must fit."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import PromptTooLong
from app.prompt_room import PromptRoom
from app.registry import ReadyModel

MODEL = ReadyModel(1, "alpha", "path:/alpha", "Be brief.", {}, 1000, 20, None)
REMOTE = ReadyModel(2, "far", "openai:http://far/v1#far", "", {}, None, 0, None)


class Counter:
    """Counts a token a byte, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def count_tokens(self, model: str, messages) -> int:
        self.asked += 1
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
