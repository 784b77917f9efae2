import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.kv.geometry import (
    DEFAULT_PAGE_BYTES,
    GroupGeometry,
    KVGeometry,
    blocks_of,
    default_page_bytes,
    first_seen_block,
)
from kernels.spec import BLOCK_TOKENS

BF16, FP32 = 2, 4
SMOLLM2 = KVGeometry((GroupGeometry(None, 30, 3, 64, BF16),))
GEMMA3 = KVGeometry((GroupGeometry(None, 3, 1, 256, BF16), GroupGeometry(512, 15, 1, 256, BF16)))
QWEN25 = KVGeometry((GroupGeometry(None, 24, 2, 64, BF16),))
COMMON_SHAPES = [  # layers, kv heads, head_dim
    (30, 3, 64), (32, 5, 64), (24, 32, 64), (3, 1, 256), (15, 1, 256), (4, 1, 256), (22, 1, 256),
    (24, 2, 64), (28, 2, 128), (28, 8, 128), (16, 8, 64), (22, 4, 64),
]  # fmt: skip


@pytest.mark.parametrize(("geometry", "pages"), [(SMOLLM2, [15]), (GEMMA3, [2, 10]), (QWEN25, [8])])
def test_a_block_of_the_usual_checkpoints_fills_its_pages(geometry, pages):
    assert [group.pages_per_block(24_576) for group in geometry.groups] == pages
    assert sum(pages) * 24_576 == geometry.bytes_per_block


@pytest.mark.parametrize("shape", COMMON_SHAPES)
def test_the_default_page_wastes_nothing_on_common_shapes(shape):
    layers, heads, head_dim = shape
    group = GroupGeometry(None, layers, heads, head_dim, BF16)
    assert group.pages_per_block(DEFAULT_PAGE_BYTES) * DEFAULT_PAGE_BYTES == group.units_per_block * group.unit_bytes


def test_default_page_holds_a_wide_head_of_either_type():
    assert (default_page_bytes(BF16), default_page_bytes(FP32)) == (8_192, 16_384)


def test_a_page_too_small_for_one_head_is_refused_with_both_sizes():
    with pytest.raises(CheckpointError, match=r"16,384 bytes.* 8,192"):
        GroupGeometry(None, 3, 1, 256, FP32).pages_per_block(8_192)


@given(window=st.one_of(st.none(), st.integers(1, 70)), position=st.integers(0, 200))
def test_first_seen_block_is_that_of_the_first_seen_token(window, position):
    seen = [p for p in range(position + 1) if window is None or position - p < window]
    assert first_seen_block(window, position) == seen[0] // BLOCK_TOKENS


@given(window=st.integers(1, 70), tokens=st.integers(1, 300), chunk=st.integers(1, 64))
def test_most_blocks_is_never_exceeded(window, tokens, chunk):
    group = GroupGeometry(window, 1, 1, 64, BF16)
    for computed in range(0, tokens, chunk):
        held = blocks_of(min(tokens, computed + chunk)) - first_seen_block(window, computed)
        assert held <= group.most_blocks(tokens, chunk)
