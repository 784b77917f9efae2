"""Granite 3: llama with multipliers on the embedding, the scores, the residual sums and the logits."""

from __future__ import annotations

import torch

from engine.architectures.architecture import LLAMA_LAYER_WEIGHTS, Architecture, Config, number, positive
from engine.architectures.llama import LLAMA, plain_traits
from kernels.spec import DecoderTraits


def granite_traits(config: Config, dtype: torch.dtype) -> DecoderTraits:
    return plain_traits(
        config,
        (None,) * positive(config, "num_hidden_layers"),
        attention_scale=number(config, "attention_multiplier"),
        embedding_scale=number(config, "embedding_multiplier"),
        residual_scale=number(config, "residual_multiplier"),
        logit_scale=1 / number(config, "logits_scaling"),
    )


GRANITE = Architecture(
    defaults={
        **LLAMA.defaults,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    traits=granite_traits,
    layer_weights=LLAMA_LAYER_WEIGHTS,
)
