"""The decoder step in plain PyTorch: the definition that every other backend is checked against.

Every value is computed in fp32. With dtype bfloat16 the values named here, and no others, are rounded to it (nearest,
ties to even): all weights; normed activations; q, k and v once rotated; exp(score - max) before it meets V; the
attention's output; the MLP's product. So the residual stream, accumulations, norms, rotation and softmax stay fp32.
With dtype float32 nothing is rounded. A KV unit is [16, head_dim], token after token.

With int8 weights every matrix, and every row that is multiplied with one, is rounded further: `int8_values` says how.
An adapter's matrices are rounded as weights are, to the dtype; they meet the rows before int8 does, and what comes out
of the first stays fp32 on its way into the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import drawing
from kernels.spec import (
    BLOCK_TOKENS,
    GROUP,
    DecoderTraits,
    Draws,
    LowRank,
    RopeTraits,
    StepBatch,
    check_adapter,
    is_matrix,
    layer_groups,
    unkept,
    weight_shapes,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


@dataclass(frozen=True)
class ReferenceDecoder:
    """Weights hold values of `dtype`, or of bytes, in fp32; `places` [layer] = (layer group, number inside it)."""

    traits: DecoderTraits
    dtype: torch.dtype
    weights: Mapping[str, Tensor]
    places: tuple[tuple[int, int], ...]
    precision: str | None = None

    def weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"layers.{layer}.{name}"]

    def rounded(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).float()

    def linear(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(int8_values(a) if self.precision == "int8" else a, weight, bias)


def int8_values(values: Tensor, scale_dtype: torch.dtype = torch.float32) -> Tensor:
    """`values` [row, input] in fp32, each the nearest of the 255 multiples, -127 to 127, of its group's scale.

    The scale of GROUP neighbours is their largest magnitude over 127, in `scale_dtype` (bfloat16 for weights); 0 where
    that magnitude is at most 2^-100, NaN where a value is not finite.
    """
    inputs = values.shape[-1]
    groups = F.pad(values, (0, -inputs % GROUP)).unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(most > 2**-100, most / 127, 0).to(scale_dtype).float()
    inverse = torch.where(scale > 0, 1 / scale, 0)
    numbers = (groups * inverse).round().clamp(-127, 127)
    return (numbers * (scale + (most - most))).flatten(-2)[..., :inputs]


class ReferenceBackend:
    """Runs on whatever PyTorch runs on; `threads` sets PyTorch's own number for the whole process."""

    name = "reference"
    device = torch.device("cpu")

    def __init__(self, threads: int | None = None):
        if threads is not None:
            torch.set_num_threads(threads)

    def unsupported(self, traits: DecoderTraits, dtype: torch.dtype, *, precision: str | None = None) -> str | None:
        if dtype not in DTYPES:
            return f"the reference computes in bfloat16, float16 or float32, not {dtype}"
        if traits.activation not in ACTIVATIONS:
            return f"activation {traits.activation!r} is none of {', '.join(ACTIVATIONS)}"
        return unkept(precision, dtype)

    def pack(
        self, traits: DecoderTraits, weights: Mapping[str, Tensor], dtype: torch.dtype, *, precision: str | None = None
    ) -> ReferenceDecoder:
        shapes = weight_shapes(traits)
        tied = weights["head"].data_ptr() == weights["embedding"].data_ptr()
        rounded = {name: weights[name].to(dtype).float().reshape(shape) for name, shape in shapes.items()}
        if precision == "int8":
            rounded |= {
                name: int8_values(rounded[name], torch.bfloat16)
                for name, shape in shapes.items()
                if is_matrix(name, shape, tied=tied)
            }
        if tied:
            rounded["head"] = rounded["embedding"]
        places = {
            layer: (group_number, number)
            for group_number, group in enumerate(layer_groups(traits))
            for number, layer in enumerate(group.layers)
        }
        in_order = tuple(places[i] for i in range(traits.num_layers))
        return ReferenceDecoder(traits, dtype, rounded, in_order, precision)

    def pack_adapter(self, decoder: ReferenceDecoder, parts: Mapping[str, LowRank]) -> Mapping[str, LowRank]:
        check_adapter(decoder.traits, parts)
        rounded = decoder.rounded
        return {name: replace(part, a=rounded(part.a), b=rounded(part.b)) for name, part in parts.items()}

    @torch.inference_mode()
    def forward(self, decoder: ReferenceDecoder, pool: Tensor, batch: StepBatch) -> Tensor:
        ops = self.ops(decoder, pool, batch)
        x = ops.embed()
        for layer in range(decoder.traits.num_layers):
            x = ops.project_output(layer, x, ops.attend(layer, ops.project_qkv(layer, x)))
            x = ops.project_down(layer, x, ops.project_gate_up(layer, x))
        return ops.project_head(x)

    def draw(self, logits: Tensor, draws: Draws) -> list[int]:
        return drawing.draw(logits, draws)

    def ops(self, decoder: ReferenceDecoder, pool: Tensor, batch: StepBatch) -> ReferenceOps:
        return ReferenceOps(decoder, pool, batch)


