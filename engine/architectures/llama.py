"""Llama, versions 1 to 3.2, and everything that is saved as such (SmolLM2 among others)."""

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
from kernels.spec import DecoderTraits


def llama_traits(config: Mapping[str, Any], dtype: torch.dtype) -> DecoderTraits:
    refuse(config, "attention_bias", "mlp_bias")
    num_heads = positive(config, "num_attention_heads")
    head_dim = config.get("head_dim") or positive(config, "hidden_size") // num_heads
    num_layers = positive(config, "num_hidden_layers")
    return DecoderTraits(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        intermediate_size=positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        layer_windows=(None,) * num_layers,
        layer_ropes=(rope_traits(rope_parameters(config), head_dim),) * num_layers,
        norm_eps=number(config, "rms_norm_eps"),
        attention_scale=head_dim**-0.5,
        activation=activation(config, "hidden_act"),
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; before it was `rope_theta` and `rope_scaling`."""
    written = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "rope_theta": config.get("rope_theta", 10_000.0),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **written,
    }


LLAMA = Architecture(
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    traits=llama_traits,
    layer_weights={**COMMON_LAYER_WEIGHTS, "mlp_norm": "post_attention_layernorm.weight"},
)
