"""The pool: equal pages of raw bytes and the list of the free ones. Knows no blocks; the only place with a tensor."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from kernels.pages import empty_pages


class PagePool:
    """`order` is the sequence in which pages are handed out at first (a test shuffles it)."""

    def __init__(
        self, total: int, page_bytes: int, order: np.ndarray | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.device = device
        self.total = total
        self.page_bytes = page_bytes
        self.free = total
        # A stack: _stack[:free]. A page freed last is used first, so that memory never touched stays untouched.
        self._stack = np.arange(total, dtype=np.int32)[::-1].copy() if order is None else order.astype(np.int32)

    @cached_property
    def memory(self) -> torch.Tensor:
        """uint8 [page, page_bytes], not initialised. Made at first use: who only counts pages needs none."""
        return empty_pages(self.total, self.page_bytes, self.device)

    @property
    def free_pages(self) -> np.ndarray:
        return self._stack[: self.free]

    def take(self, count: int) -> np.ndarray:
        """int32 [count]: pages that are the caller's until given back. There must be as many."""
        if count > self.free:
            raise IndexError(f"{count} pages asked, {self.free} free")
        self.free -= count
        return self._stack[self.free : self.free + count].copy()

    def take_run(self, first: int, count: int) -> np.ndarray:
        """int32 [count]: the pages from `first` on, which must all be free. Looks through the free list."""
        free = self.free_pages
        others = free[(free < first) | (free >= first + count)]
        if len(others) + count != self.free:
            raise IndexError(f"of the {count} pages from {first} on some are in use")
        self.free = len(others)
        self._stack[: self.free] = others
        return np.arange(first, first + count, dtype=np.int32)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Writes the content of the pages `source` into the pages `target`, one for one: by an index for all of them,
        which makes a copy between, it would take eight times as long."""
        memory = self.memory
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            memory[new].copy_(memory[old])

    def give(self, pages: np.ndarray) -> None:
        """The opposite of `take`; the content stays until the page is taken again."""
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
