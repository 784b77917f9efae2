"""Blocks: bundles of pages, counted and cached. Knows no sequences and no tokens.

A block is *live* while someone references it. When the last reference goes, a block whose content was published under
a hash stays *cached*, to be found again; any other gives its pages back. When pages run out, the oldest cached block of
any checkpoint goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from engine.kv.page_map import PageMap
from engine.kv.pool import PagePool


class IntegrityError(RuntimeError):
    """The books of the pool do not add up. Nothing computed from it can be trusted; the engine ends."""


@dataclass(eq=False, slots=True)
class BlockGroup:
    """One layer group of one checkpoint: what its blocks look like, and the published ones by hash."""

    window: int | None
    pages_per_block: int
    published: dict[bytes, Block] = field(default_factory=dict)
    live_blocks: int = 0
    cached_blocks: int = 0


@dataclass(eq=False, slots=True)
class Block:
    """The KV of 16 tokens of one (checkpoint, layer group)."""

    group: BlockGroup
    pages: np.ndarray  # int32 [page_in_block]
    references: int = 1
    hash: bytes | None = None  # set once published
    pins: int = 0  # references among these that keep a system prompt


class Blocks:
    """Hands out blocks, counts their references, keeps the released ones until their pages are needed. All O(1).

    `page_map`: where each change is drawn, for those who watch the pool; None: nowhere.
    """

    def __init__(self, pool: PagePool, page_map: PageMap | None = None) -> None:
        self.pool = pool
        self._draw = page_map.draw if page_map else undrawn
        self.cached: OrderedDict[Block, None] = OrderedDict()  # released but published, oldest first
        self.cached_pages = 0
        self.shared = 0  # blocks with more than one reference
        self.evictions = 0

    @property
    def available_pages(self) -> int:
        """Free, or free for the taking."""
        return self.pool.free + self.cached_pages

    def allocate(self, group: BlockGroup) -> Block:
        """A live block with one reference and whatever its pages held before. `available_pages` must suffice."""
        while self.pool.free < group.pages_per_block:
            self.evict(next(iter(self.cached)))
            self.evictions += 1
        return self.hold(group, self.pool.take(group.pages_per_block))

    def hold(self, group: BlockGroup, pages: np.ndarray) -> Block:
        """A live block with one reference over pages that were taken from the pool for it."""
        group.live_blocks += 1
        block = Block(group, pages)
        self._draw(block)
        return block

    def retain(self, block: Block) -> None:
        if block.references == 0:
            self._uncache(block)
            block.group.live_blocks += 1
        elif block.references == 1:
            self.shared += 1
        block.references += 1
        self._draw(block)

    def release(self, block: Block) -> None:
        """Drops one reference; the last one caches the block or frees its pages."""
        if block.references <= 0:
            raise IntegrityError("a block was released more often than it was retained")
        block.references -= 1
        if block.references == 1:
            self.shared -= 1
        elif block.references == 0:
            block.group.live_blocks -= 1
            if block.hash is None:
                self.pool.give(block.pages)
            else:
                self.cached[block] = None
                self.cached_pages += block.group.pages_per_block
                block.group.cached_blocks += 1
        self._draw(block)

    def pin(self, block: Block, by: int = 1) -> None:
        """Says that one of the references of this block keeps a system prompt; `by` -1: no longer."""
        block.pins += by
        self._draw(block)

    def publish(self, block: Block, block_hash: bytes) -> Block:
        """Lets others find a live, full block by the hash of its content. Returns the block that is found: this one, or
        the one that holds the same content already."""
        found = block.group.published.setdefault(block_hash, block)
        if found is block:
            block.hash = block_hash
        return found

    def unpublish(self, block: Block) -> None:
        """Nobody finds this live block any more; its content is in doubt."""
        if block.hash is not None:
            del block.group.published[block.hash]
            block.hash = None

    def evict(self, block: Block) -> None:
        """Forgets a cached block and frees its pages."""
        self._uncache(block)
        del block.group.published[block.hash]
        block.hash = None
        self._draw(block)
        self.pool.give(block.pages)

    def _uncache(self, block: Block) -> None:
        del self.cached[block]
        self.cached_pages -= block.group.pages_per_block
        block.group.cached_blocks -= 1


def undrawn(block: Block) -> None:
    """Nobody watches."""
