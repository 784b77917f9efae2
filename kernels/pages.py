"""Memory for a pool of KV pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch


def empty_pages(total: int, page_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """uint8 [page, page_bytes], not initialised; no memory is taken before it is touched.

    On the CPU it asks for huge pages, which has to come before the first touch. KV pages are read in no order that a
    processor foresees: in small pages each costs a walk through the page tables, and 4 times the time (measured, in a
    VM).
    """
    if torch.device(device).type != "cpu" or not total:
        return torch.empty((total, page_bytes), dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, total * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(total, page_bytes)
