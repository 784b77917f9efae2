"""The memory of a pool: raw, lazily taken, on huge pages where the system has them."""

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


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell what it was advised")
def test_a_pool_asks_for_huge_pages_before_it_is_touched():
    pages = empty_pages(2048, 4096)
    mapping = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB.*?^VmFlags: (.*?)$", re.M | re.S)
    mappings = mapping.findall(SMAPS.read_text())
    rss, flags = next((rss, flags) for a, b, rss, flags in mappings if int(a, 16) <= pages.data_ptr() < int(b, 16))
    assert rss == "0" and "hg" in flags.split()
