"""A step's integers on the device: what came from the scheduler, which rows go to which tile, how contexts are split.

Knows the shape of a batch and of a decoder's attention; no weights, no kernels. All of it travels in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.spec import DecoderTraits, StepBatch

SPAN = 256  # tokens of context that one program of a split decode reads
BLOCK_KEYS = 64  # of which at a time


@dataclass(frozen=True)
class Tiles:
    """Query rows that are answered together: `rows` lanes a tile, tokens times the heads of a group."""

    rows: int
    sequence: Tensor  # [tile]
    start: Tensor  # [tile] first row inside its sequence


@dataclass(frozen=True)
class Plan:
    """One step; all tensors int32 on the device. Padding: rows of position -1, sequences of context 0."""

    tokens: Tensor  # [row]
    positions: Tensor  # [row]
    row_sequence: Tensor  # [row]
    query_starts: Tensor  # [sequence + 1]
    context_lens: Tensor  # [sequence]
    logit_rows: Tensor  # [wanted]
    page_tables: tuple[Tensor, ...]  # [group][sequence, block, page in block]
    decodes: Tiles | None  # of the sequences with one row, whose contexts are split; the first rows of a batch
    prefills: Tiles | None
    spans: tuple[int, ...]  # [group] the most spans that a decode's context is cut into
    adapters: tuple[tuple[Any, Tensor], ...] = ()  # each with the numbers of its rows, int64

    @property
    def rows(self) -> int:
        return len(self.tokens)


def decode_rows(group_size: int) -> int:
    """Lanes of a decode's tile: a matrix product on the device wants 16 at least."""
    return max(16, 1 << (group_size - 1).bit_length())


def prefill_rows(group_size: int, head_dim: int) -> int:
    """Lanes of a prefill's tile: as many as leave its result in the registers of four warps."""
    return max(64 if head_dim <= 128 else 32, decode_rows(group_size))


def attention_options(rows: int, dims: int) -> dict[str, int]:
    """Warps and stages of a launch: a tile's result [rows, dims] in fp32 has to fit into the registers of its warps."""
    return dict(num_warps=8 if rows * dims >= 8192 else 4, num_stages=2)


def most_spans(windows: tuple[int | None, ...], context: int) -> tuple[int, ...]:
    """[group] how many spans a context of so many tokens touches at most, whole contexts rounded up to a power of two.

    A window may begin in the middle of a span.
    """
    whole = 1 << (-(-context // SPAN) - 1).bit_length()
    return tuple(whole if window is None else min(whole, -(-window // SPAN) + 1) for window in windows)


def make_plan(traits: DecoderTraits, windows: tuple[int | None, ...], batch: StepBatch, device: torch.device) -> Plan:
    """windows: of each layer group."""
    group_size = traits.num_heads // traits.num_kv_heads
    starts, contexts = batch.query_starts.numpy(), batch.context_lens.numpy()
    counts = np.diff(starts)
    sequences = np.arange(len(counts), dtype=np.int32)
    is_decode = counts == 1
    prefill_lanes = prefill_rows(group_size, traits.head_dim)
    step = prefill_lanes // group_size  # rows of a prefill tile
    tiles = [(s, at) for s in sequences[~is_decode] for at in range(0, counts[s], step)]
    prefill_sequence, prefill_start = np.array(tiles, np.int32).reshape(-1, 2).T
    decode_sequence = sequences[is_decode]
    parts = (
        batch.tokens,
        batch.positions,
        np.repeat(sequences, counts),
        starts,
        contexts,
        batch.logit_rows,
        decode_sequence,
        np.zeros_like(decode_sequence),
        prefill_sequence,
        prefill_start,
        *batch.page_tables,
    )
    tokens, positions, row_sequence, query_starts, context_lens, logit_rows, *rest = to_device(parts, device)
    decode_sequence, decode_start, prefill_sequence, prefill_start, *tables = rest
    longest = int(contexts[is_decode].max(initial=1))
    return Plan(
        tokens, positions, row_sequence, query_starts, context_lens, logit_rows,
        page_tables=tuple(tables),
        decodes=Tiles(decode_rows(group_size), decode_sequence, decode_start) if len(decode_sequence) else None,
        prefills=Tiles(prefill_lanes, prefill_sequence, prefill_start) if len(prefill_sequence) else None,
        spans=most_spans(windows, longest),
        adapters=adapted_rows(batch, device),
    )  # fmt: skip


def adapted_rows(batch: StepBatch, device: torch.device) -> tuple[tuple[Any, Tensor], ...]:
    if not batch.adapters:
        return ()
    numbers = batch.row_adapters()
    return tuple((each, (numbers == i).nonzero()[:, 0].to(device)) for i, each in enumerate(batch.adapters))


def to_device(parts: tuple, device: torch.device) -> list[Tensor]:
    """int32 arrays and tensors of any shape, moved in one copy; each begins at 16 bytes, as vector loads want it."""
    arrays = [np.ascontiguousarray(part, dtype=np.int32) for part in parts]
    ends = np.cumsum([-(-array.size // 4) * 4 for array in arrays])
    packed = torch.empty(int(ends[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = packed.numpy()
    for array, end in zip(arrays, ends, strict=True):
        begin = end - -(-array.size // 4) * 4
        flat[begin : begin + array.size] = array.reshape(-1)
    moved = packed.to(device, non_blocking=True)
    begins = [end - -(-array.size // 4) * 4 for array, end in zip(arrays, ends, strict=True)]
    return [moved[begin : begin + array.size].view(array.shape) for array, begin in zip(arrays, begins, strict=True)]
