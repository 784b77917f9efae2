"""Llama, versions 1 to 3.2, and everything that is saved as such (SmolLM2 among others)."""

from __future__ import annotations

import torch

from engine.architectures.architecture import LLAMA_LAYER_WEIGHTS, Architecture, Config, activation, positive, sizes
from engine.architectures.layers import one_window
from engine.architectures.rope import rope_parameters, rope_traits
from kernels.spec import DecoderTraits


def llama_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    return plain_traits(config, (None,) * positive(config, "num_hidden_layers"))


def plain_traits(config: Config, windows: tuple[int | None, ...], **peculiar) -> DecoderTraits:
    """Of a decoder that is llama's but for its windows and what `peculiar` names."""
    common = sizes(config)
    rope = rope_traits(rope_parameters(config), common["head_dim"])
    usual = {
        "layer_ropes": (rope,) * len(windows),
        "attention_scale": common["head_dim"] ** -0.5,
        "activation": activation(config, "hidden_act"),
    }
    return DecoderTraits(**common, layer_windows=windows, **(usual | peculiar))


def one_window_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    """Where all layers have the window that config.json gives, or none."""
    return plain_traits(config, one_window(config))


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
    layer_weights=LLAMA_LAYER_WEIGHTS,
)
