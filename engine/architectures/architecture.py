"""What an architecture is to us, and the words in which a config.json is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import CheckpointError
from kernels.spec import DecoderTraits


class NotFused(CheckpointError):
    """As sound as any, but not what the fused decoder computes; transformers' own modules may (`borrowed.py`)."""


class Config(Mapping[str, Any]):
    """What config.json says, over a family's defaults. Remembers which keys were read: see `fields.refuse_unread`."""

    def __init__(self, written: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {**(defaults or {}), **written}
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> dict[str, Any]:
        return {key: value for key, value in self._values.items() if key not in self._read}


@dataclass(frozen=True)
class Architecture:
    """`traits(config, dtype)` reads config.json (raises CheckpointError); `layer_weights` maps our names to the file's.

    `defaults` are the fields transformers leaves out of config.json when they equal its own defaults. Where several of
    our weights have one name in the file, it holds them one below the other, in the order of `layer_weights`.
    """

    defaults: Mapping[str, Any]
    traits: Callable[[Config, torch.dtype], DecoderTraits]
    layer_weights: Mapping[str, str]


# The part that all families share.
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
LLAMA_LAYER_WEIGHTS = {**COMMON_LAYER_WEIGHTS, "mlp_norm": "post_attention_layernorm.weight"}
QKV_BIASES = {f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
QK_NORMS = {f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"}

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DecoderTraits that every family spells alike."""
    num_heads, hidden_size = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    num_kv_heads = num_heads if config.get("num_key_value_heads") is None else positive(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise CheckpointError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    return {
        "vocab_size": positive(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads if config.get("head_dim") is None else positive(config, "head_dim"),
        "norm_eps": number(config, "rms_norm_eps"),
    }


def positive(config: Mapping[str, Any], key: str) -> int:
    return whole(config, key, least=1)


def whole(config: Mapping[str, Any], key: str, least: int = 0) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a whole number, {least} or more")
    return value


def number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a number above 0")
    return float(value)


def optional_number(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def activation(config: Mapping[str, Any], key: str) -> str:
    name = config.get(key)
    if name not in ACTIVATIONS:
        raise NotFused(f"config.json: {key} is {name!r}; the fused decoder computes {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
