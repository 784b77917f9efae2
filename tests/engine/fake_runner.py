"""A checkpoint without weights whose every answer depends on every page it ought to read.

The "KV" it writes for a token is a number mixed from the token and from all numbers it reads back, through the page
tables, of the positions its layer groups see: as in a transformer, it stands for the whole visible past. Logits are
mixed from the same. A wrong page, a missing write, a stale or poisoned slot or a window off by one changes the tokens.
`unpaged` computes the same without pages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

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


STIR, SHIFT, MASK = 0xBF58476D1CE4E5B9, 29, 2**64 - 1


def mix(*numbers: int) -> int:
    """64 bits, well stirred."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ number) * STIR & MASK
        state ^= state >> SHIFT
    return state


def mix_arrays(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    state = first.astype(np.uint64) * np.uint64(STIR) ^ second.astype(np.uint64)
    state = (state ^ state >> np.uint64(SHIFT)) * np.uint64(STIR)
    return state ^ state >> np.uint64(SHIFT)


def group(window: int | None, layers: int, heads: int = 1) -> GroupGeometry:
    return GroupGeometry(window, layers, heads, HEAD_DIM, ITEMSIZE)


FULL = KVGeometry((group(None, 1, 2),))  # 4 units, 2 pages a block
HYBRID = KVGeometry((group(None, 1), group(20, 3)))  # 1 and 3 pages a block
SLIDING = KVGeometry((group(32, 1),))  # no layer sees everything
TWO_WINDOWS = KVGeometry((group(None, 1), group(17, 1), group(40, 2)))


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


@dataclass(frozen=True)
class FakeAdapter:
    packed: str  # its name
    weight_bytes: int = 10


@dataclass(unsafe_hash=True)
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
    batch_sizes: list[int] = field(default_factory=list, compare=False)
    nan_token: int | None = None  # a row whose last token this is gets logits of NaN
    crash_token: int | None = None  # a batch with this token raises
    decoder: object = field(default_factory=object, compare=False)
    adapter: FakeAdapter | None = None

    tokenizer = TOKENIZER

    def __post_init__(self) -> None:
        self.seed = seed_of(self.adapter.packed if self.adapter else self.digest)

    def adapted(self, name: str) -> FakeRunner:
        """Another over the same decoder, that computes something else, in steps of both."""
        return replace(self, digest=f"{self.digest} with {name}", adapter=FakeAdapter(name), batch_sizes=[])

    def chat_format(self, name: str | None) -> ChatFormat:
        return self.chat

    def forward(self, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        self.batch_sizes.append(len(batch.context_lens))
        memory = pool.numpy().view(np.uint32)
        tokens, positions, starts = (each.numpy() for each in (batch.tokens, batch.positions, batch.query_starts))
        if self.crash_token in tokens:
            raise RuntimeError("crash token")
        tables = [table.numpy() for table in batch.page_tables]
        adapters = [-1] * len(batch.context_lens) if batch.sequence_adapters is None else batch.sequence_adapters
        states = np.zeros(len(tokens), np.uint64)
        seeds = [seed_of(name) for name in batch.adapters] + [seed_of(self.digest.partition(" with ")[0])]
        for sequence in range(len(starts) - 1):
            own = [
                Paged(memory, table[sequence], shape) for table, shape in zip(tables, self.geometry.groups, strict=True)
            ]
            rows = range(starts[sequence], starts[sequence + 1])
            assert positions[rows[-1]] == batch.context_lens[sequence] - 1
            for row in rows:
                states[row] = self.advance(own, int(tokens[row]), int(positions[row]), seeds[adapters[sequence]])
        wanted = batch.logit_rows.numpy()
        logits = self.logits(states[wanted])
        if self.nan_token is not None:
            logits[torch.from_numpy(tokens[wanted] == self.nan_token)] = torch.nan
        return logits

    def advance(self, caches: list, token: int, position: int, seed: int) -> int:
        """Writes the KV of one token; returns what its logits are made of."""
        past = [cache.read(position) for cache in caches]
        value = mix(seed, token, position, *past) & 0xFFFFFFFF
        for cache in caches:
            cache.write(position, value)
        return mix(value, *past)

    def logits(self, states: np.ndarray) -> torch.Tensor:
        numbers = mix_arrays(states[:, None], np.arange(self.vocab_size)[None])
        return torch.from_numpy((numbers >> np.uint64(40)).astype(np.float32) / 2**22)

    def unpaged(self, prompt_ids: list[int], params: SamplingParams, seed: int = 0) -> list[int]:
        """The right answer. Stops at end tokens as the engine does."""
        caches = [Unpaged(shape) for shape in self.geometry.groups]
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        row = SamplingRow(params, prompt_ids, [], seed, tuple(ends) if params.min_tokens else ())
        for position, token in enumerate(prompt_ids):
            state = self.advance(caches, token, position, self.seed)
        while True:
            (token,) = sample(self.logits(np.array([state], np.uint64)), [row])
            row.output_ids.append(token)
            if len(row.output_ids) >= params.min_tokens:
                row.banned = ()
            if len(row.output_ids) == params.max_tokens or token in ends:
                return row.output_ids
            state = self.advance(caches, token, len(prompt_ids) + len(row.output_ids) - 1, self.seed)


class Unpaged:
    def __init__(self, shape: GroupGeometry) -> None:
        self.window = shape.window
        self.values = np.zeros(4096, np.uint64)

    def write(self, position: int, value: int) -> None:
        self.values[position] = value

    def read(self, position: int) -> int:
        first = first_seen(self.window, position)
        return summary(self.values[first:position], first)


class Paged:
    """The layers of one group, of one sequence: every layer, head, K and V, element holds the number, each masked."""

    def __init__(self, memory: np.ndarray, table: np.ndarray, shape: GroupGeometry) -> None:
        """memory uint32 [page, element]; table int32 [block, page_in_block]."""
        units, units_per_page = np.arange(shape.units_per_block), memory.shape[1] // UNIT_ELEMENTS
        pages = table[:, units // units_per_page]
        slots = (units % units_per_page * UNIT_ELEMENTS)[:, None] + np.arange(HEAD_DIM)
        blocks = pages[:, None, :, None] * memory.shape[1] + slots + (np.arange(BLOCK_TOKENS) * HEAD_DIM)[:, None, None]
        self.places = np.where(pages[:, None, :, None] < 0, -1, blocks).reshape(-1, len(units), HEAD_DIM)
        self.masks = (np.arange(len(units) * HEAD_DIM, dtype=np.uint32) * 2654435761).reshape(-1, HEAD_DIM)
        self.memory = memory.reshape(-1)
        self.window = shape.window

    def write(self, position: int, value: int) -> None:
        assert self.places[position].min() >= 0, "a position that is written has no page"
        self.memory[self.places[position]] = value ^ self.masks

    def read(self, position: int) -> int:
        first = first_seen(self.window, position)
        if first == position:
            return 0
        places = self.places[first:position]
        assert places.min() >= 0, "a position that is seen has no page"
        found = self.memory[places] ^ self.masks  # [position, unit, element]
        values = found[:, 0, 0].astype(np.uint64)
        disagree = (found != found[:, :1, :1]).any(axis=(1, 2))
        values[disagree] = 2**40 + found[disagree].sum(axis=(1, 2), dtype=np.uint64)
        return summary(values, first)


def first_seen(window: int | None, position: int) -> int:
    return 0 if window is None else max(0, position - window + 1)


def summary(values: np.ndarray, first: int) -> int:
    return int(mix_arrays(values, np.arange(first, first + len(values))).sum()) if len(values) else 0


class PoisonedPool(PagePool):
    """Free pages are full of NaN, and handed out in random order."""

    def __init__(self, total: int, page_bytes: int = PAGE_BYTES, seed: int = 0) -> None:
        super().__init__(total, page_bytes, order=np.random.default_rng(seed).permutation(total))
        self.memory.fill_(0xFF)

    def give(self, pages: np.ndarray) -> None:
        super().give(pages)
        self.memory[torch.from_numpy(pages).long()] = 0xFF
