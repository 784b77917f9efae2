"""Every Triton kernel against the reference, in the interpreter, on odd shapes; free pages are full of NaN."""

import pytest
import torch

from kernels.reference import ReferenceBackend
from tests.kernels.comparison import TRAITS, differences
from tests.kernels.decoders import llama_traits

PAST = (((0, 30, 0), (1, 16, 0), (2, 300, 0), (3, 40, 0)),)
# decodes, one over two spans, beside prefills, one into the next block
STEP = ((2, 1, 300), (0, 3, 30), (1, 1, 16), (3, 1, 40), (4, 1, 0))
SHAPES = [name for name in TRAITS if name != "llama, 16, odd sizes"]

# The interpreter cuts bf16 where a GPU rounds, which doubles what one value may be off by.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-6}


def wrong(backend, traits, dtype) -> dict[str, float]:
    found = differences(backend, traits, dtype, past=PAST, step=STEP, past_by=ReferenceBackend())
    return {op: difference for op, difference in found.items() if not difference <= BOUNDS[dtype]}


@pytest.mark.parametrize("name", SHAPES)
def test_ops_agree_in_fp32(interpreted, name):
    assert wrong(interpreted, TRAITS[name], torch.float32) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama, 80, one head", "gemma3, 128, odd window"])
def test_ops_agree_in_half_precision(interpreted, name, dtype):
    assert wrong(interpreted, TRAITS[name], dtype) == {}


def test_pages_are_copied_whole(interpreted):
    pool = torch.arange(5 * 24, dtype=torch.uint8).reshape(5, 24).clone()
    expected = pool.clone()
    expected[4], expected[0] = pool[1], pool[2]
    interpreted.copy_pages(pool, torch.tensor([1, 2], dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32))
    assert torch.equal(pool, expected)


def test_what_the_kernels_cannot_run_is_named(interpreted):
    assert "head_dim 72" in interpreted.unsupported(llama_traits(head_dim=72), torch.float32)
    assert "float64" in interpreted.unsupported(llama_traits(), torch.float64)
