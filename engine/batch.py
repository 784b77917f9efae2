"""A scheduled step as the tensors that kernels read. Knows no policy and no weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.scheduler import Step
from engine.sequence import Sequence
from kernels.spec import BLOCK_TOKENS, StepBatch

if TYPE_CHECKING:
    from engine.architectures import Adapter


def wants_token(sequence: Sequence, count: int) -> bool:
    """Whether computing `count` tokens reaches the last one, and another may follow it."""
    return sequence.uncomputed + sequence.drafted == count and sequence.length < sequence.limit


def build_batch(step: Step, adapters: Iterable[Adapter | None] = ()) -> StepBatch:
    """The next `counts` tokens of each sequence; one row of logits, in order, for each that wants a token and for each
    of its guesses, and one for each token of those that are scored. `adapters` [sequence], if any has one."""
    sequences = step.sequences
    counts = np.array(step.counts, np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    computed = np.array([sequence.computed for sequence in sequences], np.int32)
    context_lens = computed + counts
    positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
    wanted = [wants_token(sequence, count) for sequence, count in zip(sequences, step.counts, strict=True)]
    return StepBatch(
        tokens=torch.from_numpy(next_tokens(step)),
        positions=torch.from_numpy(positions),
        query_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(context_lens),
        page_tables=tuple(page_table(sequences, group) for group in range(len(step.space.groups))),
        logit_rows=torch.from_numpy(logit_rows(step, starts, wanted)),
        **numbered(list(adapters)),
    )


def numbered(adapters: list[Adapter | None]) -> dict[str, Any]:
    """What a StepBatch says of them: each packed one once, and its number by sequence."""
    distinct = list(dict.fromkeys(adapter for adapter in adapters if adapter))
    if not distinct:
        return {}
    numbers = [distinct.index(adapter) if adapter else -1 for adapter in adapters]
    return {
        "adapters": tuple(adapter.packed for adapter in distinct),
        "sequence_adapters": torch.tensor(numbers, dtype=torch.int32),
    }


def logit_rows(step: Step, starts: np.ndarray, wanted: list[bool]) -> np.ndarray:
    """int32 [wanted]. starts: the first row of each sequence, and the end."""
    if not any(sequence.scored or sequence.drafted for sequence in step.sequences):
        return starts[1:][wanted] - 1
    spans = zip(step.sequences, starts[:-1], starts[1:], wanted, strict=True)
    rows = [range(first if each.scored or each.drafted else last - wants, last) for each, first, last, wants in spans]
    return np.concatenate(rows).astype(np.int32)


def next_tokens(step: Step) -> np.ndarray:
    if max(step.counts) == 1:
        return np.array([sequence.tokens[sequence.computed] for sequence in step.sequences], np.int32)
    spans = zip(step.sequences, step.counts, strict=True)
    return np.concatenate([sequence.tokens[sequence.computed : sequence.computed + count] for sequence, count in spans])


def page_table(sequences: list[Sequence], group: int) -> torch.Tensor:
    """int32 [sequence, block, page_in_block], as wide as the longest needs."""
    blocks = [sequence.table.capacity // BLOCK_TOKENS for sequence in sequences]
    table = np.full((len(sequences), max(blocks), sequences[0].table.pages[group].shape[1]), -1, np.int32)
    for row, sequence, count in zip(table, sequences, blocks, strict=True):
        row[:count] = sequence.table.pages[group][:count]
    return torch.from_numpy(table)
