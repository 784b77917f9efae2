"""The memory of a pool: raw, lazily taken, on huge pages where the system has them."""

import mmap
import re
from pathlib import Path

import pytest

from kernels.pages import empty_pages

SMAPS = Path("/proc/self/smaps")


@pytest.mark.parametrize(("total", "page_bytes"), [(0, 4096), (1, 1), (7, 96), (1000, 6144)])
def test_pages_are_equal_rows_of_bytes(total, page_bytes):
    pages = empty_pages(total, page_bytes)
    assert pages.shape == (total, page_bytes) and pages.is_contiguous()
    pages.fill_(255)
    assert pages.sum(dtype=int) == 255 * total * page_bytes


def test_a_system_that_has_no_huge_pages_gives_small_ones(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert empty_pages(7, 96).shape == (7, 96)


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell what it was advised")
def test_a_pool_asks_for_huge_pages():
    pages = empty_pages(2048, 4096)
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", SMAPS.read_text(), re.M | re.S)
    flags = next(flags for a, b, flags in mappings if int(a, 16) <= pages.data_ptr() < int(b, 16))
    assert "hg" in flags.split()
