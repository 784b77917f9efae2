"""What an architecture is to us, and the words in which a config.json is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import CheckpointError
from kernels.spec import DecoderTraits


@dataclass(frozen=True)
class Architecture:
    """`traits(config, dtype)` reads config.json (raises CheckpointError); `layer_weights` maps our names to the file's.

    `defaults` are the fields transformers leaves out of config.json when they equal its own defaults.
    """

    defaults: Mapping[str, Any]
    traits: Callable[[Mapping[str, Any], torch.dtype], DecoderTraits]
    layer_weights: Mapping[str, str]


# The part that llama, gemma3 and their relatives share.
COMMON_LAYER_WEIGHTS = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a whole number above 0")
    return value


def number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a number above 0")
    return float(value)


def activation(config: Mapping[str, Any], key: str) -> str:
    name = config.get(key)
    if name not in ACTIVATIONS:
        raise CheckpointError(f"config.json: {key} is {name!r}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def refuse(config: Mapping[str, Any], *keys: str) -> None:
    """Features that change the result and that we do not compute: better no answer than a wrong one."""
    for key in keys:
        if config.get(key):
            raise CheckpointError(f"config.json: {key} is {config[key]!r}, which this engine does not compute")
