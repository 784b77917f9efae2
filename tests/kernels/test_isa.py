"""The code for lesser processors, compiled and run here: the values of the reference, and its own batch invariance."""

import platform

import pytest
import torch

from kernels import BackendUnavailable
from kernels.cpu import CpuBackend
from kernels.reference import ReferenceBackend
from tests.kernels import test_adapters
from tests.kernels.comparison import BF16_BOUND, FP32_BOUND, INT8_BOUND, TRAITS, differences
from tests.kernels.decoders import gemma_traits, random_adapter, random_weights
from tests.kernels.test_batch_invariance import logits_of

SOME_TRAITS = ("llama, 80, one head", "llama, 16, odd sizes", "gemma3, 64", "gemma3, 256, window of a block")


@pytest.fixture(scope="module", params=["avx512", "avx2", "scalar"])
def lesser(request) -> CpuBackend:
    if request.param != "scalar" and platform.machine() != "x86_64":
        pytest.skip("an x86 instruction set")
    try:
        backend = CpuBackend(threads=2, isa=request.param)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    if backend.isa != request.param:
        pytest.skip(f"this processor has no {request.param}")
    return backend


@pytest.mark.parametrize(
    ("dtype", "precision", "bound"),
    [(torch.float32, None, FP32_BOUND), (torch.bfloat16, None, BF16_BOUND), (torch.float32, "int8", INT8_BOUND)],
)
def test_ops_agree_with_the_reference(lesser, dtype, precision, bound):
    wrong = {
        (name, op): difference
        for name in SOME_TRAITS
        for op, difference in differences(lesser, TRAITS[name], dtype, precision=precision).items()
        if not difference <= bound
    }
    assert wrong == {}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_adapters_agree_with_the_reference(lesser, dtype, bound):
    traits = gemma_traits(hidden_size=45, intermediate_size=67)
    parts = [random_adapter(traits, rank, seed) for seed, rank in enumerate((3, 8, 40))]
    ours, theirs = (test_adapters.logits_of(each, traits, parts, dtype) for each in (lesser, ReferenceBackend()))
    for sequence, expected in theirs.items():
        assert (ours[sequence] - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]
)
def test_chunks_and_neighbours_change_no_bit(lesser, dtype, precision):
    traits = gemma_traits()
    decoder = lesser.pack(traits, random_weights(traits), dtype, precision=precision)
    prompt = [i * i % traits.vocab_size for i in range(290)]
    whole = logits_of(lesser, decoder, prompt, [290])
    assert torch.equal(logits_of(lesser, decoder, prompt, [100, 1, 1, 13, 140] + [1] * 35, neighbours=5), whole)
