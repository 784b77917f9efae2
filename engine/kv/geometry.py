"""How many pages a block takes, and which blocks a token sees. Arithmetic alone: no page ids, no tensors.

A *unit* is the [16, head_dim] tile of one (layer, K or V, kv head). The units of a block fill its pages in order, a
whole number of units a page; what is left over is padding, which `choose_page_bytes` keeps small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import CheckpointError
from kernels.spec import BLOCK_TOKENS

DEFAULT_PAGE_BYTES = 8192
PAGE_BYTES_CANDIDATES = (8192, 16384, 24576, 32768, 49152, 65536)


def blocks_of(tokens: int) -> int:
    """Blocks that hold `tokens` tokens from position 0."""
    return -(-tokens // BLOCK_TOKENS)


def first_seen_block(window: int | None, position: int) -> int:
    """The first block of which a token at `position` sees anything; it sees itself and window - 1 before it."""
    return 0 if window is None else max(0, position - window + 1) // BLOCK_TOKENS


@dataclass(frozen=True)
class GroupGeometry:
    """The layers of one checkpoint that keep the same tokens: all full-attention layers, or all with one window."""

    window: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one element

    @property
    def unit_bytes(self) -> int:
        return BLOCK_TOKENS * self.head_dim * self.itemsize

    @property
    def units_per_block(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads

    def pages_per_block(self, page_bytes: int) -> int:
        """Raises CheckpointError where a page does not hold one unit."""
        units_per_page = page_bytes // self.unit_bytes
        if units_per_page == 0:
            raise CheckpointError(
                f"one attention head needs pages of {self.unit_bytes:,} bytes; this engine's are {page_bytes:,}: "
                f"start it with page_bytes = {self.unit_bytes}"
            )
        return -(-self.units_per_block // units_per_page)

    def most_blocks(self, tokens: int, chunk_tokens: int) -> int:
        """The most blocks that `tokens` tokens hold at once, when at most `chunk_tokens` are computed in a step."""
        if self.window is None:
            return blocks_of(tokens)
        return min(blocks_of(tokens), blocks_of(chunk_tokens + self.window - 1) + 1)


@dataclass(frozen=True)
class KVGeometry:
    """One checkpoint's layer groups, in the order of `kernels.spec.layer_groups`."""

    groups: tuple[GroupGeometry, ...]

    @property
    def bytes_per_block(self) -> int:
        """What 16 tokens take in all groups, padding left out."""
        return sum(group.units_per_block * group.unit_bytes for group in self.groups)


def default_page_bytes(itemsize: int) -> int:
    """For an engine that knows no checkpoint yet: holds one unit of a head of up to 256 elements."""
    return max(DEFAULT_PAGE_BYTES, BLOCK_TOKENS * 256 * itemsize)


def choose_page_bytes(geometries: Iterable[KVGeometry]) -> int:
    """The candidate with the least padding over these checkpoints, then with the fewest pages; 8,192 for none."""
    groups = [group for geometry in geometries for group in geometry.groups]
    largest_unit = max((group.unit_bytes for group in groups), default=0)
    fitting = [size for size in PAGE_BYTES_CANDIDATES if size >= largest_unit] or [largest_unit]

    def cost(page_bytes: int) -> tuple[float, int]:
        pages = sum(group.pages_per_block(page_bytes) for group in groups)
        filled = sum(group.units_per_block * group.unit_bytes for group in groups)
        return 1 - filled / (pages * page_bytes), pages

    return min(fitting, key=cost) if groups else DEFAULT_PAGE_BYTES
