"""How many pages a block takes, and which blocks a token sees. Arithmetic alone: no page ids, no tensors.

A *unit* is the [16, head_dim] tile of one (layer, K or V, kv head). The units of a block fill its pages in order, a
whole number of units a page; what is left over is padding: none with pages of the default size and common shapes.

The kernels' blocks hold 16 tokens; only `engine/simulate`, which runs no kernels, makes geometries of other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import CheckpointError
from kernels.spec import BLOCK_TOKENS

DEFAULT_PAGE_BYTES = 8192


def blocks_of(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold `tokens` tokens from position 0."""
    return -(-tokens // block_tokens)


def first_seen_block(window: int | None, position: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """The first block of which a token at `position` sees anything; it sees itself and window - 1 before it."""
    return 0 if window is None else max(0, position - window + 1) // block_tokens


@dataclass(frozen=True)
class GroupGeometry:
    """The layers of one checkpoint that keep the same tokens: all full-attention layers, or all with one window."""

    window: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one element
    block_tokens: int = BLOCK_TOKENS

    @property
    def unit_bytes(self) -> int:
        return self.block_tokens * self.head_dim * self.itemsize

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
            return blocks_of(tokens, self.block_tokens)
        seen = blocks_of(chunk_tokens + self.window - 1, self.block_tokens) + 1
        return min(blocks_of(tokens, self.block_tokens), seen)


@dataclass(frozen=True)
class KVGeometry:
    """One checkpoint's layer groups, in the order of `kernels.spec.layer_groups`."""

    groups: tuple[GroupGeometry, ...]

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    @property
    def bytes_per_block(self) -> int:
        """What one block takes in all groups, padding left out."""
        return sum(group.units_per_block * group.unit_bytes for group in self.groups)


def default_page_bytes(itemsize: int) -> int:
    """For an engine that knows no checkpoint yet: holds one unit of a head of up to 256 elements."""
    return max(DEFAULT_PAGE_BYTES, BLOCK_TOKENS * 256 * itemsize)
