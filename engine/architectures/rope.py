"""Rotary frequencies from a config's rope parameters, computed in fp32 in transformers' order of operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine.architectures.architecture import number
from engine.errors import CheckpointError
from kernels.spec import RopeTraits


def rope_traits(parameters: Mapping[str, Any], head_dim: int) -> RopeTraits:
    """`parameters`: rope_theta, rope_type (or the older `type`) and what that type needs. Raises CheckpointError."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SCALINGS:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("config.json: a partial_rotary_factor other than 1 is not supported")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (number(parameters, "rope_theta") ** exponents)
    return RopeTraits(tuple(SCALINGS[kind](frequencies, parameters).tolist()))


def unscaled(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    return frequencies


def linear(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    return frequencies / number(parameters, "factor")


def llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (number(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained_context = number(parameters, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > trained_context / low, frequencies / factor, frequencies)
    smooth = (trained_context / wavelengths - low) / (high - low)
    between = ~(wavelengths < trained_context / high) & ~(wavelengths > trained_context / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


SCALINGS = {"default": unscaled, "linear": linear, "llama3": llama3}
