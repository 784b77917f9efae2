"""A checkpoint without weights whose every answer depends on every page it ought to read.

The "KV" it writes for a token is a number mixed from the token and from all numbers it reads back, through the page
tables, of the positions its layer groups see: as in a transformer, it stands for the whole visible past. Logits are
mixed from the same. A wrong page, a missing write, a stale or poisoned slot or a window off by one changes the tokens.
`unpaged` computes the same without pages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.chat import CHAT_FORMATS, ChatFormat
from engine.kv.geometry import GroupGeometry, KVGeometry
from engine.kv.pool import PagePool
from engine.sampling import SamplingRow, sample
from engine.sequence import SamplingParams
from kernels.spec import BLOCK_TOKENS, StepBatch
from tests.engine.tiny import VOCAB_SIZE, tiny_tokenizer

HEAD_DIM = 2
ITEMSIZE = 4
UNIT_ELEMENTS = BLOCK_TOKENS * HEAD_DIM
PAGE_BYTES = 2 * UNIT_ELEMENTS * ITEMSIZE  # two units a page
TOKENIZER = tiny_tokenizer(adds_bos=False)
CHAT = CHAT_FORMATS["plain-roles"].bind(TOKENIZER, {})


def mix(*numbers: np.ndarray | int) -> np.ndarray:
    """uint64, well stirred."""
    state = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for number in numbers:
            state = (state ^ np.asarray(number).astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            state = state ^ (state >> np.uint64(29))
    return state


def group(window: int | None, layers: int, heads: int = 1) -> GroupGeometry:
    return GroupGeometry(window, layers, heads, HEAD_DIM, ITEMSIZE)


FULL = KVGeometry((group(None, 1, 2),))  # 4 units, 2 pages a block
HYBRID = KVGeometry((group(None, 1), group(20, 3)))  # 1 and 3 pages a block
SLIDING = KVGeometry((group(32, 1),))  # no layer sees everything
TWO_WINDOWS = KVGeometry((group(None, 1), group(17, 1), group(40, 2)))


@dataclass(eq=False)
class FakeRunner:
    geometry: KVGeometry = FULL
    digest: str = "fake"
    context_length: int = 4096
    vocab_size: int = VOCAB_SIZE
    dtype: torch.dtype = torch.float32
    weight_bytes: int = 0
    architecture: str = "FakeForCausalLM"
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    chat: ChatFormat = CHAT
    batch_sizes: list[int] = field(default_factory=list)
    nan_token: int | None = None  # a row whose last token this is gets logits of NaN
    crash_token: int | None = None  # a batch with this token raises

    tokenizer = TOKENIZER

    def __post_init__(self) -> None:
        self.seed = int.from_bytes(hashlib.sha256(self.digest.encode()).digest()[:7])

    def chat_format(self, name: str | None) -> ChatFormat:
        return self.chat

    def forward(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        self.batch_sizes.append(len(batch.context_lens))
        memory = pool.numpy().view(np.uint32)
        tokens, positions, starts = (each.numpy() for each in (batch.tokens, batch.positions, batch.query_starts))
        if self.crash_token in tokens:
            raise RuntimeError("crash token")
        tables = [table.numpy() for table in batch.page_tables]
        states = np.zeros(len(tokens), np.uint64)
        for sequence in range(len(starts) - 1):
            own = [Paged(memory, table[sequence], shape) for table, shape in zip(tables, self.geometry.groups)]
            rows = range(starts[sequence], starts[sequence + 1])
            assert positions[rows[-1]] == batch.context_lens[sequence] - 1
            for row in rows:
                states[row] = self.advance(own, int(tokens[row]), int(positions[row]))
        wanted = batch.logit_rows.numpy()
        logits = self.logits(states[wanted])
        if self.nan_token is not None:
            logits[torch.from_numpy(tokens[wanted] == self.nan_token)] = torch.nan
        return logits

    def advance(self, caches: list, token: int, position: int) -> np.uint64:
        """Writes the KV of one token; returns what its logits are made of."""
        past = [cache.read(position) for cache in caches]
        value = int(mix(self.seed, token, position, *past)) & 0xFFFFFFFF
        for cache in caches:
            cache.write(position, value)
        return mix(value, *(cache.read(position, itself=True) for cache in caches))

    def logits(self, states: np.ndarray) -> torch.Tensor:
        numbers = mix(states[:, None], np.arange(self.vocab_size)[None])
        return torch.from_numpy((numbers >> np.uint64(40)).astype(np.float32) / 2**22)

    def unpaged(self, prompt_ids: list[int], params: SamplingParams, seed: int = 0) -> list[int]:
        """The right answer. Stops at end tokens as the engine does."""
        caches = [Unpaged(shape) for shape in self.geometry.groups]
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        row = SamplingRow(params, prompt_ids, [], seed, tuple(ends) if params.min_tokens else ())
        for position, token in enumerate(prompt_ids):
            state = self.advance(caches, token, position)
        while True:
            (token,) = sample(self.logits(np.array([state])), [row])
            row.output_ids.append(token)
            if len(row.output_ids) >= params.min_tokens:
                row.banned = ()
            if len(row.output_ids) == params.max_tokens or token in ends:
                return row.output_ids
            state = self.advance(caches, token, len(prompt_ids) + len(row.output_ids) - 1)


class Unpaged:
    def __init__(self, shape: GroupGeometry) -> None:
        self.window = shape.window
        self.values: list[int] = []

    def write(self, position: int, value: int) -> None:
        assert position == len(self.values)
        self.values.append(value)

    def read(self, position: int, itself: bool = False) -> int:
        seen = visible(self.window, position, itself)
        return summary(np.array(self.values[seen.start : seen.stop], np.uint64), seen)


class Paged:
    """The layers of one group, of one sequence: every layer, head, K and V, element holds the number, each masked."""

    def __init__(self, memory: np.ndarray, table: np.ndarray, shape: GroupGeometry) -> None:
        self.memory = memory  # uint32 [page, element]
        self.table = table  # [block, page_in_block]
        self.window = shape.window
        self.units = np.arange(shape.units_per_block)
        self.units_per_page = memory.shape[1] // UNIT_ELEMENTS
        self.masks = (np.arange(shape.units_per_block * HEAD_DIM, dtype=np.uint32) * 2654435761).reshape(-1, HEAD_DIM)

    def write(self, position: int, value: int) -> None:
        self.memory[self._places(np.array([position]))] = value ^ self.masks

    def read(self, position: int, itself: bool = False) -> int:
        seen = visible(self.window, position, itself)
        found = self.memory[self._places(np.arange(seen.start, seen.stop))] ^ self.masks  # [position, unit, element]
        values = found[:, 0, 0].astype(np.uint64)
        disagree = (found != found[:, :1, :1]).any(axis=(1, 2))
        values[disagree] = 2**40 + found[disagree].sum(axis=(1, 2), dtype=np.uint64)
        return summary(values, seen)

    def _places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pages = self.table[positions // BLOCK_TOKENS][:, self.units // self.units_per_page]
        assert (pages >= 0).all(), "a position that is seen has no page"
        slots = self.units % self.units_per_page * UNIT_ELEMENTS + (positions % BLOCK_TOKENS * HEAD_DIM)[:, None]
        return np.broadcast_arrays(pages[..., None], slots[..., None] + np.arange(HEAD_DIM))


def visible(window: int | None, position: int, itself: bool) -> range:
    return range(0 if window is None else max(0, position - window + 1), position + itself)


def summary(values: np.ndarray, seen: range) -> int:
    with np.errstate(over="ignore"):
        return int(mix(values, np.arange(seen.start, seen.stop)).sum()) if len(values) else 0


class PoisonedPool(PagePool):
    """Free pages are full of NaN, and handed out in random order."""

    def __init__(self, total: int, page_bytes: int = PAGE_BYTES, seed: int = 0) -> None:
        super().__init__(total, page_bytes, order=np.random.default_rng(seed).permutation(total))
        self.memory.fill_(0xFF)

    def give(self, pages: np.ndarray) -> None:
        super().give(pages)
        self.memory[torch.from_numpy(pages).long()] = 0xFF
