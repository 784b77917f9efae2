"""Runs every fused op of a backend and of the reference on the same operands, over a ragged batch with a past."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import ReferenceBackend
from kernels.spec import DecoderTraits, RopeTraits
from tests.kernels.decoders import Pages, gemma_traits, llama_traits, random_weights, rope

# What differs is the order of summation: in fp32 some units in the last place of the largest value. In bf16 such a
# difference may also move a value that lay between two bf16 numbers to its other neighbour: one part in 128. With int8
# weights it may so move one between two of the 255 numbers of its group, a 127th of the largest there: of what that is
# multiplied to, less.
FP32_BOUND, BF16_BOUND, INT8_BOUND = 4e-6, 2**-7, 2**-7

TRAITS: dict[str, DecoderTraits] = {
    "llama, 64": llama_traits(),
    "llama, 80, one head": llama_traits(head_dim=80, num_heads=1, num_kv_heads=1, hidden_size=100, vocab_size=33),
    "llama, 96, no groups": llama_traits(head_dim=96, num_heads=5, num_kv_heads=5, hidden_size=72),
    "llama, 128, 9 on 3, biases": llama_traits(head_dim=128, num_heads=9, num_kv_heads=3, qkv_bias=True),
    "llama, 256": llama_traits(head_dim=256, num_heads=2, num_kv_heads=2, hidden_size=31, intermediate_size=17),
    "llama, 16, odd sizes": llama_traits(head_dim=16, hidden_size=33, intermediate_size=65, vocab_size=257),
    "llama, 64, 16 heads on 1": llama_traits(num_heads=16, intermediate_size=300),
    "gemma3, 64": gemma_traits(),
    "gemma3, 256, window of a block": gemma_traits(head_dim=256, num_kv_heads=1, layer_windows=(16, None)),
    "gemma3, 80, window past a tile": gemma_traits(head_dim=80, layer_windows=(270, None), hidden_size=88),
    "gemma3, 128, odd window": gemma_traits(head_dim=128, layer_windows=(17, None), hidden_size=45),
    "gemma2, 96, soft caps": gemma_traits(
        head_dim=96, qk_norm=False, attention_scale=0.5, attention_softcap=5.0, logit_softcap=2.0
    ),
    "phi3, 80, partial rotary": llama_traits(head_dim=80, layer_ropes=(rope(48, factor=1.3),) * 2),
    "smollm3, 64, NoPE, scales": llama_traits(
        layer_ropes=(rope(64), RopeTraits(())), qkv_bias=True, residual_scale=0.22, logit_scale=1 / 6
    ),
}

# (sequence, rows, first position) of three steps: a past over several tiles, then decodes beside prefill chunks
PAST = ((0, 37, 0), (1, 16, 0), (2, 300, 0), (4, 511, 0)), ((4, 20, 511),)
STEP = ((2, 1, 300), (0, 23, 37), (3, 5, 0), (1, 1, 16), (4, 1, 531), (5, 60, 0), (6, 1, 0))


class OpRun:
    """A backend with the past of a step in its pages; every op on operands drawn from one seed.

    `past_by` is the backend that writes the past: another one of the same layout may be faster. `packing` goes to
    `pack`.
    """

    def __init__(
        self, backend, traits: DecoderTraits, dtype: torch.dtype, past=PAST, step=STEP, past_by=None, **packing
    ):
        self.traits, self.dtype, self.device = traits, dtype, backend.device
        pages, past_by = Pages(traits, dtype), past_by or backend
        for number, parts in enumerate((*past, step)):
            batch = pages.step([(s, [(s * 7 + i) % traits.vocab_size for i in range(n)], at) for s, n, at in parts])
            self.rows = len(batch.tokens)
            one = past_by if number < len(past) else backend
            decoder = one.pack(traits, random_weights(traits), dtype, **packing)
            self.ops = one.ops(decoder, pages.pool.to(one.device), batch)
            if number < len(past):
                for layer in range(traits.num_layers):
                    self.ops.project_qkv(layer, self.draw(number, traits.hidden_size).to(one.device))

    def draw(self, seed: int, *width: int) -> Tensor:
        values = torch.randn(self.rows, *width, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device)

    def act(self, seed: int, *width: int) -> Tensor:
        return self.draw(seed, *width).to(self.dtype).float()

    def results(self) -> dict[str, Tensor]:
        traits, x = self.traits, self.draw(11, self.traits.hidden_size)
        heads = (traits.num_heads, traits.head_dim)
        results = {"embed": self.ops.embed(), "project_head": self.ops.project_head(x)}
        for layer in range(traits.num_layers):
            results |= {
                f"project_qkv {layer}": self.ops.project_qkv(layer, x),
                f"attend {layer}": self.ops.attend(layer, self.act(12, *heads)),
                f"project_output {layer}": self.ops.project_output(layer, x, self.act(13, *heads)),
                f"project_gate_up {layer}": self.ops.project_gate_up(layer, x),
                f"project_down {layer}": self.ops.project_down(layer, x, self.act(14, traits.intermediate_size)),
            }
            self.ops.write_kv(layer, *(self.act(seed, traits.num_kv_heads, traits.head_dim) for seed in (15, 16)))
            results[f"attend {layer} to what was written"] = self.ops.attend(layer, self.act(12, *heads))
        return {op: values.float().cpu() for op, values in results.items()}


def differences(backend, traits: DecoderTraits, dtype: torch.dtype, **options) -> dict[str, float]:
    """Largest difference from the reference by op, over the largest value; `options` as of OpRun."""
    ours, theirs = (OpRun(one, traits, dtype, **options).results() for one in (backend, ReferenceBackend()))
    return {op: float((ours[op] - theirs[op]).abs().max() / theirs[op].abs().max()) for op in theirs}
