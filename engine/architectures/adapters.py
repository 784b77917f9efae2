"""LoRA adapters (arXiv 2106.09685) as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

An adapter is read for a checkpoint that is loaded, its base, and shares the base's weights: `adapted` gives a runner of
its own over the same decoder. Better no adapter than a wrong one: what cannot be added to matrices that others use as
they are, is refused by name, and so is every tensor that the base has no place for.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.architectures.runner import Progress, Runner, eos_token_ids, own_chat_format, read_json, special_tokens
from engine.architectures.table import ARCHITECTURES
from engine.architectures.weights import STORED_TYPES, some
from engine.chat import OWN_FORMAT
from engine.errors import CheckpointError
from kernels.spec import ADAPTABLE, LowRank, weight_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge it into its base, and register what comes out as a checkpoint"
TENSOR = re.compile(r"(?:base_model\.model\.)?"
                    r"(?P<module>(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<path>.+))"
                    r"\.lora_(?P<side>[AB])\.weight")  # fmt: skip

# Fields of PEFT's LoraConfig that say what is computed, and the values with which it is what we compute.
PLAIN: dict[str, Callable[[Any], bool]] = {
    "peft_type": lambda value: value == "LORA",
    "bias": lambda value: value in (None, "none"),
    "init_lora_weights": lambda value: value in (None, True, False, "gaussian", "orthogonal", "eva"),  # others change W
}
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"}
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",  # of an initialisation that is refused
    "eva_config",
    "exclude_modules",  # which modules have an adapter, the tensors tell
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",  # in training only
    "megatron_core",
    "peft_version",
    "qalora_group_size",  # read where use_qalora is on
    "revision",
    "runtime_config",
    "task_type",
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """What sequences of an adapted model have beside the base's weights."""

    digest: str  # sha256 over config and weights
    rank: int  # the largest
    weight_bytes: int
    packed: Any  # the backend's


def adapted(base: Runner, folder: Path, progress: Progress) -> Runner:
    """A runner of its own over the decoder of `base`. What the folder says of the chat goes before what the base says.

    Raises CheckpointError in the words of what is wrong with the folder, or with it for this base.
    """
    if type(base) is not Runner:
        raise CheckpointError(
            f"an adapter needs the fused decoder, which does not run this {base.architecture}: {MERGE}"
        )
    config = read_json(folder / CONFIG)
    refuse_what_is_not_plain(config)
    adapter = load_adapter(base, folder, config, progress)
    tokenizer_config = read_json(folder / "tokenizer_config.json", missing={})
    specials = special_tokens(tokenizer_config, base.chat.special_tokens)
    chat = own_chat_format(folder, tokenizer_config, base.tokenizer, specials)
    return replace(
        base,
        digest=f"{base.digest} with {adapter.digest}",
        eos_token_ids=base.eos_token_ids | eos_token_ids({}, {}, specials, base.tokenizer),
        chat=chat if chat.name == OWN_FORMAT else base.chat,
        adapter=adapter,
    )


