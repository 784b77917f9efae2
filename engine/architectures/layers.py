"""Which layers see all tokens and which a window of them, as config.json says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.architectures.architecture import positive
from engine.errors import CheckpointError

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def layer_types(config: Mapping[str, Any], is_local: Callable[[int], bool]) -> list[str]:
    """LOCAL or GLOBAL of each layer: config's `layer_types`, or what the family's rule says of a layer's number."""
    num_layers, types = positive(config, "num_hidden_layers"), config.get("layer_types")
    if types is None:
        types = [LOCAL if is_local(i) else GLOBAL for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {LOCAL, GLOBAL}:
        raise CheckpointError(
            f"config.json: layer_types is {types!r}; it must name {num_layers} layers, each {LOCAL} or {GLOBAL}"
        )
    return types


def windows_of(config: Mapping[str, Any], types: list[str]) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if LOCAL not in types else positive(config, "sliding_window")
    return tuple(window if kind == LOCAL else None for kind in types)


def windows_by_switch(config: Mapping[str, Any], is_local: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Of the families that have windows only where `use_sliding_window` is on (qwen, smollm3)."""
    is_on = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    types = layer_types(config, lambda layer: is_on and is_local(layer))
    if LOCAL in types and not is_on:
        raise CheckpointError(f"config.json: layer_types names {LOCAL} layers, but use_sliding_window is off")
    return windows_of(config, types)


def one_window(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Of the families that have the same window on all layers, or none (mistral, phi3)."""
    num_layers = positive(config, "num_hidden_layers")
    kind = GLOBAL if config.get("sliding_window") is None else LOCAL
    types = layer_types(config, lambda layer: kind == LOCAL)
    if set(types) != {kind}:
        raise CheckpointError(
            f"config.json: layer_types is {types!r}, but sliding_window {config['sliding_window']!r} is for all layers"
        )
    return windows_of(config, [kind] * num_layers)
