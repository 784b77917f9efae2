"""One generation: what was asked, the tokens so far, how many of them have their KV. Knows no scheduler and no pages.

    WAITING ──admitted──> RUNNING ──> FINISHED
       ^                     │
       └──── preempted ──────┘          (aborted or failed: FINISHED from any)
       └─── RESTING <────────┘          (preempted while it waits for the others of its search)

A sequence computes `tokens[computed:length]` next: many while it prefills (also after a preemption, when everything
generated so far is prompt again), one when it decodes, and the guesses behind it where there are any (`drafts`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.drafts import Drafter

if TYPE_CHECKING:
    from engine.kv.manager import BlockTable, CheckpointKV
    from engine.logprobs import PlacedScore, Score


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the next token and when to end; checked by `schema`, honoured whole by `sampling` and `core`."""

    max_tokens: int  # of one answer; 0 computes the prompt alone
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # 0 and -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1  # answers to the same prompt
    logprobs: int | None = None  # how many of the likeliest tokens to name beside each; None: no log-probabilities
    prompt_logprobs: bool = False  # those of the prompt too; `logprobs` says how many
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)


@dataclass(frozen=True)
class GenerationEvent:
    """What one step added to one choice of a request. The last one of a choice carries a `finish_reason`, no other."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop", "length", "abort", "deadline" or "error"
    error: str | None  # with the last two: what went wrong, in words for the operator
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, served from blocks that were already there
    index: int = 0  # of the choice
    scores: tuple[PlacedScore, ...] = ()  # of the tokens whose text this is, where asked for
    prompt_scores: tuple[Score | None, ...] | None = None  # with the first event, where asked for


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    RESTING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """Tokens, and through `table` the blocks that hold their KV. `limit` is the length it may reach at most."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "cached_tokens",
        "charged",
        "client",
        "computed",
        "drafted",
        "drafter",
        "joint",
        "known",
        "length",
        "limit",
        "owner",
        "priority",
        "prompt_length",
        "salt",
        "scored",
        "space",
        "state",
        "table",
        "tokens",
    )

    def __init__(self, space: CheckpointKV, prompt_ids, max_tokens: int, owner: object = None) -> None:
        self.space = space
        self.owner = owner  # whoever is told of its progress; kv and scheduler never look
        self.prompt_length = self.length = len(prompt_ids)
        self.limit = self.length + max_tokens
        self.tokens = np.empty(min(self.limit, self.length + 256), np.int32)
        self.tokens[: self.length] = prompt_ids
        self.state = State.WAITING
        self.priority = 0  # the smaller, the sooner
        self.salt = ""  # whose blocks it may find in the cache; none: everybody's who has none
        self.client = ("", "")  # model and user: who is served by it
        self.arrival = self.charged = 0  # the line's: its place, and the virtual tokens charged
        self.joint: object = None  # those with the same one go on only together, as the beams of a search do
        self.computed = 0  # tokens whose KV is written
        self.known = 0  # tokens whose KV was written, here or where it was forked from, before it was preempted
        self.drafter: Drafter | None = None  # who guesses how it goes on, if anybody does
        self.drafted = 0  # guesses behind the last token that the step under way computes too
        self.cached_tokens: int | None = None  # of the prompt, found in the cache when first admitted
        self.scored = False  # whether the logits of every token are wanted: then nothing is taken from the cache
        self.block_hashes: list[bytes] = []  # of the full blocks, as far as anyone asked; outlives a preemption
        self.table: BlockTable | None = None

    @property
    def uncomputed(self) -> int:
        return self.length - self.computed

    @property
    def waits_for_others(self) -> bool:
        """Whether it has computed all it can before the others of its search have."""
        return self.joint is not None and self.computed == self.length

    def fork(self, owner: object) -> Sequence:
        """Another that begins with the same tokens, and holds nothing yet."""
        child = Sequence(self.space, self.tokens[: self.length], self.limit - self.length, owner)
        child.prompt_length, child.cached_tokens = self.prompt_length, self.cached_tokens
        child.block_hashes = list(self.block_hashes)
        child.drafter = self.drafter and Drafter(self.drafter.most)
        child.priority, child.client, child.joint = self.priority, self.client, self.joint
        child.salt, child.known = self.salt, self.computed
        return child

    @property
    def guesses(self) -> list[int]:
        return self.tokens[self.length : self.length + self.drafted].tolist()

    def draft(self, most: int) -> int:
        """Puts guesses behind the last token, at most so many and one less than may follow; how many there are."""
        guesses = self.drafter.guess(self.tokens[: self.length], min(most, self.limit - self.length - 1))
        self._make_room(len(guesses))
        self.tokens[self.length : self.length + len(guesses)] = guesses
        self.drafted = len(guesses)
        return self.drafted

    def append(self, token: int) -> None:
        self._make_room(1)
        self.tokens[self.length] = token
        self.length += 1

    def _make_room(self, tokens: int) -> None:
        if self.length + tokens > len(self.tokens):
            self.tokens = np.resize(self.tokens, min(self.limit, 2 * self.length + tokens))