@dataclass(frozen=True)
class ReferenceOps:
    """The ops of one step; what they return is said in kernels.spec.StepOps."""

    decoder: ReferenceDecoder
    pool: Tensor
    batch: StepBatch

    def embed(self) -> Tensor:
        return self.decoder.weights["embedding"][self.batch.tokens] * self.decoder.traits.embedding_scale

    def project_qkv(self, layer: int, x: Tensor) -> Tensor:
        decoder, traits, positions = self.decoder, self.decoder.traits, self.batch.positions
        a = _normed(decoder, f"layers.{layer}.attention_norm", x)
        q, k, v = (self._linear(layer, name, a).unflatten(-1, (-1, traits.head_dim)) for name in "qkv")
        if traits.qk_norm:
            q, k = (_rms_norm(decoder, f"layers.{layer}.{name}_norm", t) for name, t in (("q", q), ("k", k)))
        q, k = (_rotated(t, positions, traits.layer_ropes[layer]) for t in (q, k))
        self.write_kv(layer, k, v)
        return decoder.rounded(q)

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        units = _Units(self.decoder, layer, self.pool, self.batch)
        units.write(0, self.batch.positions, k)
        units.write(1, self.batch.positions, v)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        decoder, traits, window = self.decoder, self.decoder.traits, self.decoder.traits.layer_windows[layer]
        units = _Units(decoder, layer, self.pool, self.batch)
        outputs = []
        for sequence, (start, stop) in enumerate(pairwise(self.batch.query_starts.tolist())):
            end = int(self.batch.context_lens[sequence])
            positions = torch.arange(end - (stop - start), end)
            first = 0 if window is None else max(0, int(positions[0]) - window + 1) // BLOCK_TOKENS * BLOCK_TOKENS
            k, v = (units.read(kind, sequence, first, end) for kind in (0, 1))  # [kv head, token, dim]
            seen = torch.arange(first, end) <= positions[:, None]
            if window is not None:
                seen &= torch.arange(first, end) > positions[:, None] - window
            grouped = q[start:stop].unflatten(1, (traits.num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores = grouped @ k[:, None].mT * traits.attention_scale  # [kv head, head of the group, row, token]
            scores = _capped(scores, traits.attention_softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            p = torch.exp(scores - scores.amax(-1, keepdim=True))
            output = decoder.rounded(p) @ v[:, None] / p.sum(-1, keepdim=True)
            outputs.append(output.permute(2, 0, 1, 3).flatten(1, 2))
        return decoder.rounded(torch.cat(outputs))

    def project_output(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        y = self._linear(layer, "o", attended.flatten(1))
        if self.decoder.traits.post_norms:
            y = _rms_norm(self.decoder, f"layers.{layer}.post_attention_norm", y)
        return x + y * self.decoder.traits.residual_scale

    def project_gate_up(self, layer: int, x: Tensor) -> Tensor:
        a = _normed(self.decoder, f"layers.{layer}.mlp_norm", x)
        gate, up = (self._linear(layer, name, a) for name in ("gate", "up"))
        return self.decoder.rounded(ACTIVATIONS[self.decoder.traits.activation](gate) * up)

    def project_down(self, layer: int, x: Tensor, product: Tensor) -> Tensor:
        y = self._linear(layer, "down", product)
        if self.decoder.traits.post_norms:
            y = _rms_norm(self.decoder, f"layers.{layer}.post_mlp_norm", y)
        return x + y * self.decoder.traits.residual_scale

    def project_head(self, x: Tensor) -> Tensor:
        a, traits = _normed(self.decoder, "final_norm", x[self.batch.logit_rows]), self.decoder.traits
        logits = self.decoder.linear(a, self.decoder.weights["head"])
        return _capped(logits * traits.logit_scale, traits.logit_softcap)

    def _linear(self, layer: int, name: str, a: Tensor) -> Tensor:
        """A layer's product with rows, and what their adapters add to it."""
        decoder = self.decoder
        bias = decoder.weight(layer, f"{name}_bias") if decoder.traits.qkv_bias and name in ("q", "k", "v") else None
        y = decoder.linear(a, decoder.weight(layer, name), bias)
        for number, adapter in enumerate(self.batch.adapters):
            if part := adapter.get(f"layers.{layer}.{name}"):
                rows = self._row_adapters == number
                y[rows] += a[rows] @ part.a.T * part.scale @ part.b.T
        return y

    @cached_property
    def _row_adapters(self) -> Tensor:
        return self.batch.row_adapters()


def _rms_norm(decoder: ReferenceDecoder, name: str, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + decoder.traits.norm_eps)
    return x * scale * (decoder.traits.norm_weight_offset + decoder.weights[name])


def _normed(decoder: ReferenceDecoder, name: str, x: Tensor) -> Tensor:
    return decoder.rounded(_rms_norm(decoder, name, x))


def _capped(values: Tensor, cap: float | None) -> Tensor:
    return values if cap is None else cap * torch.tanh(values / cap)


def _rotated(heads: Tensor, positions: Tensor, rope: RopeTraits) -> Tensor:
    """heads [row, head, dim]; which dimensions turn with which says RopeTraits, as in Hugging Face's checkpoints."""
    half = len(rope.inv_freq)
    angles = positions.float()[:, None, None] * torch.tensor(rope.inv_freq, dtype=torch.float32)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class _Units:
    """The [16, head_dim] tiles of one layer, found through the page table; the address is spec's."""

    def __init__(self, decoder: ReferenceDecoder, layer: int, pool: Tensor, batch: StepBatch):
        traits = decoder.traits
        group, number = decoder.places[layer]
        unit_elements = BLOCK_TOKENS * traits.head_dim
        self._units_per_page = pool.shape[1] // (unit_elements * decoder.dtype.itemsize)
        pages = pool.view(decoder.dtype)[:, : self._units_per_page * unit_elements]
        self._tiles = pages.unflatten(1, (self._units_per_page, BLOCK_TOKENS, traits.head_dim))
        self._table = batch.page_tables[group].long()
        self._sequence_of_row = torch.repeat_interleave(
            torch.arange(len(batch.context_lens)), batch.query_starts.diff().long()
        )
        self._unit = (number * 2 + torch.arange(2)[:, None]) * traits.num_kv_heads + torch.arange(traits.num_kv_heads)

    def write(self, kind: int, positions: Tensor, values: Tensor) -> None:
        """values [row, kv head, dim]; kind 0 is K, 1 is V."""
        unit, positions = self._unit[kind], positions.long()
        pages = self._table[self._sequence_of_row, positions // BLOCK_TOKENS][:, unit // self._units_per_page]
        self._tiles[pages, unit % self._units_per_page, positions[:, None] % BLOCK_TOKENS] = values.to(
            self._tiles.dtype
        )

    def read(self, kind: int, sequence: int, first: int, end: int) -> Tensor:
        """fp32 [kv head, token, dim] of tokens first .. end - 1; `first` begins a block."""
        unit = self._unit[kind]
        blocks = slice(first // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS + 1)
        tiles = self._tiles[self._table[sequence, blocks][:, unit // self._units_per_page], unit % self._units_per_page]
        return tiles.transpose(0, 1).flatten(1, 2)[:, : end - first].float()
