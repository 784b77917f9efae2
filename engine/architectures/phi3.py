"""Phi-3 and Phi-4-mini: llama with q, k and v in one weight, gate and up in another, part of each head rotated."""

from __future__ import annotations

from engine.architectures.architecture import LLAMA_LAYER_WEIGHTS, Architecture
from engine.architectures.llama import one_window_traits

PHI3 = Architecture(
    defaults={
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    traits=one_window_traits,
    layer_weights={
        **LLAMA_LAYER_WEIGHTS,
        **dict.fromkeys("qkv", "self_attn.qkv_proj.weight"),
        **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight"),
    },
)
