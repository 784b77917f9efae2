"""Gemma 2 and 3, text only: local layers with a window between global ones, norms around both halves.

Gemma 2 caps scores and logits. Gemma 3 norms q and k in place of that, and its local layers have a rope of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.architectures.architecture import (
    COMMON_LAYER_WEIGHTS,
    QK_NORMS,
    Architecture,
    Config,
    activation,
    number,
    optional_number,
    sizes,
)
from engine.architectures.layers import GLOBAL, LOCAL, layer_types, windows_of
from engine.architectures.rope import rope_parameters, rope_traits
from kernels.spec import DecoderTraits, RopeTraits


def gemma2_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    types = layer_types(config, lambda layer: layer % 2 == 0)
    rope = rope_traits(rope_parameters(config), sizes(config)["head_dim"])
    return gemma_traits(config, dtype, types, (rope,) * len(types))


def gemma3_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    types, head_dim = layer_types(config, lambda layer: (layer + 1) % pattern), sizes(config)["head_dim"]
    ropes = {kind: rope_traits(rope_of_type(config, kind), head_dim) for kind in sorted(set(types))}
    return gemma_traits(config, dtype, types, tuple(ropes[kind] for kind in types), qk_norm=True)


def gemma_traits(
    config: Config, dtype: torch.dtype, types: list[str], ropes: tuple[RopeTraits, ...], qk_norm: bool = False
) -> DecoderTraits:
    common = sizes(config)
    return DecoderTraits(
        **common,
        layer_windows=windows_of(config, types),
        layer_ropes=ropes,
        attention_scale=number(config, "query_pre_attn_scalar") ** -0.5,
        activation=activation(config, "hidden_activation"),
        norm_weight_offset=1.0,
        # rounded as the model was trained with it
        embedding_scale=torch.tensor(common["hidden_size"] ** 0.5, dtype=dtype).item(),
        qk_norm=qk_norm,
        post_norms=True,
        attention_softcap=optional_number(config, "attn_logit_softcapping"),
        logit_softcap=optional_number(config, "final_logit_softcapping"),
    )


def rope_of_type(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """transformers 5 nests `rope_parameters` by layer type; before, only the global layers were ever scaled."""
    older = {
        LOCAL: {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
        GLOBAL: {"rope_theta": config.get("rope_theta", 1_000_000.0), **(config.get("rope_scaling") or {})},
    }
    longest = config.get("max_position_embeddings")
    written = (config.get("rope_parameters") or {}).get(kind) or {}
    common = {"max_position_embeddings": longest, "original_max_position_embeddings": longest}
    return {**common, **older[kind], **written}


GEMMA2_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
GEMMA3_DEFAULTS = {
    **GEMMA2_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
GEMMA2_LAYER_WEIGHTS = {
    **COMMON_LAYER_WEIGHTS,
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
GEMMA2 = Architecture(GEMMA2_DEFAULTS, gemma2_traits, GEMMA2_LAYER_WEIGHTS)
GEMMA3 = Architecture(GEMMA3_DEFAULTS, gemma3_traits, {**GEMMA2_LAYER_WEIGHTS, **QK_NORMS})
