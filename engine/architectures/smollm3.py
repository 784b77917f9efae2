"""SmolLM3: llama with every fourth layer left unrotated (NoPE), and a window on those where the config says so."""

from __future__ import annotations

import torch

from engine.architectures.architecture import LLAMA_LAYER_WEIGHTS, Architecture, Config, positive, sizes
from engine.architectures.layers import windows_by_switch
from engine.architectures.llama import plain_traits
from engine.architectures.rope import rope_parameters, rope_traits
from engine.errors import CheckpointError
from kernels.spec import DecoderTraits, RopeTraits


def smollm3_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    turns = turning_layers(config)
    rope = rope_traits(rope_parameters(config), sizes(config)["head_dim"])
    return plain_traits(
        config,
        windows_by_switch(config, lambda layer: not turns[layer]),
        layer_ropes=tuple(rope if turn else RopeTraits(()) for turn in turns),
    )


def turning_layers(config: Config) -> list[int]:
    """1 for a layer that is rotated: what `no_rope_layers` says, by a name that says the contrary."""
    num_layers, written = positive(config, "num_hidden_layers"), config.get("no_rope_layers")
    if written is None:
        return [(i + 1) % positive(config, "no_rope_layer_interval") and 1 for i in range(num_layers)]
    if not isinstance(written, list) or len(written) != num_layers or not set(written) <= {0, 1}:
        raise CheckpointError(f"config.json: no_rope_layers is {written!r}; it must be 0 or 1 for {num_layers} layers")
    return written


SMOLLM3 = Architecture(
    defaults={
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    traits=smollm3_traits,
    layer_weights=LLAMA_LAYER_WEIGHTS,
)
