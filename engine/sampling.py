"""Logits to one token a row: penalties, temperature, min-p, top-k, top-p, and a draw keyed by seed and position.

What is drawn depends on a row's logits, settings, seed and position alone, never on its neighbours. Penalties and bans
are taken here, the draw itself by a kernel backend; what it must give is said in kernels.spec.Draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sequence import SamplingParams
from kernels import drawing
from kernels.spec import Draws

DrawKernel = Callable[[Tensor, Draws], list[int]]  # a backend's `draw`
GREEDY_BELOW = 1e-5  # a temperature that leaves nothing to chance


@dataclass
class SamplingRow:
    """One row's request: its settings, its tokens so far, and tokens that may not come now (ends before min_tokens)."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    banned: Sequence[int] = ()


def sample(logits: Tensor, rows: Sequence[SamplingRow], draw: DrawKernel = drawing.draw) -> list[int | None]:
    """The next token of each row, None for a row without a finite best. logits fp32 [row, vocab], left as they are."""
    if not rows:
        return []
    return [None if token < 0 else token for token in draw(adjusted(logits, rows), draws_of(rows))]


def draws_of(rows: Sequence[SamplingRow]) -> Draws:
    """The settings of all rows, column by column, with the random number of each."""
    temperature, top_k, top_p, min_p, chance = zip(*map(settings_of, rows), strict=True)
    return Draws(temperature, top_k, top_p, min_p, chance)


def settings_of(row: SamplingRow) -> tuple[float, int, float, float, float]:
    params = row.params
    if params.temperature < GREEDY_BELOW:
        return 0.0, 0, 1.0, 0.0, 0.0
    chance = uniform(row.seed, len(row.output_ids))
    return params.temperature, max(params.top_k, 0), params.top_p, params.min_p, chance


def adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits after penalties and bans: a copy if there are any."""
    touched = [i for i, row in enumerate(rows) if len(row.banned) or is_penalised(row)]
    if not touched:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    for i in touched:
        penalise(logits[i], rows[i])
        logits[i, list(rows[i].banned)] = -torch.inf
    return logits


def is_penalised(row: SamplingRow) -> bool:
    params = row.params
    of_output = params.presence_penalty != 0 or params.frequency_penalty != 0
    return params.repetition_penalty != 1 or (of_output and len(row.output_ids) > 0)


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
