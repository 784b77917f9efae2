"""Tiny random decoders in every shape we claim, and a hand-held pool of pages with poisoned free space."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from kernels.spec import (
    ADAPTABLE,
    BLOCK_TOKENS,
    DecoderTraits,
    LowRank,
    RopeTraits,
    StepBatch,
    layer_groups,
    weight_shapes,
)


def rope(dims: int, theta: float = 10_000.0, factor: float = 1.0) -> RopeTraits:
    """Turns the first `dims` dimensions."""
    return RopeTraits(tuple((1.0 / theta ** (torch.arange(0, dims, 2).float() / dims)).tolist()), factor)


def llama_traits(**changes) -> DecoderTraits:
    """Two full-attention layers, hidden 96, 3 heads on 1 kv head of 64; `changes` name fields of DecoderTraits."""
    head_dim = changes.get("head_dim", 64)
    layers = len(changes.get("layer_windows", (None, None)))
    traits = DecoderTraits(
        vocab_size=301,
        hidden_size=96,
        intermediate_size=136,
        num_heads=3,
        num_kv_heads=1,
        head_dim=head_dim,
        layer_windows=(None, None),
        layer_ropes=(rope(head_dim),) * layers,
        norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
    )
    return replace(traits, **changes)


def gemma_traits(**changes) -> DecoderTraits:
    """One windowed and one full layer with each of gemma3's peculiarities, and a rope of its own for either."""
    head_dim = changes.get("head_dim", 64)
    gemma = dict(
        hidden_size=80,
        num_heads=4,
        num_kv_heads=2,
        layer_windows=(24, None),
        layer_ropes=(rope(head_dim), rope(head_dim, 1_000_000.0)),
        norm_eps=1e-6,
        activation="gelu_tanh",
        norm_weight_offset=1.0,
        embedding_scale=80**0.5,
        qk_norm=True,
        post_norms=True,
    )
    return llama_traits(**(gemma | changes))


def random_weights(traits: DecoderTraits, seed: int = 0) -> dict[str, torch.Tensor]:
    """Scaled so that activations stay near 1; the head is the embedding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 1 - traits.norm_weight_offset + 0.2 * values
        return values * (0.2 if len(shape) == 1 else shape[-1] ** -0.5)

    weights = {name: draw(name, shape) for name, shape in weight_shapes(traits).items()}
    return weights | {"head": weights["embedding"]}


def random_adapter(
    traits: DecoderTraits, rank: int, seed: int = 0, targets: Sequence[str] = ADAPTABLE
) -> dict[str, LowRank]:
    """Parts of a third of the size of what they are added to, on every layer but, of each target, one."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, shape in weight_shapes(traits).items():
        layer, _, target = name.removeprefix("layers.").partition(".")
        if target in targets and (int(layer) + targets.index(target)) % traits.num_layers != seed % 5:
            a = torch.randn(rank, shape[1], generator=generator) * shape[1] ** -0.5
            b = torch.randn(shape[0], rank, generator=generator)
            parts[name] = LowRank(a, b, scale=0.33 * rank**-0.5)
    return parts


def merged(weights: dict[str, torch.Tensor], parts: dict[str, LowRank]) -> dict[str, torch.Tensor]:
    """The weights that compute alone what they do with the adapter beside them."""
    sums = {name: weights[name] + part.scale * part.b @ part.a for name, part in parts.items()}
    return weights | sums


def with_adapters(batch: StepBatch, adapters: Sequence, numbers: Sequence[int]) -> StepBatch:
    """`numbers`: of each sequence, -1 for none."""
    numbers = torch.tensor(list(numbers), dtype=torch.int32)
    return replace(batch, adapters=tuple(adapters), sequence_adapters=numbers)


