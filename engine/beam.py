"""Beam search: of all continuations of the beams so far, the likeliest go on, and the best that ended are the answer.

The rules are those of transformers' `_beam_search`, so that both find the same: a candidate counts as ended only if it
is among the `width` likeliest; a score is the sum of log-probabilities over length ** length_penalty. Beams are
sequences like any other. One that has computed its last token waits for the others of its search; when all have said
how they would go on, `advance` decides who does. Knows no pages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.request import Request


@dataclass(frozen=True)
class BeamParams:
    width: int
    length_penalty: float = 1.0  # above 0 favours long answers, below 0 short ones
    early_stopping: bool | Literal["never"] = False  # True: with the first `width` that ended; "never": when sure


@dataclass(frozen=True)
class Ended:
    score: float
    tokens: list[int]
    reason: str  # "stop" or "length"


class Beam:
    """One of the continuations that are followed. Owns a sequence as a choice does, and never draws."""

    plain, finished, forks = False, False, ()

    def __init__(self, search: BeamSearch, tokens: list[int], score: float) -> None:
        self.search, self.request = search, search.request
        self.tokens, self.score = tokens, score
        self.sequence: Sequence | None = None
        self.candidates: list[tuple[float, int]] | None = None  # sum of log-probabilities, token

    def look_ahead(self, logits: Tensor) -> bool:
        """Notes the likeliest next tokens; False where the logits are not numbers. logits fp32 [vocab]."""
        logprobs = torch.log_softmax(logits, dim=-1)
        if not logprobs.max().isfinite():
            return False
        search = self.search
        if len(self.tokens) < search.min_tokens:
            logprobs[[end for end in search.ends if end < len(logprobs)]] = -torch.inf
        values, tokens = (logprobs + self.score).topk(min(search.candidates, len(logprobs)))
        self.candidates = list(zip(values.tolist(), tokens.tolist(), strict=True))
        return True


class BeamSearch:
    """`beams` are those that go on, the likeliest first."""

    def __init__(
        self, request: Request, params: BeamParams, ends: Collection[int], *, min_tokens: int, max_tokens: int
    ) -> None:
        self.request, self.params, self.ends = request, params, ends
        self.min_tokens, self.max_tokens = min_tokens, max_tokens
        self.candidates = max(2, 1 + len(ends)) * params.width  # so many that enough are left when each end is one
        self.beams = [Beam(self, [], 0.0)]
        self.ended: list[Ended] = []
        self.done = False

    @property
    def ready(self) -> bool:
        """Whether all beams have looked ahead."""
        return all(beam.candidates is not None for beam in self.beams)

    def advance(self) -> dict[Beam, list[Beam]]:
        """Replaces the beams by their likeliest continuations: by each old one, those that go on from it. Sets `done`,
        and leaves no beam, when nothing better can come."""
        old, width = self.beams, self.params.width
        found = [(score, beam, token) for beam in old for score, token in beam.candidates]
        found.sort(key=lambda each: -each[0])
        length = len(old[0].tokens) + 1
        going_on = []
        for rank, (score, beam, token) in enumerate(found[: self.candidates]):
            if token not in self.ends and length < self.max_tokens:
                going_on.append((beam, Beam(self, [*beam.tokens, token], score)))
            elif rank < width:
                reason = "stop" if token in self.ends else "length"
                self.ended.append(Ended(score / length**self.params.length_penalty, [*beam.tokens, token], reason))
        self.ended = sorted(self.ended, key=lambda each: -each.score)[:width]
        self.done = not going_on or not self._may_improve(going_on[0][1].score, length)
        kept = [] if self.done else going_on[:width]
        self.beams = [child for _, child in kept]
        return {beam: [child for parent, child in kept if parent is beam] for beam in old}

    def _may_improve(self, best: float, length: int) -> bool:
        """best: the score of the likeliest beam, which has `length` tokens."""
        if len(self.ended) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        sure = self.params.early_stopping == "never" and self.params.length_penalty > 0
        hoped = best / (self.max_tokens if sure else length) ** self.params.length_penalty
        return hoped > self.ended[-1].score
