"""The decoder step on a GPU: Triton kernels between PyTorch's matrix products, over the same byte pages.

Read `attention.py` and `elementwise.py` for the kernels, `plan.py` for what a step copies to the device, `graphs.py`
for how decodes are replayed. A KV unit is [16, head_dim], token after token. Without a GPU the backend runs in Triton's
interpreter (TRITON_INTERPRET=1 before the first import), slowly, for its values; `compile_ahead.py` builds the machine
code of real chips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import BackendUnavailable
from kernels.spec import (
    BLOCK_TOKENS,
    DecoderTraits,
    LowRank,
    RopeTraits,
    StepBatch,
    check_adapter,
    layer_groups,
    weight_shapes,
)

try:
    import triton

    from kernels.triton import attention, elementwise
    from kernels.triton.graphs import DecodeGraphs
    from kernels.triton.plan import BLOCK_KEYS, SPAN, Plan, Tiles, attention_options, make_plan
except ImportError as error:  # the package is of the `gpu` extra, and there are none for some systems
    raise BackendUnavailable(f"Triton cannot be imported: {error}") from error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = ("silu", "gelu_tanh")
MOST_HEAD_DIM = 256


@dataclass(frozen=True)
class Layer:
    """One layer's weights on the device: linear ones in the decoder's dtype, norms and biases in fp32."""

    group: int
    number: int  # inside the group
    rope: int
    weights: Mapping[str, Tensor]  # by the names of kernels.spec, but qkv and gate_up are one each


@dataclass(frozen=True)
class Addition:
    """What an adapter adds to one of a layer's products, in the columns of one matrix."""

    columns: slice
    part: LowRank  # on the device, in the decoder's dtype


TritonAdapter = Mapping[tuple[int, str], list[Addition]]  # by layer and product: qkv, o, gate_up or down


@dataclass(frozen=True)
class TritonDecoder:
    traits: DecoderTraits
    dtype: torch.dtype
    windows: tuple[int | None, ...]  # of each layer group
    layers: tuple[Layer, ...]
    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    inv_freq: Tensor  # fp32 [rope, head_dim / 2], 0 for what does not turn
    rope_factor: Tensor  # fp32 [rope, head_dim / 2], 1 for what does not turn
    graphs: DecodeGraphs


