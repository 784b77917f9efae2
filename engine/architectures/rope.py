"""Rotary frequencies from a config's rope parameters, computed in fp32 in transformers' order of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.architectures.architecture import Config, number, optional_number, positive
from engine.errors import CheckpointError
from kernels.spec import RopeTraits

UNREAD = {
    "original_max_position_embeddings",
    "max_position_embeddings",
    "type",
    "finetuned",
}  # need not be, by all types


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; before it was `rope_theta` and `rope_scaling`, which win if both are."""
    written = {
        "rope_theta": config.get("rope_theta", 10_000.0),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        **(config.get("rope_parameters") or {}),
        **(config.get("rope_scaling") or {}),
    }
    if config.get("original_max_position_embeddings") is not None:
        written["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return {"max_position_embeddings": config.get("max_position_embeddings"), **written}


def rope_type(parameters: Mapping[str, Any]) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return "longrope" if kind == "su" else kind  # as the first checkpoints with it spelt it


def rope_traits(parameters: Mapping[str, Any], head_dim: int) -> RopeTraits:
    """`parameters`: rope_theta, rope_type (or the older `type`) and what that type needs. Raises CheckpointError."""
    parameters = Config({key: value for key, value in parameters.items() if value is not None})
    kind = rope_type(parameters)
    if kind not in SCALINGS:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    dims = (
        int(head_dim * number(parameters, "partial_rotary_factor"))
        if "partial_rotary_factor" in parameters
        else head_dim
    )
    powers = number(parameters, "rope_theta") ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if 2 * len(powers) > head_dim:
        raise CheckpointError(f"config.json: {dims} of a head's {head_dim} dimensions cannot turn in pairs")
    frequencies, factor = SCALINGS[kind](powers, parameters)
    for key, value in parameters.unread().items():
        if key not in UNREAD:
            raise CheckpointError(
                f"config.json: {key} is {value!r}, which this engine does not compute for {kind} rope"
            )
    return RopeTraits(tuple(frequencies.tolist()), factor)


def context_length(config: Mapping[str, Any]) -> int:
    """The most tokens of a sequence. longrope turns all of them otherwise once there are more than it was trained
    with, which would make a cached prefix depend on what follows it: such checkpoints are served up to there."""
    longest, parameters = positive(config, "max_position_embeddings"), rope_parameters(config)
    if rope_type(parameters) == "longrope":
        return min(longest, positive(parameters, "original_max_position_embeddings"))
    return longest


# ------------------------------------------------- theta ** (2 i / dims) -> frequencies, and the factor of cos and sin


def unscaled(powers: torch.Tensor, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    return 1.0 / powers, 1.0


def linear(powers: torch.Tensor, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    return 1.0 / powers / number(parameters, "factor"), 1.0


def dynamic(powers: torch.Tensor, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Begins to scale beyond max_position_embeddings, the most that we serve."""
    number(parameters, "factor")
    return unscaled(powers, parameters)


def llama3(powers: torch.Tensor, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    frequencies = 1.0 / powers
    factor, low, high = (number(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained_context = number(parameters, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > trained_context / low, frequencies / factor, frequencies)
    smooth = (trained_context / wavelengths - low) / (high - low)
    between = ~(wavelengths < trained_context / high) & ~(wavelengths > trained_context / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled), 1.0


def yarn(powers: torch.Tensor, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): fast dimensions kept, slow ones slowed by `factor`, those between by a ramp."""
    trained_context = number(parameters, "original_max_position_embeddings")
    factor = optional_number(parameters, "factor") or number(parameters, "max_position_embeddings") / trained_context
    dims, log_theta = 2 * len(powers), math.log(number(parameters, "rope_theta"))

    def dimension_of(turns: float) -> float:
        return dims * math.log(trained_context / (turns * 2 * math.pi)) / (2 * log_theta)

    low = dimension_of(optional_number(parameters, "beta_fast") or 32)
    high = dimension_of(optional_number(parameters, "beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(len(powers), dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, yarn_factor(factor, parameters)


def yarn_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    written, scale, all_dims = (
        optional_number(parameters, key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    return written or (of(scale) / of(all_dims) if scale and all_dims else of(1.0))


def longrope(powers: torch.Tensor, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753) with its factors for short contexts: see `context_length`."""
    trained_context, short = number(parameters, "original_max_position_embeddings"), parameters.get("short_factor")
    parameters.get("long_factor")
    if not isinstance(short, list) or len(short) != len(powers) or not all(isinstance(f, int | float) for f in short):
        raise CheckpointError(f"config.json: short_factor is {short!r}; it must be a list of {len(powers)} numbers")
    factor = optional_number(parameters, "factor") or number(parameters, "max_position_embeddings") / trained_context
    stretched = math.sqrt(1 + math.log(factor) / math.log(trained_context)) if factor > 1 else 1.0
    frequencies = 1.0 / (torch.tensor(short, dtype=torch.float32) * powers)
    return frequencies, optional_number(parameters, "attention_factor") or stretched


SCALINGS: dict[str, Callable[[torch.Tensor, Mapping[str, Any]], tuple[torch.Tensor, float]]] = {
    "default": unscaled,
    "linear": linear,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}
