"""Mistral: llama with one window on all layers, 4,096 tokens where nothing is said; later versions say null: none."""

from __future__ import annotations

import torch

from engine.architectures.architecture import LLAMA_LAYER_WEIGHTS, Architecture, Config
from engine.architectures.layers import one_window
from engine.architectures.llama import plain_traits
from kernels.spec import DecoderTraits


def mistral_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    return plain_traits(config, one_window(config))


MISTRAL = Architecture(
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    traits=mistral_traits,
    layer_weights=LLAMA_LAYER_WEIGHTS,
)
