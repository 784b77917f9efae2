"""A scheduled step as the tensors that kernels read. Knows no policy and no weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.scheduler import Step
from engine.sequence import Sequence
from kernels.spec import BLOCK_TOKENS, StepBatch

if TYPE_CHECKING:
    from engine.architectures import Adapter
    from engine.kv.manager import BlockTable


def wants_token(sequence: Sequence, count: int) -> bool:
    """Whether computing `count` tokens reaches the last one, and another may follow it."""
    return sequence.uncomputed + sequence.drafted == count and sequence.length < sequence.limit


class Batches:
    """Builds the batch of each step. Of one sequence that decodes alone it is the batch of the step before, with other
    numbers in it: to make tensors anew takes longer than all else between two forwards of a small model."""

    def __init__(self) -> None:
        self._numbers = (ctypes.c_int32 * 5)(0, 1)
        part = partial(torch.frombuffer, self._numbers, dtype=torch.int32)
        self._columns = {
            "query_starts": part(count=2),
            "logit_rows": part(count=1),
            "tokens": part(count=1, offset=8),
            "positions": part(count=1, offset=12),
            "context_lens": part(count=1, offset=16),
        }
        self._table: tuple[BlockTable | None, int] = None, 0  # of `_lone`, and its tokens
        self._lone: StepBatch | None = None

    def build(self, step: Step, adapters: Iterable[Adapter | None] = ()) -> StepBatch:
        """As `build_batch`. Valid until the next call."""
        sequence, adapters = step.sequences[0], list(adapters)
        alone = len(step.sequences) == 1 and step.counts[0] == 1 and not (sequence.scored or sequence.drafted)
        if not alone or any(adapters) or not wants_token(sequence, 1):
            return build_batch(step, adapters)
        computed, table = sequence.computed, sequence.table
        self._numbers[2:] = sequence.tokens.item(computed), computed, computed + 1
        if self._table != (table, table.capacity):
            self._table = table, table.capacity
            tables = tuple(page_table(step.sequences, group) for group in range(len(table.pages)))
            self._lone = StepBatch(**self._columns, page_tables=tables)
        return self._lone


def build_batch(step: Step, adapters: Iterable[Adapter | None] = ()) -> StepBatch:
    """The next `counts` tokens of each sequence; one row of logits, in order, for each that wants a token and for each
    of its guesses, and one for each token of those that are scored. `adapters` [sequence], if any has one."""
    tokens, positions, starts, context_lens, rows = [], [], [0], [], []
    for sequence, count in zip(step.sequences, step.counts, strict=True):
        first, end = sequence.computed, sequence.computed + count
        tokens.append(sequence.tokens[first:end])
        positions += range(first, end)
        starts.append(len(positions))
        context_lens.append(end)
        wanted = count if sequence.scored or sequence.drafted else wants_token(sequence, count)
        rows += range(len(positions) - wanted, len(positions))
    return StepBatch(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        positions=int32(positions),
        query_starts=int32(starts),
        context_lens=int32(context_lens),
        page_tables=tuple(page_table(step.sequences, group) for group in range(len(step.space.groups))),
        logit_rows=int32(rows),
        **numbered(list(adapters)),
    )


def int32(numbers: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, np.int32))


def numbered(adapters: list[Adapter | None]) -> dict[str, Any]:
    """What a StepBatch says of them: each packed one once, and its number by sequence."""
    distinct = list(dict.fromkeys(adapter for adapter in adapters if adapter))
    if not distinct:
        return {}
    numbers = [distinct.index(adapter) if adapter else -1 for adapter in adapters]
    return {
        "adapters": tuple(adapter.packed for adapter in distinct),
        "sequence_adapters": int32(numbers),
    }


def page_table(sequences: list[Sequence], group: int) -> torch.Tensor:
    """int32 [sequence, block, page_in_block], as wide as the longest needs. One alone gives its own."""
    if len(sequences) == 1:
        table = sequences[0].table
        return torch.from_numpy(table.pages[group][None, : table.capacity // BLOCK_TOKENS])
    blocks = [sequence.table.capacity // BLOCK_TOKENS for sequence in sequences]
    table = np.full((len(sequences), max(blocks), sequences[0].table.pages[group].shape[1]), -1, np.int32)
    for row, sequence, count in zip(table, sequences, blocks, strict=True):
        row[:count] = sequence.table.pages[group][:count]
    return torch.from_numpy(table)
