"""Qwen 2 and 2.5: llama with biases on q, k and v. Qwen 3: norms of q and k in their place, and a head_dim of its own.

From layer `max_window_layers` on there is a window, where `use_sliding_window` says so.
"""

from __future__ import annotations

import torch

from engine.architectures.architecture import (
    LLAMA_LAYER_WEIGHTS,
    QK_NORMS,
    QKV_BIASES,
    Architecture,
    Config,
    whole,
)
from engine.architectures.layers import windows_by_switch
from engine.architectures.llama import plain_traits
from kernels.spec import DecoderTraits


def qwen2_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    return plain_traits(config, qwen_windows(config), qkv_bias=True)


def qwen3_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    return plain_traits(config, qwen_windows(config), qk_norm=True)


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    return windows_by_switch(config, lambda layer: layer >= whole(config, "max_window_layers"))


DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "tie_word_embeddings": False,
}
QWEN2 = Architecture(DEFAULTS, qwen2_traits, {**LLAMA_LAYER_WEIGHTS, **QKV_BIASES})
QWEN3 = Architecture({**DEFAULTS, "head_dim": 128}, qwen3_traits, {**LLAMA_LAYER_WEIGHTS, **QK_NORMS})
