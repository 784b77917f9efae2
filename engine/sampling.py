"""Logits to one token a row: penalties, temperature, min-p, top-k, top-p, and a draw keyed by seed and position.

What is drawn depends on a row's logits, settings, seed and position alone, never on its neighbours. Every filter keeps
a prefix of the tokens in descending order of logit (min-p, then top-k, then top-p of what these left), and the draw
inverts the cumulative distribution in that order: so the `CANDIDATES` best decide nearly always, and where they do
not, the row is looked at again with ever more of its tokens until they do. The result is exact either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sequence import SamplingParams

CANDIDATES = 128
CHUNK = 64  # logits in a chunk; the n best tokens lie in the n chunks with the best maxima
WIDER = 16  # how much less likely tokens are let in, each time that those before did not decide
GREEDY_BELOW = 1e-5  # a temperature that leaves nothing to chance


@dataclass
class SamplingRow:
    """One row's request: its settings, its tokens so far, and tokens that may not come now (ends before min_tokens)."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    banned: Sequence[int] = ()


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """The next token of each row, None for a row without a finite best. logits fp32 [row, vocab], left as they are."""
    if not rows:
        return []
    logits = adjusted(logits, rows)
    chunks = logits.view(len(rows), -1, math.gcd(logits.shape[1], CHUNK))
    maxima = chunks.amax(dim=-1)
    finite = maxima.amax(dim=-1).isfinite().tolist()  # NaN and both infinities come through a maximum
    greedy = [i for i, row in enumerate(rows) if finite[i] and row.params.temperature < GREEDY_BELOW]
    random = [i for i, row in enumerate(rows) if finite[i] and row.params.temperature >= GREEDY_BELOW]
    chosen: list[int | None] = [None] * len(rows)
    for i, token in zip(greedy, best_tokens(chunks, maxima, greedy), strict=True):
        chosen[i] = token
    if random:
        widest = max(rows[i].params.top_k for i in random)
        values, tokens = candidates(chunks, maxima, random, max(CANDIDATES, widest))
        for n, i in enumerate(random):
            chosen[i] = draw(logits[i].numpy(), values[n], tokens[n], rows[i])
    return chosen


def adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits after penalties and bans: a copy if there are any."""
    touched = [i for i, row in enumerate(rows) if len(row.banned) or has_penalty(row.params)]
    if not touched:
        return logits.contiguous()
    logits = logits.clone(memory_format=torch.contiguous_format)
    for i in touched:
        penalise(logits[i], rows[i])
        logits[i, list(rows[i].banned)] = -torch.inf
    return logits


def has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def penalise(logits: Tensor, row: SamplingRow) -> None:
    """In place, [vocab]. Repetition counts prompt and output (Keskar et al. 2019), the other two the output alone."""
    params = row.params
    output = np.asarray(row.output_ids, dtype=np.int64)
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.union1d(np.asarray(row.prompt_ids, dtype=np.int64), output))
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if len(output) and (params.presence_penalty or params.frequency_penalty):
        seen, counts = (torch.from_numpy(each) for each in np.unique(output, return_counts=True))
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts


def best_tokens(chunks: Tensor, maxima: Tensor, rows: list[int]) -> list[int]:
    """The first of the largest logits of each of `rows`. chunks [row, chunk, CHUNK], maxima [row, chunk]."""
    at = maxima[rows].argmax(dim=-1)
    return (at * chunks.shape[2] + chunks[rows, at].argmax(dim=-1)).tolist()


def candidates(chunks: Tensor, maxima: Tensor, rows: list[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best logits of each of `rows`, descending, equal ones by token: values and tokens [row, n]."""
    size = chunks.shape[2]
    at = maxima[rows].topk(min(count, maxima.shape[1]), dim=-1, sorted=False).indices
    inside = chunks[torch.tensor(rows)[:, None], at].flatten(1)
    values, places = inside.topk(min(count, inside.shape[1]), dim=-1, sorted=False)
    tokens = at.gather(1, places // size) * size + places % size
    return in_order(values.numpy(), tokens.numpy())


def in_order(values: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((tokens, -values))
    return np.take_along_axis(values, order, -1), np.take_along_axis(tokens, order, -1)


def draw(logits: np.ndarray, values: np.ndarray, tokens: np.ndarray, row: SamplingRow) -> int:
    """A token of one row. logits [vocab]; values, tokens: its best, in order, no fewer than top_k."""
    params, chance = row.params, uniform(row.seed, len(row.output_ids))
    weights = relative_weights(values, values[0], params.temperature)
    left = int(np.count_nonzero(weights >= params.min_p))
    if 0 < params.top_k <= left:
        left = params.top_k
    if left < len(weights) or left == params.top_k or left == len(logits):
        return int(tokens[pick(weights[:left], weights[:left].sum(dtype=np.float64), params.top_p, chance, True)])
    everyone = relative_weights(logits, values[0], params.temperature)
    everyone[everyone < params.min_p] = 0
    total, floor = everyone.sum(dtype=np.float64), weights[-1]
    while (place := pick(weights, total, params.top_p, chance, len(weights) == len(everyone))) is None:
        floor /= WIDER
        tokens = np.flatnonzero(everyone >= floor)
        weights, tokens = in_order(everyone[tokens], tokens)
    return int(tokens[place])


def relative_weights(logits: np.ndarray, best: np.float32, temperature: float) -> np.ndarray:
    """Probabilities over that of the best one, fp32."""
    weights = (logits - best) / np.float32(temperature)
    return np.exp(weights, out=weights)


def pick(weights: np.ndarray, total: np.float64, top_p: float, chance: float, complete: bool) -> int | None:
    """The place that `chance` in [0, 1) falls on; None if it, or the end of top-p, lies past these weights.

    weights: in descending order, the first of several that add up to `total`; all of them where `complete`.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    last, mass = int(np.count_nonzero(weights)) - 1, total
    if top_p < 1:  # the fewest that reach top_p of the total
        nucleus = int(np.searchsorted(cumulative, top_p * total))
        if nucleus <= last:
            last, mass = nucleus, cumulative[nucleus]
        elif not complete:
            return None
    place = int(np.searchsorted(cumulative, chance * mass, side="right"))
    if place <= last:
        return place
    return last if complete or mass is not total else None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from both: two rounds of splitmix64 (Steele, Lea and Flood 2014)."""
    return (mix(mix(seed) ^ position) >> 11) * 2.0**-53


def mix(value: int) -> int:
    """64 well-stirred bits of the low 64 of an integer."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