def from_transformers(model: LlamaForCausalLM | Gemma3ForCausalLM) -> tuple[DecoderTraits, dict[str, torch.Tensor]]:
    """Traits and weights of a tiny transformers model; what the engine's architectures do, small."""
    config, state = model.config, model.state_dict()
    gemma = isinstance(model, Gemma3ForCausalLM)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows: tuple[int | None, ...] = (None,) * config.num_hidden_layers
    ropes = (
        (RopeTraits(tuple(model.model.rotary_emb.inv_freq.tolist())),) * config.num_hidden_layers if not gemma else ()
    )
    if gemma:
        windows = tuple(config.sliding_window if t == "sliding_attention" else None for t in config.layer_types)
        buffers = {t: getattr(model.model.rotary_emb, f"{t}_inv_freq") for t in set(config.layer_types)}
        ropes = tuple(RopeTraits(tuple(buffers[t].tolist())) for t in config.layer_types)
    traits = DecoderTraits(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        layer_windows=windows,
        layer_ropes=ropes,
        norm_eps=config.rms_norm_eps,
        attention_scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        activation="gelu_tanh" if gemma else "silu",
        norm_weight_offset=1.0 if gemma else 0.0,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        qk_norm=gemma,
        post_norms=gemma,
        qkv_bias=bool(config.attention_bias),
    )
    theirs = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "pre_feedforward_layernorm" if gemma else "post_attention_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }

    outer = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}

    def find(name: str) -> torch.Tensor:
        if not name.startswith("layers."):
            return state[outer[name] + ".weight"]
        _, layer, part = name.split(".")
        if part.endswith("_bias"):
            return state[f"model.layers.{layer}.{theirs[part[0]]}.bias"]
        return state[f"model.layers.{layer}.{theirs[part]}.weight"]

    return traits, {name: find(name) for name in weight_shapes(traits)}


def tiny_llama(**changes) -> LlamaForCausalLM:
    config = dict(
        vocab_size=301,
        hidden_size=72,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=False,
        initializer_range=0.15,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(config | changes))).eval()


def tiny_gemma(**changes) -> Gemma3ForCausalLM:
    config = dict(
        vocab_size=301,
        hidden_size=88,
        intermediate_size=120,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=20,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        initializer_range=0.15,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**(config | changes))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@dataclass
class Pages:
    """A pool for one decoder. Free pages hold NaN, ids are dealt in random order, blocks below a window are dropped."""

    traits: DecoderTraits
    dtype: torch.dtype
    units_per_page: int = 3
    total: int = 1000
    seed: int = 0
    shuffled: bool = True
    held: dict[int, list[list[list[int]]]] = field(default_factory=dict)  # sequence -> group -> block -> pages

    def __post_init__(self):
        unit_bytes = BLOCK_TOKENS * self.traits.head_dim * self.dtype.itemsize
        self.pool = torch.full((self.total, self.units_per_page * unit_bytes), 0xFF, dtype=torch.uint8)
        self.groups = layer_groups(self.traits)
        self.pages_per_block = [
            -(-len(group.layers) * 2 * self.traits.num_kv_heads // self.units_per_page) for group in self.groups
        ]
        self.free = list(range(self.total))
        if self.shuffled:
            random.Random(self.seed).shuffle(self.free)

    def step(self, parts: Sequence[tuple[int, Sequence[int], int]], wanted: Sequence[int] | None = None) -> StepBatch:
        """parts: (sequence, its tokens of this step, position of the first of them). All rows are wanted by default."""
        tokens, positions, starts, contexts = [], [], [0], []
        for sequence, ids, first in parts:
            tokens += ids
            positions += range(first, first + len(ids))
            starts.append(len(tokens))
            contexts.append(first + len(ids))
            self._hold(sequence, first, first + len(ids))
        wanted = range(len(tokens)) if wanted is None else wanted
        return StepBatch(
            *(torch.tensor(list(values), dtype=torch.int32) for values in (tokens, positions, starts, contexts)),
            page_tables=tuple(self._table(number, parts) for number in range(len(self.groups))),
            logit_rows=torch.tensor(list(wanted), dtype=torch.int32),
        )

    def _hold(self, sequence: int, first: int, end: int) -> None:
        groups = self.held.setdefault(sequence, [[] for _ in self.groups])
        for blocks, group, width in zip(groups, self.groups, self.pages_per_block, strict=True):
            while len(blocks) * BLOCK_TOKENS < end:
                blocks.append([self.free.pop() for _ in range(width)])
            below = 0 if group.window is None else max(0, first - group.window + 1) // BLOCK_TOKENS
            for block in range(below):
                freed = [page for page in blocks[block] if page >= 0]
                self.pool[freed] = 0xFF
                self.free = freed + self.free
                blocks[block] = [-1] * width

    def _table(self, group: int, parts: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        blocks = [self.held[sequence][group] for sequence, _, _ in parts]
        table = torch.full((len(parts), max(map(len, blocks)) + 1, self.pages_per_block[group]), -1, dtype=torch.int32)
        for row, held in enumerate(blocks):
            table[row, : len(held)] = torch.tensor(held)
        return table