class TritonBackend:
    """Runs on one device; `graphs` replays decodes as CUDA graphs, where the device has them."""

    def __init__(self, *, device: str | torch.device | None = None, graphs: bool = True):
        self.interpreted = triton.knobs.runtime.interpret
        if device is None:
            device = "cuda" if torch.cuda.is_available() and not self.interpreted else "cpu"
        self.device = torch.device(device)
        if self.device.type != "cuda" and not self.interpreted:
            raise BackendUnavailable("the Triton kernels need an NVIDIA GPU that PyTorch can see")
        self.graphs = graphs and self.device.type == "cuda"
        chip = "interpreter" if self.interpreted else torch.cuda.get_device_name(self.device)
        self.name = f"triton ({chip})"

    def unsupported(self, traits: DecoderTraits, dtype: torch.dtype, *, precision: str | None = None) -> str | None:
        if precision:
            return f"the Triton kernels have no {precision} weights"
        if dtype not in DTYPES:
            return f"the Triton kernels compute in {', '.join(str(d)[6:] for d in DTYPES)}, not {dtype}"
        if traits.head_dim % 16 or traits.head_dim > MOST_HEAD_DIM:
            return f"head_dim {traits.head_dim} is no multiple of 16 up to {MOST_HEAD_DIM}"
        if traits.activation not in ACTIVATIONS:
            return f"activation {traits.activation!r} is none of {', '.join(ACTIVATIONS)}"
        return None

    def pack(
        self, traits: DecoderTraits, weights: Mapping[str, Tensor], dtype: torch.dtype, *, precision: str | None = None
    ) -> TritonDecoder:
        if reason := self.unsupported(traits, dtype, precision=precision):
            raise ValueError(reason)
        shapes = weight_shapes(traits)

        def take(name: str) -> Tensor:
            kind = torch.float32 if "norm" in name or "bias" in name else dtype
            return weights[name].to(dtype).to(self.device, kind).reshape(shapes[name]).contiguous()

        def layer_weights(number: int) -> dict[str, Tensor]:
            names = [name.split(".")[2] for name in shapes if name.startswith(f"layers.{number}.")]
            own = {name: take(f"layers.{number}.{name}") for name in names}
            own["qkv"] = torch.cat([own.pop(name) for name in "qkv"])
            own["gate_up"] = torch.cat([own.pop(name) for name in ("gate", "up")])
            if traits.qkv_bias:
                own["qkv_bias"] = torch.cat([own.pop(f"{name}_bias") for name in "qkv"])
            return own

        groups = layer_groups(traits)
        places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        ropes = list(dict.fromkeys(traits.layer_ropes))
        inv_freq, rope_factor = _rope_tables(ropes, traits.head_dim // 2)
        embedding = take("embedding")
        tied = weights["head"].data_ptr() == weights["embedding"].data_ptr()
        return TritonDecoder(
            traits=traits,
            dtype=dtype,
            windows=tuple(group.window for group in groups),
            layers=tuple(
                Layer(*places[i], ropes.index(traits.layer_ropes[i]), layer_weights(i))
                for i in range(traits.num_layers)
            ),
            embedding=embedding,
            head=embedding if tied else take("head"),
            final_norm=take("final_norm"),
            inv_freq=inv_freq.to(self.device),
            rope_factor=rope_factor.to(self.device),
            graphs=DecodeGraphs(),
        )

    def pack_adapter(self, decoder: TritonDecoder, parts: Mapping[str, LowRank]) -> TritonAdapter:
        check_adapter(decoder.traits, parts)
        adapter: dict[tuple[int, str], list[Addition]] = {}
        for name, part in parts.items():
            _, layer, target = name.split(".")
            product, first = _place(decoder.traits, target)
            a, b = (each.to(self.device, decoder.dtype) for each in (part.a, part.b))
            addition = Addition(slice(first, first + len(b)), LowRank(a, b, part.scale))
            adapter.setdefault((int(layer), product), []).append(addition)
        return adapter

    @torch.inference_mode()
    def forward(self, decoder: TritonDecoder, pool: Tensor, batch: StepBatch) -> Tensor:
        """The logits are on `device`."""
        if self.graphs and decoder.graphs.fits(batch):
            return decoder.graphs.replay(decoder, pool, batch, self)
        return self.run(decoder, pool, make_plan(decoder.traits, decoder.windows, batch, self.device))

    def run(self, decoder: TritonDecoder, pool: Tensor, plan: Plan) -> Tensor:
        """A whole forward, its sums and norms fused: what a graph captures."""
        step = TritonOps(decoder, pool, plan, upcast=self.interpreted)
        x = step.embed()
        a = step.norm(x, decoder.layers[0].weights["attention_norm"])
        for number, layer in enumerate(decoder.layers):
            y = step.product(number, "o", step.attend(number, step.place_heads(number, a)))
            a = step.add_norm(x, y, layer.weights.get("post_attention_norm"), layer.weights["mlp_norm"])
            y = step.product(number, "down", step.gate_up(number, a))
            if number + 1 < len(decoder.layers):
                following = decoder.layers[number + 1].weights["attention_norm"]
                a = step.add_norm(x, y, layer.weights.get("post_mlp_norm"), following)
        step.add(x, y, decoder.layers[-1].weights.get("post_mlp_norm"))
        return step.project_head(x)

    def ops(self, decoder: TritonDecoder, pool: Tensor, batch: StepBatch) -> TritonOps:
        plan = make_plan(decoder.traits, decoder.windows, batch, self.device)
        return TritonOps(decoder, pool, plan, upcast=self.interpreted)

    def copy_pages(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Page sources[i] onto page targets[i]; int32 on the device, no page in both. page_bytes divides by 4."""
        words = pool.view(torch.int32)
        grid = (len(sources), triton.cdiv(words.shape[1], 1024))
        elementwise.copy_pages[grid](words, sources, targets, words.shape[1], BLOCK=1024)


@dataclass(frozen=True)
class TritonOps:
    """The ops of one step on one decoder; those of kernels.spec.StepOps, and the fused ones that `run` is made of."""

    decoder: TritonDecoder
    pool: Tensor
    plan: Plan
    upcast: bool  # the interpreter's tl.dot is wrong in bf16

    def embed(self) -> Tensor:
        return F.embedding(self.plan.tokens, self.decoder.embedding).float() * self.decoder.traits.embedding_scale

    def project_qkv(self, layer: int, x: Tensor) -> Tensor:
        return self.place_heads(layer, self.norm(x, self._weights(layer)["attention_norm"]))

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        traits, table = self.decoder.traits, self.plan.page_tables[self.decoder.layers[layer].group]
        kv = torch.stack((k, v), dim=1).to(self.decoder.dtype).contiguous()
        elementwise.write_kv[(self.plan.rows, 2 * traits.num_kv_heads)](
            kv, self._elements, table, self.plan.positions, self.plan.row_sequence, self._unit(layer), table.stride(0),
            HEADS=2 * traits.num_kv_heads, DIM=traits.head_dim, PADDED_DIM=triton.next_power_of_2(traits.head_dim),
            **self._page_shape(table), num_warps=1,
        )  # fmt: skip

    def project_output(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        weights, x = self._weights(layer), x.clone()
        y = self.product(layer, "o", attended.to(self.decoder.dtype))
        return self.add(x, y, weights.get("post_attention_norm"))

    def project_gate_up(self, layer: int, x: Tensor) -> Tensor:
        return self.gate_up(layer, self.norm(x, self._weights(layer)["mlp_norm"]))

    def project_down(self, layer: int, x: Tensor, product: Tensor) -> Tensor:
        weights, x = self._weights(layer), x.clone()
        y = self.product(layer, "down", product.to(self.decoder.dtype))
        return self.add(x, y, weights.get("post_mlp_norm"))

    def project_head(self, x: Tensor) -> Tensor:
        traits, a = self.decoder.traits, self._add_rms_norm(x, None, None, self.decoder.final_norm, gather=True)
        logits, cap = self.linear(a, self.decoder.head), traits.logit_softcap
        if traits.logit_scale != 1:
            logits = logits * traits.logit_scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # ------------------------------------------------------------------------------------------ what `run` fuses

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._add_rms_norm(x, None, None, weight)

    def add(self, x: Tensor, y: Tensor, post_norm: Tensor | None) -> Tensor:
        """x += y, or the norm of y, scaled; in place."""
        self._add_rms_norm(x, y, post_norm, None)
        return x

    def add_norm(self, x: Tensor, y: Tensor, post_norm: Tensor | None, weight: Tensor) -> Tensor:
        """`add`, and the norm of the sum."""
        return self._add_rms_norm(x, y, post_norm, weight)

    def product(self, layer: int, name: str, a: Tensor) -> Tensor:
        """`linear` of one of a layer's weights, and what the rows' adapters add."""
        y, a = self.linear(a, self._weights(layer)[name]), a.flatten(1)
        for adapter, rows in self.plan.adapters:
            for addition in adapter.get((layer, name), ()):
                part = addition.part
                reduced = self.linear(a[rows], part.a) * part.scale
                y[rows, addition.columns] += F.linear(reduced, part.b.float())
        return y

    def linear(self, a: Tensor, weight: Tensor) -> Tensor:
        """a [row, in] or [row, head, dim] times weight [out, in] -> fp32 [row, out], never rounded in between."""
        a = a.flatten(1)
        if a.is_cuda and a.dtype != torch.float32:
            return torch.mm(a, weight.T, out_dtype=torch.float32)
        return F.linear(a.float(), weight.float())

    def place_heads(self, layer: int, a: Tensor) -> Tensor:
        """a [row, hidden], normed. Writes K and V of every row into the pool. -> q [row, head, head_dim]."""
        traits, weights, where = self.decoder.traits, self._weights(layer), self.decoder.layers[layer]
        qkv = self.product(layer, "qkv", a)
        q = self._empty(traits.num_heads, traits.head_dim)
        table, heads = self.plan.page_tables[where.group], traits.num_heads + 2 * traits.num_kv_heads
        elementwise.rotate_and_write_kv[(self.plan.rows, heads)](
            qkv, weights.get("qkv_bias", qkv), weights.get("q_norm", qkv), weights.get("k_norm", qkv), self._angles,
            q, self._elements, table, self.plan.positions, self.plan.row_sequence,
            self._unit(layer), where.rope, table.stride(0), traits.norm_eps, traits.norm_weight_offset,
            HEADS=traits.num_heads, KV_HEADS=traits.num_kv_heads, DIM=traits.head_dim,
            PADDED_HALF=triton.next_power_of_2(traits.head_dim // 2), ROPES=len(self.decoder.inv_freq),
            PAIRS=len(traits.layer_ropes[layer].inv_freq), **self._page_shape(table),
            BIAS=traits.qkv_bias, QK_NORM=traits.qk_norm, num_warps=1,
        )  # fmt: skip
        return q

    def attend(self, layer: int, q: Tensor) -> Tensor:
        plan, group = self.plan, self.decoder.layers[layer].group
        q = q.to(self.decoder.dtype).contiguous()
        output = torch.zeros_like(q)
        if plan.prefills:
            self._attend(layer, q, output, plan.prefills, spans=1)
        if plan.decodes:
            self._attend(layer, q, output, plan.decodes, spans=plan.spans[group])
        return output

    def gate_up(self, layer: int, a: Tensor) -> Tensor:
        traits = self.decoder.traits
        gate_up = self.product(layer, "gate_up", a)
        product = self._empty(traits.intermediate_size)
        grid = (self.plan.rows, triton.cdiv(traits.intermediate_size, 1024))
        elementwise.gated_activation[grid](
            gate_up, product, traits.intermediate_size, GELU=traits.activation == "gelu_tanh", BLOCK=1024
        )
        return product

    # -------------------------------------------------------------------------------------------------- launches

    def _attend(self, layer: int, q: Tensor, output: Tensor, tiles: Tiles, spans: int) -> None:
        traits, plan, group = self.decoder.traits, self.plan, self.decoder.layers[layer].group
        table, split = plan.page_tables[group], spans > 1
        parts = (plan.rows * traits.num_heads * spans,) if split else (0,)
        maximum, total = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
        result = torch.empty((*parts, traits.head_dim), dtype=torch.float32, device=q.device)
        dims = dict(DIM=traits.head_dim, PADDED_DIM=triton.next_power_of_2(traits.head_dim))
        attention.paged_attention[(len(tiles.sequence), traits.num_kv_heads, spans)](
            q, output, maximum, total, result, self._elements, table,
            tiles.sequence, tiles.start, plan.query_starts, plan.context_lens,
            traits.attention_scale, self._unit(layer), table.stride(0), spans,
            KV_HEADS=traits.num_kv_heads, GROUP=traits.num_heads // traits.num_kv_heads, **dims,
            **self._page_shape(table), WINDOW=self.decoder.windows[group] or 0, SOFTCAP=traits.attention_softcap or 0.0,
            BLOCK_ROWS=tiles.rows,
            BLOCK_KEYS=BLOCK_KEYS, SPAN=SPAN, SPLIT=split, UPCAST=self.upcast,
            **attention_options(tiles.rows, dims["PADDED_DIM"]),
        )  # fmt: skip
        if split:
            attention.merge_spans[(len(tiles.sequence), traits.num_heads)](
                output, maximum, total, result, tiles.sequence, plan.query_starts, plan.context_lens, spans,
                HEADS=traits.num_heads, **dims, num_warps=1,
            )  # fmt: skip

    def _add_rms_norm(
        self, x: Tensor, added: Tensor | None, added_weight: Tensor | None, weight: Tensor | None, gather: bool = False
    ) -> Tensor:
        traits, rows = self.decoder.traits, len(self.plan.logit_rows) if gather else len(x)
        normed = torch.empty(rows if weight is not None else 0, x.shape[1], dtype=self.decoder.dtype, device=x.device)
        elementwise.add_rms_norm[(rows,)](
            x, x if added is None else added, x if added_weight is None else added_weight,
            x if weight is None else weight, normed, self.plan.logit_rows, x.shape[1],
            traits.norm_eps, traits.norm_weight_offset, traits.residual_scale,
            ADD=added is not None, NORM_ADDED=added_weight is not None, NORM=weight is not None, GATHER=gather,
            BLOCK=triton.next_power_of_2(x.shape[1]),
        )  # fmt: skip
        return normed

    @property
    def _elements(self) -> Tensor:
        return self.pool.view(self.decoder.dtype)

    @cached_property
    def _angles(self) -> Tensor:
        """fp32 [row, rope, cos and sin, head_dim / 2]; computed once a step."""
        angles = self.plan.positions[:, None, None].float() * self.decoder.inv_freq
        return (torch.stack((angles.cos(), angles.sin()), dim=2) * self.decoder.rope_factor[:, None]).contiguous()

    def _weights(self, layer: int) -> Mapping[str, Tensor]:
        return self.decoder.layers[layer].weights

    def _unit(self, layer: int) -> int:
        """Number of the layer's K of kv head 0 among the units of a block."""
        return self.decoder.layers[layer].number * 2 * self.decoder.traits.num_kv_heads

    def _page_shape(self, table: Tensor) -> dict[str, int]:
        elements = self.pool.shape[1] // self.decoder.dtype.itemsize
        units = elements // (BLOCK_TOKENS * self.decoder.traits.head_dim)
        return dict(UNITS_PER_PAGE=units, PAGE_ELEMENTS=elements, PAGES_PER_BLOCK=table.shape[2])

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(self.plan.rows, *shape, dtype=self.decoder.dtype, device=self.pool.device)


def _place(traits: DecoderTraits, target: str) -> tuple[str, int]:
    """Of which product a matrix is part, and its first column there."""
    heads, kv_heads = traits.num_heads * traits.head_dim, traits.num_kv_heads * traits.head_dim
    places = {"q": ("qkv", 0), "k": ("qkv", heads), "v": ("qkv", heads + kv_heads)}
    places |= {"gate": ("gate_up", 0), "up": ("gate_up", traits.intermediate_size)}
    return places.get(target, (target, 0))


def _rope_tables(ropes: list[RopeTraits], pairs: int) -> tuple[Tensor, Tensor]:
    """inv_freq and the factor of cos and sin [rope, pairs], such that a pair beyond those that turn stays as it is."""
    factors = [(rope.attention_factor,) * len(rope.inv_freq) for rope in ropes]
    padded = [factor + (1.0,) * (pairs - len(factor)) for factor in factors]
    tables = [rope.padded(pairs) for rope in ropes], padded
    return tuple(torch.tensor(table, dtype=torch.float32) for table in tables)
