"""The page map: what each page of the pool is used for, one byte a page, kept while blocks change hands.

    free ──allocate──> used ──retain──> shared        (by two sequences or more)
      ^                 │ ^
      └──── release ────┤ └─retain── cached           (released, still found by its hash)
                        └──release──────^
    pinned <──> pinned_in_use                         (a system prompt, kept; read by a sequence right now)

Knows blocks, no sequences, no models and nobody who looks at it. A page of a free block keeps no trace of its owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.kv.blocks import Block

STATES = ("free", "cached", "used", "shared", "pinned", "pinned_in_use")
FREE, CACHED, USED, SHARED, PINNED, PINNED_IN_USE = range(len(STATES))


class PageMap:
    """`states` uint8 [page]; `version` rises with every change, so that who draws it sees if there is a need."""

    def __init__(self, total: int) -> None:
        self.states = np.zeros(total, np.uint8)
        self.version = 0

    def draw(self, block: Block) -> None:
        """Notes what the pages of a block are used for from now on."""
        self.states[block.pages] = state_of(block)
        self.version += 1


def state_of(block: Block) -> int:
    readers = block.references - block.pins
    if block.pins:
        return PINNED_IN_USE if readers else PINNED
    if readers:
        return USED if readers == 1 else SHARED
    return FREE if block.hash is None else CACHED


def counted(states: np.ndarray) -> dict[str, int]:
    """Pages in each state."""
    return dict(zip(STATES, np.bincount(states, minlength=len(STATES)).tolist(), strict=True))
