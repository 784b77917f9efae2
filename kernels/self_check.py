"""A backend's first forward, before anybody relies on it: a tiny decoder, held against the reference."""

from __future__ import annotations

import torch

from kernels import BackendUnavailable
from kernels.reference import ReferenceBackend
from kernels.spec import BLOCK_TOKENS, Backend, DecoderTraits, LowRank, RopeTraits, StepBatch, weight_shapes

# Largest difference of a logit, over the largest logit, by dtype and precision of weights. What is rounded to a
# byte may, lying between two, become its other neighbour: one part in 127 of the largest of its group.
BOUNDS = {
    (torch.float32, None): 1e-5,
    (torch.bfloat16, None): 0.03,
    (torch.bfloat16, "int8"): 0.03,
    (torch.bfloat16, "compact"): 0.03,
}

_HEAD_DIM, _ROWS = 32, 2 * BLOCK_TOKENS + 5
_TRAITS = DecoderTraits(
    vocab_size=65,
    hidden_size=72,
    intermediate_size=104,
    num_heads=4,
    num_kv_heads=2,
    head_dim=_HEAD_DIM,
    layer_windows=(None, BLOCK_TOKENS + 3),
    layer_ropes=(RopeTraits(tuple(0.5**i for i in range(_HEAD_DIM // 2))),) * 2,
    norm_eps=1e-6,
    attention_scale=_HEAD_DIM**-0.5,
    activation="gelu_tanh",
    qk_norm=True,
    post_norms=True,
)


def check(backend: Backend) -> None:
    """Raises BackendUnavailable where the logits of a prefill, or a decode with an adapter, are not the reference's."""
    for (dtype, precision), bound in BOUNDS.items():
        if backend.unsupported(_TRAITS, dtype, precision=precision):
            continue
        ours, theirs = _logits(backend, dtype, precision), _logits(ReferenceBackend(), dtype, precision)
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        if not difference <= bound:
            kind = f"{dtype}, {precision} weights" if precision else str(dtype)
            raise BackendUnavailable(f"{backend.name} differs from the reference by {difference:.1e} in {kind}")


def _logits(backend: Backend, dtype: torch.dtype, precision: str | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(_TRAITS).items()}
    decoder = backend.pack(_TRAITS, weights, dtype, precision=precision)
    parts = {
        name: _low_rank(*weights[name].shape, generator) for name in ("layers.0.k", "layers.1.up", "layers.1.down")
    }
    adapters = (backend.pack_adapter(decoder, parts),)
    blocks, units = -(-_ROWS // BLOCK_TOKENS), 2 * _TRAITS.num_kv_heads
    pool = torch.zeros(2 * blocks, units * BLOCK_TOKENS * _HEAD_DIM * dtype.itemsize, dtype=torch.uint8).to(
        backend.device
    )
    tables = tuple(torch.arange(g * blocks, (g + 1) * blocks, dtype=torch.int32).view(1, -1, 1) for g in range(2))
    logits = []
    for first, end in ((0, _ROWS - 1), (_ROWS - 1, _ROWS)):
        rows = torch.arange(end - first, dtype=torch.int32)
        tokens, positions = (rows + first) * 7 % _TRAITS.vocab_size, rows + first
        starts, context = (torch.tensor(values, dtype=torch.int32) for values in ([0, end - first], [end]))
        adapted = {} if first == 0 else {"adapters": adapters, "sequence_adapters": torch.zeros(1, dtype=torch.int32)}
        batch = StepBatch(tokens, positions, starts, context, tables, rows, **adapted)
        logits.append(backend.forward(decoder, pool, batch).cpu().clone())
    return torch.cat(logits)


def _low_rank(outputs: int, inputs: int, generator: torch.Generator, rank: int = 3) -> LowRank:
    a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
    return LowRank(a * inputs**-0.5, b, scale=0.5)
