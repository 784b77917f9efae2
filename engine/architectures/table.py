"""The architectures, by their name in config.json's `architectures`.

An architecture is data: how its config.json becomes DecoderTraits, and what its file calls each weight. The forward
itself is the kernels'. To add one: a module beside this one and its line here; the tests are parametrised over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.architectures.architecture import Architecture, NotFused
from engine.architectures.gemma import GEMMA2, GEMMA3
from engine.architectures.granite import GRANITE
from engine.architectures.llama import LLAMA
from engine.architectures.mistral import MISTRAL
from engine.architectures.phi3 import PHI3
from engine.architectures.qwen import QWEN2, QWEN3
from engine.architectures.smollm3 import SMOLLM3
from engine.errors import CheckpointError

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3TextModel": GEMMA3,
    "Phi3ForCausalLM": PHI3,
    "SmolLM3ForCausalLM": SMOLLM3,
    "GraniteForCausalLM": GRANITE,
}


def architecture_name(config: Mapping[str, Any]) -> str:
    """The first name of config.json's `architectures`; raises CheckpointError without one."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError("config.json names no architecture, such as LlamaForCausalLM")
    return names[0]


def known_architecture(config: Mapping[str, Any]) -> Architecture:
    """The one of the table; raises NotFused for another."""
    name = architecture_name(config)
    if name not in ARCHITECTURES:
        raise NotFused(f"{name} is none of the fused decoder's architectures: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
