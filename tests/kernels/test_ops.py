"""Every fused op of the C++ backend against the reference, on odd shapes of llama and gemma3 kind."""

import pytest
import torch

from tests.kernels.comparison import BF16_BOUND, FP32_BOUND, INT8_BOUND, TRAITS, differences


@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
def test_ops_agree_in_fp32(cpu, traits):
    assert {op: d for op, d in differences(cpu, traits, torch.float32).items() if not d <= FP32_BOUND} == {}


@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
def test_ops_agree_in_bf16(cpu, traits):
    assert {op: d for op, d in differences(cpu, traits, torch.bfloat16).items() if not d <= BF16_BOUND} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS.keys())
def test_ops_agree_with_int8_weights(cpu, traits, dtype):
    found = differences(cpu, traits, dtype, precision="int8")
    assert {op: d for op, d in found.items() if not d <= INT8_BOUND} == {}
    assert found["embed"] == 0  # the very bytes and scales
