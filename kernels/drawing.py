"""One token from a row of logits, in numpy: the definition (kernels.spec.Draws) that backends are checked against.

Every filter keeps a prefix of the tokens in descending order of logit, and the draw inverts the cumulative distribution
in that order: so the `CANDIDATES` best decide nearly always, and where they do not, the row is looked at again with
ever more of its tokens until they do. The result is exact either way.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kernels.spec import Draws

CANDIDATES = 128
CHUNK = 64  # logits in a chunk; the n best tokens lie in the n chunks with the best maxima
WIDER = 16  # how much less likely tokens are let in, each time that those before did not decide


def draw(logits: Tensor, draws: Draws) -> list[int]:
    """As Backend.draw."""
    if not len(logits):
        return []
    tokens = torch.full((len(logits),), -1, dtype=torch.int32)
    chunks = logits.contiguous().view(len(logits), -1, math.gcd(logits.shape[1], CHUNK))
    maxima = chunks.amax(dim=-1)
    finite = maxima.amax(dim=-1).isfinite()  # NaN and both infinities come through a maximum
    temperature = torch.tensor(draws.temperature, dtype=torch.float64)
    greedy = (finite & (temperature == 0)).nonzero().flatten()
    random = (finite & (temperature > 0)).nonzero().flatten()
    if len(greedy):
        tokens[greedy] = best_tokens(chunks, maxima, greedy)
    if len(random):
        widest = max(draws.top_k[row] for row in random)
        values, places = candidates(chunks, maxima, random, max(CANDIDATES, widest))
        for n, row in enumerate(random.tolist()):
            settings = (column[row] for column in (draws.temperature, draws.top_p, draws.min_p, draws.chance))
            tokens[row] = draw_row(logits[row].numpy(), values[n], places[n], draws.top_k[row], *settings)
    return tokens.tolist()


def best_tokens(chunks: Tensor, maxima: Tensor, rows: Tensor) -> Tensor:
    """The first of the largest logits of each of `rows`. chunks [row, chunk, CHUNK], maxima [row, chunk]."""
    at = maxima[rows].argmax(dim=-1)
    return (at * chunks.shape[2] + chunks[rows, at].argmax(dim=-1)).int()


def candidates(chunks: Tensor, maxima: Tensor, rows: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best logits of each of `rows`, descending, equal ones by token: values and tokens [row, n]."""
    size = chunks.shape[2]
    at = maxima[rows].topk(min(count, maxima.shape[1]), dim=-1, sorted=False).indices
    inside = chunks[rows[:, None], at].flatten(1)
    values, places = inside.topk(min(count, inside.shape[1]), dim=-1, sorted=False)
    tokens = at.gather(1, places // size) * size + places % size
    return in_order(values.numpy(), tokens.numpy())


def in_order(values: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((tokens, -values))
    return np.take_along_axis(values, order, -1), np.take_along_axis(tokens, order, -1)


def draw_row(
    logits: np.ndarray,
    values: np.ndarray,
    tokens: np.ndarray,
    top_k: int,
    temperature: float,
    top_p: float,
    min_p: float,
    chance: float,
) -> int:
    """A token of one row. logits [vocab]; values, tokens: its best, in order, no fewer than top_k."""
    if len(values) < len(logits):  # others may equal the last of them
        sure = int(np.count_nonzero(values > values[-1]))
        if sure < max(top_k, 1):
            tokens = np.flatnonzero(logits >= values[-1])
            sure, (values, tokens) = len(tokens), in_order(logits[tokens], tokens)
        values, tokens = values[:sure], tokens[:sure]
    weights = relative_weights(values, values[0], temperature)
    left = int(np.count_nonzero(weights >= min_p))
    if 0 < top_k <= left:
        left = top_k
    if left < len(weights) or left == top_k or left == len(logits):
        return int(tokens[pick(weights[:left], weights[:left].sum(dtype=np.float64), top_p, chance, True)])
    everyone = relative_weights(logits, values[0], temperature)
    everyone[everyone < min_p] = 0
    total, floor = everyone.sum(dtype=np.float64), weights[-1]
    while (place := pick(weights, total, top_p, chance, len(weights) == len(everyone))) is None:
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
