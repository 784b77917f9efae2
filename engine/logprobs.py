"""What the model thought of the tokens: their log-probabilities, beside those of the likeliest ones.

They come from the logits as the checkpoint gave them, before temperature, penalties, bias and grammar. Each is let out
together with the text of its token, so that what was held back and then cut off as a stop string has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Score:
    """Of one token. `best`: the likeliest tokens at its place with theirs, in order."""

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PlacedScore:
    """`offset`: characters of text before the token."""

    score: Score
    offset: int


def scores_of(logits: Tensor, tokens: Sequence[int], best: int) -> list[Score]:
    """Scores of one token a row, with the `best` likeliest beside it. logits fp32 [row, vocab], left as they are."""
    norms = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0] - norms
    values, places = logits.topk(min(best, logits.shape[1]), dim=-1)
    likeliest = (values - norms[:, None]).tolist()
    rows = zip(tokens, chosen.tolist(), places.tolist(), likeliest, strict=True)
    return [Score(token, logprob, tuple(zip(*pairs, strict=True))) for token, logprob, *pairs in rows]


class ScoreStream:
    """Holds scores until the text of their tokens is out. `shown` and `offset` count characters of the answer."""

    def __init__(self) -> None:
        self._held: deque[PlacedScore] = deque()

    def push(self, score: Score, offset: int) -> None:
        self._held.append(PlacedScore(score, offset))

    def release(self, shown: int) -> tuple[PlacedScore, ...]:
        """Those whose text has begun to show; a token without a text of its own goes with the next."""
        out = []
        while self._held and self._held[0].offset < shown:
            out.append(self._held.popleft())
        return tuple(out)

    def flush(self) -> tuple[PlacedScore, ...]:
        """All that are left, at the end of an answer that no stop string cut."""
        out = tuple(self._held)
        self._held.clear()
        return out
