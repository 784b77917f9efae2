"""Decodes as CUDA graphs: a step of small kernels is launched as one, at padded batch sizes.

A graph replays the very addresses that it captured, so each size has input buffers of its own, filled before a replay;
the missing rows are padding (position -1, context 0), for which no kernel reads or writes a page. All else of a step
lies in memory that a decoder's graphs share, its logits too: the next forward may overwrite them (kernels/spec.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.spec import StepBatch
from kernels.triton.plan import SPAN, Plan, make_plan

if TYPE_CHECKING:
    from kernels.triton import TritonBackend, TritonDecoder

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # rows that a graph is made for


@dataclass(frozen=True)
class Captured:
    plan: Plan  # whose tensors are the inputs
    logits: Tensor
    replay: Callable[[], None]
    memory: Any  # of the graph, as torch.cuda.graph takes it for another


@dataclass
class DecodeGraphs:
    """The graphs of one decoder, made when first needed; None where that failed, and its kernels are launched."""

    made: dict[tuple, Captured | None] = field(default_factory=dict)

    def fits(self, batch: StepBatch) -> bool:
        """Only decodes, each with its logits wanted in order: what every step is but those with a prefill, or an
        adapter, whose rows differ from step to step."""
        rows = len(batch.tokens)
        return not batch.adapters and rows == len(batch.context_lens) == len(batch.logit_rows) and rows <= SIZES[-1]

    def replay(self, decoder: TritonDecoder, pool: Tensor, batch: StepBatch, backend: TritonBackend) -> Tensor:
        padded = pad(batch)
        plan = make_plan(decoder.traits, decoder.windows, padded, backend.device)
        key = (pool.data_ptr(), len(padded.tokens), plan.spans, *(table.shape for table in plan.page_tables))
        run = partial(backend.run, decoder, pool, plan)
        if key not in self.made:
            self.made[key] = self._try_to_capture(plan, run)
        captured = self.made[key]
        if captured is None:
            return run()[: len(batch.tokens)]
        refill(captured.plan, plan)
        captured.replay()
        return captured.logits[: len(batch.tokens)]

    def _try_to_capture(self, plan: Plan, run: Callable[[], Tensor]) -> Captured | None:
        """A graph takes memory beside the step's own; what else is wrong shows when the kernels are launched."""
        memory = next((each.memory for each in self.made.values() if each), None)
        try:
            return capture(plan, run, memory)
        except RuntimeError as reason:
            log.warning("decodes of %d rows run without a CUDA graph, and slower: %s", plan.rows, reason)
            return None


def pad(batch: StepBatch) -> StepBatch:
    """Rows up to one of SIZES, tables and contexts up to a power of two of spans, so that few graphs serve all."""
    rows = len(batch.tokens)
    size = next(size for size in SIZES if size >= rows)
    more = size - rows
    numbers = torch.arange(size + 1, dtype=torch.int32)
    return StepBatch(
        tokens=_longer(batch.tokens, more, 0),
        positions=_longer(batch.positions, more, -1),
        query_starts=numbers,
        context_lens=_longer(batch.context_lens, more, 0),
        page_tables=tuple(_wider(table, size) for table in batch.page_tables),
        logit_rows=numbers[:-1],
    )


def _longer(values: Tensor, more: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, more), value=value)


def _wider(table: Tensor, rows: int) -> Tensor:
    per_span = SPAN // 16
    spans = max(1, -(-table.shape[1] // per_span))
    blocks = per_span << (spans - 1).bit_length()
    wider = torch.full((rows, blocks, table.shape[2]), -1, dtype=torch.int32)
    wider[: len(table), : table.shape[1]] = table
    return wider


def capture(plan: Plan, run: Callable[[], Tensor], memory: Any) -> Captured:
    """Three runs beside the main stream first, as torch.cuda.graph wants: kernels compile, libraries set up.

    `memory` is that of a graph that lives, or None. What other threads do on the device meanwhile, such as to load a
    model, is no part of the graph and does not disturb it ("thread_local").
    """
    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails would not come back to it
    with here, torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        logits = run()
    return Captured(plan, logits, graph.replay, graph.pool())


def refill(target: Plan, source: Plan) -> None:
    """Copies what a step brings into the buffers that a graph reads."""
    if target is source:
        return
    for name in ("tokens", "positions", "context_lens"):
        getattr(target, name).copy_(getattr(source, name), non_blocking=True)
    for ours, theirs in zip(target.page_tables, source.page_tables, strict=True):
        ours.copy_(theirs, non_blocking=True)
