"""Compact weights: bf16 to the bit, whatever the bits are, and the values of the reference."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import CpuBackend
from kernels.triton import TritonBackend
from tests.kernels.comparison import BF16_BOUND, TRAITS, differences
from tests.kernels.decoders import Pages, llama_traits, random_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def kept_here(cpu):
    if reason := cpu.unsupported(llama_traits(), torch.bfloat16, precision="compact"):
        pytest.skip(reason)


def with_random_bits(weight: torch.Tensor, share: float) -> torch.Tensor:
    """bf16, of which a share has any bits at all, but those of no finite number."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, weight.shape, generator=generator).to(torch.int16)
    anything = bits.view(torch.bfloat16)
    chosen = (torch.rand(weight.shape, generator=generator) < share) & anything.isfinite()
    return torch.where(chosen, anything, weight.to(torch.bfloat16))


@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
def test_ops_agree_with_the_reference(cpu, traits):
    found = differences(cpu, traits, torch.bfloat16, precision="compact")
    assert {op: d for op, d in found.items() if not d <= BF16_BOUND} == {}
    assert found["embed"] == 0


@pytest.mark.parametrize("share", [0, 0.001, 0.05, 1])
def test_a_weight_of_any_bits_is_kept(cpu, share):
    """Rare ones lie in a panel's list; panels that have too many of them stay as they are."""
    traits = llama_traits(vocab_size=1030, hidden_size=90)
    weights = random_weights(traits)
    weights["head"] = weights["embedding"] = with_random_bits(weights["embedding"], share)
    pages = Pages(traits, torch.bfloat16)
    batch = pages.step([(0, list(range(traits.vocab_size)), 0)])
    plain, compact = (
        cpu.ops(cpu.pack(traits, weights, torch.bfloat16, precision=precision), pages.pool, batch).embed()
        for precision in (None, "compact")
    )
    assert torch.equal(compact.view(torch.int32), plain.view(torch.int32))


@pytest.mark.parametrize("rows", [1, 7, 16, 50])
@pytest.mark.parametrize("spread", [0, 2, 40])  # binades over which a panel's weights lie, beside the normal ones
def test_logits_are_those_of_plain_weights(cpu, spread, rows):
    """To the bit where panels stay as they are; products from a list are added later than they would be."""
    traits = llama_traits(hidden_size=200, vocab_size=99)
    generator = torch.Generator().manual_seed(1)
    weights = random_weights(traits)
    for name in [name for name, weight in weights.items() if weight.dim() == 2 and name != "head"]:
        weights[name] = weights[name] * 2.0 ** -torch.randint(0, spread + 1, weights[name].shape, generator=generator)
    weights["head"] = weights["embedding"]
    pages = Pages(traits, torch.bfloat16)
    batch = pages.step([(0, [i * i % traits.vocab_size for i in range(rows)], 0)])
    plain, compact = (
        cpu.forward(cpu.pack(traits, weights, torch.bfloat16, precision=precision), pages.pool, batch).clone()
        for precision in (None, "compact")
    )
    assert (compact - plain).abs().max() <= BF16_BOUND * plain.abs().max()
    assert spread < 40 or torch.equal(compact, plain)


def test_a_system_without_memory_for_them_is_an_error_and_not_the_end_of_the_process():
    code = """
import resource, torch
from kernels.cpu import CpuBackend
from tests.kernels.decoders import llama_traits, random_weights

traits, cpu = llama_traits(), CpuBackend(1)
weights = random_weights(traits)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**25, resource.RLIM_INFINITY))  # of 2**26 that weights begin with
try:
    cpu.pack(traits, weights, torch.bfloat16, precision="compact")
except ValueError as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (child.returncode, child.stdout) == (0, "the system gives no more memory\n")


def test_who_cannot_keep_them_says_why(cpu):
    traits = llama_traits()
    assert "not torch.float32" in cpu.unsupported(traits, torch.float32, precision="compact")
    assert "no compact weights" in TritonBackend.unsupported(None, traits, torch.bfloat16, precision="compact")
    assert "this is scalar" in CpuBackend(1, isa="scalar").unsupported(traits, torch.bfloat16, precision="compact")