def refuse_what_is_not_plain(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a field with which an adapter is more than a low-rank sum to matrices of the base."""
    for key, value in config.items():
        plain = PLAIN.get(key, lambda value: not value)
        if key not in READ | HARMLESS and not plain(value):
            raise CheckpointError(f"{CONFIG}: {key} is {value!r}; only plain LoRA is added to a shared base: {MERGE}")
    if "peft_type" not in config:
        raise CheckpointError(f"{CONFIG} does not say its peft_type")


def load_adapter(base: Runner, folder: Path, config: Mapping[str, Any], progress: Progress) -> Adapter:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = f"; {path.stem}.bin is a pickle, which could run code and is never read"
        raise CheckpointError(f"{folder} has no {WEIGHTS}{pickled if path.with_suffix('.bin').exists() else ''}")
    try:
        with safe_open(str(path), framework="pt") as file:
            parts = read_parts(base, config, file, progress)
        digest = hashlib.sha256((folder / CONFIG).read_bytes())
        with path.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    return Adapter(
        digest=digest.hexdigest(),
        rank=max(len(part.a) for part in parts.values()),
        weight_bytes=sum(part.a.numel() + part.b.numel() for part in parts.values()) * base.dtype.itemsize,
        packed=base.backend.pack_adapter(base.decoder, parts),
    )


def read_parts(base: Runner, config: Mapping[str, Any], file: safe_open, progress: Progress) -> dict[str, LowRank]:
    """By the kernels' names. Each module needs both of its matrices, of the shapes that the base and the config say."""
    modules = modules_of(base.architecture)
    shapes = weight_shapes(base.traits)
    found = {name: TENSOR.fullmatch(name) for name in sorted(file.keys())}
    if strange := [name for name, match in found.items() if not match or match["path"] not in modules]:
        known = ", ".join(path.rpartition(".")[2] for path in modules)
        raise CheckpointError(f"weights that this base has no place for: {some(strange)}; an adapter may have {known}")
    refuse_missing(config, found, base.traits.num_layers)
    parts: dict[str, LowRank] = {}
    tensors = 0
    for name, match in found.items():
        if match["side"] == "B":
            continue
        ours = [f"layers.{match['layer']}.{target}" for target in modules[match["path"]]]
        heights = [shapes[each][0] for each in ours]
        rank, scale = rank_and_scale(config, match["module"])
        other = name.replace(".lora_A.", ".lora_B.")
        a = tensor(file, name, (rank, shapes[ours[0]][1]))
        b = tensor(file, other, (sum(heights), rank))
        parts |= {each: LowRank(a, rows, scale) for each, rows in zip(ours, b.split(heights), strict=True)}
        tensors += 2
        progress(tensors, len(found), "tensors")
    return parts


def modules_of(architecture: str) -> dict[str, list[str]]:
    """What the architecture's files call each module that may be adapted -> our matrices in it, in order."""
    modules: dict[str, list[str]] = {}
    for ours, theirs in ARCHITECTURES[architecture].layer_weights.items():
        if ours in ADAPTABLE:
            modules.setdefault(theirs.removesuffix(".weight"), []).append(ours)
    return modules


def refuse_missing(config: Mapping[str, Any], found: Mapping[str, re.Match], num_layers: int) -> None:
    """Raises CheckpointError where a matrix lacks its other half, a target its weights, or the base the layer."""
    if not found:
        raise CheckpointError(f"{WEIGHTS} holds no weights")
    if beyond := [name for name, match in found.items() if int(match["layer"]) >= num_layers]:
        raise CheckpointError(f"weight {beyond[0]} is of a layer that this base does not have: it has {num_layers}")
    places = Counter(match.group("layer", "path", "side") for match in found.values())
    if twice := [name for name, match in found.items() if places[match.group("layer", "path", "side")] > 1]:
        raise CheckpointError(f"weights of one place under two names: {some(twice)}")
    swapped = {"A": "B", "B": "A"}
    for name, match in found.items():
        other = name.replace(f".lora_{match['side']}.", f".lora_{swapped[match['side']]}.")
        if other not in found:
            raise CheckpointError(f"{WEIGHTS} lacks {other}")
    targets = config.get("target_modules")
    names = [match["module"] for match in found.values()]
    for target in targets if isinstance(targets, list) else ():
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise CheckpointError(f"{CONFIG}: target_modules has {target!r}, of which {WEIGHTS} has no weights")


def rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Of a module, by PEFT's rules: the first pattern that its name ends with, else what is said for all."""
    rank = by_pattern(config, "rank_pattern", module, config.get("r"))
    alpha = by_pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    if type(rank) is not int or not 0 < rank < 2**31:
        raise CheckpointError(f"{CONFIG}: the rank of {module} is {rank!r}; it must be a whole number above 0")
    if type(alpha) not in (int, float) or not abs(alpha) < 2**31:
        raise CheckpointError(f"{CONFIG}: the lora_alpha of {module} is {alpha!r}; it must be a number below 2**31")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def by_pattern(config: Mapping[str, Any], key: str, module: str, otherwise: Any) -> Any:
    patterns = config.get(key) or {}
    try:
        return next((value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", module)), otherwise)
    except (re.error, AttributeError) as error:
        raise CheckpointError(f"{CONFIG}: {key} is {patterns!r}: {error}") from error


def tensor(file: safe_open, name: str, shape: tuple[int, int]) -> torch.Tensor:
    view = file.get_slice(name)
    if view.get_dtype() not in STORED_TYPES:
        raise CheckpointError(f"weight {name} is stored as {view.get_dtype()}; read are {', '.join(STORED_TYPES)}")
    if tuple(view.get_shape()) != shape:
        told = f"weight {name} has shape {tuple(view.get_shape())}"
        raise CheckpointError(f"{told}; its base, and the rank that {CONFIG} gives, say {shape}")
    return file.get_tensor(name)
