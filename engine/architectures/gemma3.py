"""Gemma 3, text only: local layers with a window between global ones, norms around both halves, q and k normed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.architectures.architecture import (
    COMMON_LAYER_WEIGHTS,
    Architecture,
    activation,
    number,
    positive,
    refuse,
)
from engine.architectures.rope import rope_traits
from engine.errors import CheckpointError
from kernels.spec import DecoderTraits

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def gemma3_traits(config: Mapping[str, Any], dtype: torch.dtype) -> DecoderTraits:
    refuse(config, "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    head_dim = positive(config, "head_dim")
    layer_types = gemma3_layer_types(config)
    ropes = {kind: rope_traits(rope_parameters(config, kind), head_dim) for kind in sorted(set(layer_types))}
    window = positive(config, "sliding_window") if LOCAL in layer_types else None
    hidden_size = positive(config, "hidden_size")
    return DecoderTraits(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_heads=positive(config, "num_attention_heads"),
        num_kv_heads=positive(config, "num_key_value_heads"),
        head_dim=head_dim,
        layer_windows=tuple(window if kind == LOCAL else None for kind in layer_types),
        layer_ropes=tuple(ropes[kind] for kind in layer_types),
        norm_eps=number(config, "rms_norm_eps"),
        attention_scale=number(config, "query_pre_attn_scalar") ** -0.5,
        activation=activation(config, "hidden_activation"),
        norm_weight_offset=1.0,
        embedding_scale=torch.tensor(hidden_size**0.5).to(dtype).item(),  # rounded as the model was trained with it
        qk_norm=True,
        post_norms=True,
    )


def gemma3_layer_types(config: Mapping[str, Any]) -> list[str]:
    num_layers = positive(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        types = [LOCAL if (i + 1) % pattern else GLOBAL for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {LOCAL, GLOBAL}:
        raise CheckpointError(f"config.json: layer_types must name {num_layers} layers, each {LOCAL} or {GLOBAL}")
    return list(types)


def rope_parameters(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """transformers 5 nests `rope_parameters` by layer type; before, only the global layers were ever scaled."""
    older = {
        LOCAL: {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
        GLOBAL: {"rope_theta": config.get("rope_theta", 1_000_000.0), **(config.get("rope_scaling") or {})},
    }
    written = (config.get("rope_parameters") or {}).get(kind) or {}
    return {
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **older[kind],
        **written,
    }


GEMMA3 = Architecture(
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    traits=gemma3_traits,
    layer_weights={
        **COMMON_LAYER_WEIGHTS,
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "post_attention_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "post_mlp_norm": "post_feedforward_layernorm.weight",
    },
)
