"""What every kernel backend agrees on: the shape of a decoder, the layout of the KV pool, the input of one step.

Knows no model family, no tokenizer, no scheduler. Pages are raw bytes; a *unit* is the [16, head_dim] tile of one
(layer, K or V, kv head) and fills an integer share of a page. A *block* is the KV of 16 tokens of one layer group.

Address of a unit, in a group whose layers are numbered 0.. inside the group:

    unit  = (layer_in_group * 2 + (0 for K, 1 for V)) * num_kv_heads + kv_head
    page  = page_tables[group][sequence, block, unit // units_per_page]
    byte  = page * page_bytes + (unit % units_per_page) * unit_bytes

The order of elements inside a unit belongs to the backend alone (the C++ one interleaves pairs of tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

BLOCK_TOKENS = 16
GROUP = 32  # inputs of a matrix that share a scale where weights are int8


@dataclass(frozen=True)
class RopeTraits:
    """Rotary embedding of a layer: fp32 `inv_freq`, half as many as dimensions turn; `attention_factor` multiplies cos
    and sin. Dimension i turns with i + len(inv_freq); those beyond both pass as they are: all of them where there is no
    frequency (NoPE, arXiv 2305.19466)."""

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    def padded(self, pairs: int) -> tuple[float, ...]:
        """`inv_freq`, zeros behind it, so that those of several layers make one table."""
        return self.inv_freq + (0.0,) * (pairs - len(self.inv_freq))


@dataclass(frozen=True)
class DecoderTraits:
    """All that distinguishes the pre-norm, rotary, gated-MLP decoders (llama, qwen, gemma ...) from one another."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_windows: tuple[int | None, ...]  # one a layer: a token sees itself and window - 1 before it; None = all
    layer_ropes: tuple[RopeTraits, ...]  # one a layer
    norm_eps: float
    attention_scale: float
    activation: str = "silu"  # or "gelu_tanh"
    norm_weight_offset: float = 0.0  # gemma multiplies by (1 + weight)
    embedding_scale: float = 1.0
    qk_norm: bool = False  # RMS norm over head_dim of q and k before the rotation
    post_norms: bool = False  # gemma: norm of the attention's and of the MLP's output before the residual sum
    qkv_bias: bool = False
    residual_scale: float = 1.0  # granite: of what attention and MLP add to the residual stream
    logit_scale: float = 1.0  # granite: of the logits
    attention_softcap: float | None = None  # gemma2: scores become cap * tanh(scores / cap)
    logit_softcap: float | None = None  # and the logits, once scaled

    @property
    def num_layers(self) -> int:
        return len(self.layer_windows)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens: all full-attention layers, or all with one window."""

    window: int | None
    layers: tuple[int, ...]  # numbers in the decoder, in order


def attention_alone(
    vocab_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layer_windows: tuple[int | None, ...],
    scale: float,
    softcap: float | None = None,
) -> DecoderTraits:
    """Of a decoder that is computed elsewhere but for its attention: no width, no weights (`no_weights`), no rotation.

    Of its ops only `write_kv` and `attend` mean anything.
    """
    return DecoderTraits(
        vocab_size=vocab_size,
        hidden_size=0,
        intermediate_size=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_windows=layer_windows,
        layer_ropes=(RopeTraits(()),) * len(layer_windows),
        norm_eps=1.0,
        attention_scale=scale,
        attention_softcap=softcap,
    )


def layer_groups(traits: DecoderTraits) -> tuple[LayerGroup, ...]:
    """Full attention first, then by growing window."""
    windows = sorted(set(traits.layer_windows), key=lambda window: (window is not None, window or 0))
    return tuple(
        LayerGroup(window, tuple(i for i, w in enumerate(traits.layer_windows) if w == window)) for window in windows
    )


@dataclass(frozen=True)
class StepBatch:
    """The ragged input of one forward. Tokens of a sequence are consecutive; all tensors int32, contiguous.

    Sequence s owns rows query_starts[s]:query_starts[s + 1]; its last row has position context_lens[s] - 1, so a
    decode is a sequence with one row and a prefill chunk one with many. The forward first writes K and V of every
    row, then attends; a row never sees a later position. `page_tables` has one [sequence, block, page_in_block]
    tensor per layer group, -1 where nothing is held (beyond the end, or wholly below a window).
    """

    tokens: torch.Tensor  # [row]
    positions: torch.Tensor  # [row]
    query_starts: torch.Tensor  # [sequence + 1]
    context_lens: torch.Tensor  # [sequence], this step's rows included
    page_tables: tuple[torch.Tensor, ...]  # per group [sequence, block, page_in_block]
    logit_rows: torch.Tensor  # [wanted] row numbers whose logits are returned, in this order
    adapters: tuple[Any, ...] = ()  # as `pack_adapter` made them, those that sequences of this step have
    sequence_adapters: torch.Tensor | None = (
        None  # [sequence] its number in `adapters`, -1 = none; None where there are none
    )

    def row_adapters(self) -> torch.Tensor:
        """[row], of a batch that has adapters."""
        return torch.repeat_interleave(self.sequence_adapters, self.query_starts.diff().long())


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a matrix' product with x: scale * b @ (a @ x) (LoRA, arXiv 2106.09685, section 4.1)."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True)
class Draws:
    """How one token of each row of logits is drawn: numbers [row].

    p(token) = exp((logit - best) / temperature), in descending order of logit, equal ones by number. Kept are those
    with p >= min_p; of these the top_k first; of these the fewest that reach top_p of their sum. The draw is the token
    that `chance` of the sum of the kept falls on.
    """

    temperature: Sequence[float]  # 0: the best token
    top_k: Sequence[int]  # 0: all
    top_p: Sequence[float]  # 1: all
    min_p: Sequence[float]  # 0: all
    chance: Sequence[float]  # in [0, 1)


class Backend(Protocol):
    """One implementation of the decoder step. Every backend gives the reference's values within stated bounds."""

    name: str
    device: torch.device  # where the pool has to lie, and where logits come; a batch comes from the processor

    def unsupported(self, traits: DecoderTraits, dtype: torch.dtype, *, precision: str | None = None) -> str | None:
        """Why this backend cannot run such a decoder, or None."""

    def pack(
        self,
        traits: DecoderTraits,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        *,
        precision: str | None = None,
    ) -> Any:
        """Copies the weights into the backend's own layout; `weights` may be freed afterwards. Names: WEIGHT_NAMES.

        `precision` "int8" keeps matrices as bytes, and multiplies bytes: GROUP neighbours along the summed dimension
        share a scale, of weights as of activations. KV, and all else, stays as `dtype` says. "compact" keeps every bit
        of bfloat16 matrices in three quarters of their memory: a step of few rows reads less, one of many takes longer.
        """

    def pack_adapter(self, decoder: Any, parts: Mapping[str, LowRank]) -> Any:
        """Copies an adapter of this decoder into the backend's own layout, for a batch to name. Names: ADAPTABLE.

        Its matrices are of the decoder's dtype, also over int8 weights. Rows without an adapter stay as they are, to
        the bit. Raises ValueError for parts that the decoder has no matrices for.
        """

    def forward(self, decoder: Any, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Writes the rows' KV into `pool` (uint8 [page, page_bytes]) and returns fp32 logits [wanted, vocab].

        The result may be a buffer of the backend's that the next forward overwrites.
        """

    def ops(self, decoder: Any, pool: torch.Tensor, batch: StepBatch) -> StepOps:
        """The ops of one step on `decoder`, one at a time."""

    def draw(self, logits: torch.Tensor, draws: Draws) -> list[int]:
        """A token for each row of logits (fp32 [row, vocab], left as they are); -1 for a row with a NaN or without a
        finite best. A row's token depends on the row alone."""


class StepOps(Protocol):
    """The fused ops that a forward is made of, one at a time, so that each can be checked against the reference.

    `backend.ops(decoder, pool, batch)` gives them for one step. `x` is the residual stream, fp32 [row, hidden];
    activations come as fp32 tensors that hold values of the dtype. No op changes its arguments.
    """

    def embed(self) -> torch.Tensor:
        """-> x."""

    def project_qkv(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Norm, projections, norms of q and k, rotation; K and V go into the pool. -> q [row, head, head_dim]."""

    def write_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [row, kv head, head_dim], normed and rotated by whoever made them, go into the pool as they are."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Decode rows and prefill chunks in one call. -> [row, head, head_dim]."""

    def project_output(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, its post norm, scaled residual sum. -> x."""

    def project_gate_up(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Norm, both projections, activation(gate) * up. -> [row, intermediate]."""

    def project_down(self, layer: int, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Down projection, its post norm, scaled residual sum. -> x."""

    def project_head(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and logits of the wanted rows, scaled and capped. -> fp32 [wanted, vocab]."""


# Canonical names of a decoder's weights; linear weights are [out, in]. `head` may be the very tensor of `embedding`.
WEIGHT_NAMES = ("embedding", "final_norm", "head")
LAYER_WEIGHT_NAMES = (
    "attention_norm",
    "q",
    "k",
    "v",
    "q_bias",
    "k_bias",
    "v_bias",
    "q_norm",
    "k_norm",
    "o",
    "post_attention_norm",
    "mlp_norm",
    "gate",
    "up",
    "down",
    "post_mlp_norm",
)  # as f"layers.{i}.{name}"; biases, q/k norms and post norms only where the traits ask for them
ADAPTABLE = ("q", "k", "v", "o", "gate", "up", "down")  # of these, what an adapter may add to


def is_matrix(name: str, shape: tuple[int, ...], *, tied: bool) -> bool:
    """Whether a precision of weights is of this one: each matrix but an embedding that is only looked up."""
    return len(shape) == 2 and (tied or name != "embedding")


def int8_bytes(outputs: int, inputs: int) -> int:
    """Of a matrix of bytes: a number for each input of whole groups, and a bfloat16 scale for each group."""
    return outputs * -(-inputs // GROUP) * (GROUP + 2)


def compact_bytes(outputs: int, inputs: int) -> int:
    """Of a matrix of compact weights, 12 bits each; some of 10,000 take eight bytes more."""
    return outputs * inputs * 3 // 2


def unkept(precision: str | None, dtype: torch.dtype) -> str | None:
    """Why no weights of this dtype are kept in such a precision, or None."""
    if precision == "compact" and dtype != torch.bfloat16:
        return f"compact weights are bfloat16 ones, not {dtype}"
    return None


KEPT_BYTES = {"int8": int8_bytes, "compact": compact_bytes}  # of a matrix of outputs x inputs, by precision


def weight_shapes(traits: DecoderTraits) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that `pack` reads from a decoder of these traits."""
    hidden, heads = traits.hidden_size, traits.num_heads * traits.head_dim
    kv_heads, inner = traits.num_kv_heads * traits.head_dim, traits.intermediate_size
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (heads, hidden),
        "k": (kv_heads, hidden),
        "v": (kv_heads, hidden),
        "o": (hidden, heads),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if traits.qkv_bias:
        layer |= {"q_bias": (heads,), "k_bias": (kv_heads,), "v_bias": (kv_heads,)}
    if traits.qk_norm:
        layer |= {"q_norm": (traits.head_dim,), "k_norm": (traits.head_dim,)}
    if traits.post_norms:
        layer |= {"post_attention_norm": (hidden,), "post_mlp_norm": (hidden,)}
    table = (traits.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"embedding": table, "final_norm": (hidden,), "head": table}
    return shapes | {f"layers.{i}.{name}": shape for i in range(traits.num_layers) for name, shape in layer.items()}


def no_weights(traits: DecoderTraits) -> dict[str, torch.Tensor]:
    """What `pack` is given of a decoder without width."""
    return {name: torch.empty(shape) for name, shape in weight_shapes(traits).items()}


def check_adapter(traits: DecoderTraits, parts: Mapping[str, LowRank]) -> None:
    """Raises ValueError for a part that fits no matrix of such a decoder."""
    shapes = weight_shapes(traits)
    for name, part in parts.items():
        if name not in shapes or name.rpartition(".")[2] not in ADAPTABLE:
            raise ValueError(f"an adapter cannot add to {name}")
        rank, (outputs, inputs) = len(part.a), shapes[name]
        if tuple(part.a.shape) != (rank, inputs) or tuple(part.b.shape) != (outputs, rank):
            given = f"a {tuple(part.a.shape)} and b {tuple(part.b.shape)}"
            raise ValueError(f"an adapter of {name} has {given}; the decoder needs (rank, {inputs}), ({outputs}, rank)")
