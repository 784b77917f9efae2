"""Mistral: llama with one window on all layers, 4,096 tokens where nothing is said; later versions say null: none."""

from __future__ import annotations

from engine.architectures.architecture import LLAMA_LAYER_WEIGHTS, Architecture
from engine.architectures.llama import one_window_traits

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
    traits=one_window_traits,
    layer_weights=LLAMA_LAYER_WEIGHTS,
)
