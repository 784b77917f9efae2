"""How long a prompt may be: counted by the engine, for the model with the least room, and told before it is sent.

The numbers are the worst over all models that are ready, so that they do not tell which two a battle has drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from app.engine_client import EngineClient, EngineError, EngineRefused
from app.errors import BadInput, BlankPrompt, NotReady, PromptTooLong
from app.registry import ReadyModel
from db.tables import storable

LONGEST_TOKEN_CHARACTERS = 8  # of ordinary text; longer prompts are counted by growing parts of themselves
MOST_TOKENS_A_BYTE = 2  # a token holds a byte at least; as much again for what a tokenizer rewrites
MOST_TOKENS_A_LABEL = 32  # that a chat template puts around a message
REMOTE_CHARACTERS_PER_TOKEN = 2.5  # a cautious guess for tokenizers that we cannot ask

Message = dict[str, str]


@dataclass(frozen=True)
class Count:
    """`tokens` of the message and all that goes before it; `limit` leaves room for the answer."""

    tokens: int
    limit: int
    about: bool = False  # estimated from the first part of a very long prompt

    @property
    def fits(self) -> bool:
        return self.tokens <= self.limit


def answer_room(context_length: int, answer_tokens: int) -> int:
    """Tokens kept free for the answer: a quarter of a small context at most."""
    return max(1, min(answer_tokens, context_length // 4))


def checked_prompt(prompt: str) -> str:
    """Raises BlankPrompt, or BadInput for text that is no Unicode."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput("This text holds half a character, which cannot be stored.") from None
    if not any(character.isprintable() and not character.isspace() for character in prompt):
        raise BlankPrompt("Please type a question first.")
    return storable(prompt)


class PromptRoom:
    def __init__(self, engine: EngineClient, answer_tokens: int):
        self._engine = engine
        self._answer_tokens = answer_tokens

    async def check(self, models: Sequence[ReadyModel], histories: Sequence[Sequence[Message]], prompt: str) -> None:
        """Raises PromptTooLong, or NotReady where nothing can count now. What is short enough is not counted at all."""
        asked = [[*history, {"role": "user", "content": prompt}] for history in (histories or [[]])]
        if all(self._surely_fits(model, messages) for model in models for messages in asked):
            return
        count = await self.count(models, histories, prompt)
        if not count.fits:
            raise PromptTooLong(count.tokens, count.limit, about=count.about)

    async def count(self, models: Sequence[ReadyModel], histories: Sequence[Sequence[Message]], prompt: str) -> Count:
        """The worst over models and histories (the conversation so far, one a side)."""
        asked = [
            self._count_one(model, [*history, {"role": "user", "content": prompt}])
            for model in one_of_each_tokenizer(models)
            for history in (histories or [[]])
        ]
        counts = await asyncio.gather(*asked)
        return min(counts, key=lambda count: count.limit - count.tokens)

    def _surely_fits(self, model: ReadyModel, messages: Sequence[Message]) -> bool:
        if model.is_remote:
            return self._guess(model, messages).fits
        most = sum(MOST_TOKENS_A_LABEL + MOST_TOKENS_A_BYTE * len(each["content"].encode()) for each in messages)
        return model.system_prompt_tokens + most <= self._limit(model.context_length)

    async def _count_one(self, model: ReadyModel, messages: list[Message]) -> Count:
        prompt = messages[-1]["content"]
        if model.is_remote:
            return self._guess(model, messages)
        limit = self._limit(model.context_length)
        part = limit * LONGEST_TOKEN_CHARACTERS
        while part < len(prompt):
            tokens = await self._ask(model, [*messages[:-1], {"role": "user", "content": prompt[:part]}])
            if tokens > limit:
                return Count(tokens * len(prompt) // part, limit, about=True)
            part *= 2  # blanks: a token holds many
        return Count(await self._ask(model, messages), limit)

    async def _ask(self, model: ReadyModel, messages: list[Message]) -> int:
        try:
            return await self._engine.count_tokens(model.name, messages)
        except EngineError as error:
            if isinstance(error, EngineRefused) and error.status in (400, 413, 422):
                raise BadInput("This text cannot be read by the models.") from error
            raise NotReady("The models are starting again; please try once more in a few seconds.") from error

    def _guess(self, model: ReadyModel, messages: Sequence[Message]) -> Count:
        characters = len(model.system_prompt) + sum(len(message["content"]) for message in messages)
        limit = self._limit(model.context_length) if model.context_length else 1_000_000
        return Count(int(characters / REMOTE_CHARACTERS_PER_TOKEN), limit, about=True)

    def _limit(self, context_length: int) -> int:
        return context_length - answer_room(context_length, self._answer_tokens)


def one_of_each_tokenizer(models: Sequence[ReadyModel]) -> list[ReadyModel]:
    """Of the models that share a checkpoint, an adapter, which may bring a chat template, and a context, the one whose
    system prompt takes the most room."""
    chosen: dict[tuple, ReadyModel] = {}
    for model in models:
        key = (model.source, model.adapter, model.context_length)
        if key not in chosen or model.system_prompt_tokens > chosen[key].system_prompt_tokens:
            chosen[key] = model
    return list(chosen.values())
