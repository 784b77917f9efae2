"""A GGUF file to a checkpoint folder in the Hugging Face layout, tensor by tensor, in a few seconds and little memory.

Undoes what llama.cpp's converter does to the weights: q and k of llama, smollm3 and granite are stored with the two
halves of each head interleaved, gemma's norms with 1 added. Quantised weights become bfloat16; plain ones keep the
file's own type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGMLQuantizationType

from engine.checkpoints.gguf_file import GGUFFile
from engine.checkpoints.gguf_tokenizer import gguf_tokenizer
from engine.errors import CheckpointError

Progress = Callable[[int, int, str], None]

SAFETENSORS_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class GGUFArchitecture:
    """`config` reads the metadata under the architecture's own prefix; `names` maps tensor names inside a layer."""

    config: Callable[[Keys], dict[str, Any]]
    names: Mapping[str, str]
    undo: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]


class Keys:
    """`keys("block_count")` is the value of `llama.block_count`; raises CheckpointError where there is none."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._metadata, self._prefix = metadata, prefix

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise CheckpointError(f"the GGUF file does not say {self._prefix}.{key}")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-6, not 9.99999997e-07

    def rope_scaling(self) -> dict[str, Any] | None:
        kind = self("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise CheckpointError(f"GGUF rope scaling {kind!r} is not supported")
        if kind in ("none", "longrope"):  # the latter is told by its tensors: see `rope_factors`
            return None
        scaling = {"rope_type": kind, "factor": self("rope.scaling.factor")}
        return scaling | (
            {"original_max_position_embeddings": self("rope.scaling.original_context_length")} if kind == "yarn" else {}
        )


def plain_config(keys: Keys, architecture: str, model_type: str, **peculiar: Any) -> dict[str, Any]:
    """Of a family whose metadata is llama's but for what `peculiar` names."""
    heads, hidden = keys("attention.head_count"), keys("embedding_length")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys("feed_forward_length"),
        "num_hidden_layers": keys("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys("attention.head_count_kv", heads),
        "head_dim": keys("attention.key_length", hidden // heads),
        "max_position_embeddings": keys("context_length"),
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys("rope.freq_base", 10_000.0),
        "rope_scaling": keys.rope_scaling(),
        "attention_bias": False,
        **peculiar,
    }


def llama_config(keys: Keys) -> dict[str, Any]:
    """Mistral's files say llama, too, and nothing of a window."""
    head_dim = keys("rope.dimension_count", keys("embedding_length") // keys("attention.head_count"))
    return plain_config(keys, "LlamaForCausalLM", "llama", head_dim=head_dim, mlp_bias=False)


def qwen2_config(keys: Keys) -> dict[str, Any]:
    return plain_config(keys, "Qwen2ForCausalLM", "qwen2", use_sliding_window=False)


def qwen3_config(keys: Keys) -> dict[str, Any]:
    return plain_config(keys, "Qwen3ForCausalLM", "qwen3", use_sliding_window=False)


def phi3_config(keys: Keys) -> dict[str, Any]:
    head_dim = keys("embedding_length") // keys("attention.head_count")
    original = keys("rope.scaling.original_context_length", keys("context_length"))
    return plain_config(
        keys,
        "Phi3ForCausalLM",
        "phi3",
        partial_rotary_factor=keys("rope.dimension_count", head_dim) / head_dim,
        original_max_position_embeddings=original,
        sliding_window=keys("attention.sliding_window", 0) or None,
    )


def smollm3_config(keys: Keys) -> dict[str, Any]:
    return plain_config(keys, "SmolLM3ForCausalLM", "smollm3", no_rope_layer_interval=4, mlp_bias=False)


def granite_config(keys: Keys) -> dict[str, Any]:
    return plain_config(
        keys,
        "GraniteForCausalLM",
        "granite",
        attention_multiplier=keys("attention.scale", 1.0),
        embedding_multiplier=keys("embedding_scale", 1.0),
        residual_multiplier=keys("residual_scale", 1.0),
        logits_scaling=keys("logit_scale", 1.0),
        mlp_bias=False,
    )


def gemma_config(keys: Keys, architecture: str, model_type: str, layers_of_largest: int, **peculiar) -> dict[str, Any]:
    heads, layers, head_dim = keys("attention.head_count"), keys("block_count"), keys("attention.key_length")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": keys("embedding_length"),
        "intermediate_size": keys("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # The 27B checkpoint alone scales by its hidden size over its heads.
        "query_pre_attn_scalar": keys("embedding_length") // heads if layers == layers_of_largest else head_dim,
        "max_position_embeddings": keys("context_length"),
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "sliding_window": keys("attention.sliding_window"),
        **peculiar,
        "rope_scaling": keys.rope_scaling(),
    }


def gemma2_config(keys: Keys) -> dict[str, Any]:
    return gemma_config(
        keys,
        "Gemma2ForCausalLM",
        "gemma2",
        layers_of_largest=46,
        rope_theta=keys("rope.freq_base", 10_000.0),
        attn_logit_softcapping=keys("attn_logit_softcapping", 50.0),
        final_logit_softcapping=keys("final_logit_softcapping", 30.0),
    )


def gemma3_config(keys: Keys) -> dict[str, Any]:
    layers, pattern = keys("block_count"), keys("attention.sliding_window_pattern", 6)
    return gemma_config(
        keys,
        "Gemma3ForCausalLM",
        "gemma3_text",
        layers_of_largest=62,
        layer_types=["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        rope_theta=keys("rope.freq_base", 1_000_000.0),
        rope_local_base_freq=10_000.0,
    )


def as_it_is(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return values


def halves_apart(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None or values.ndim != 2:
        return values
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def norms_less_one(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return values - 1 if name.endswith("norm.weight") else values


LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PHI3_NAMES = LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GEMMA2_NAMES = LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"

GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture(llama_config, LLAMA_NAMES, halves_apart),
    "qwen2": GGUFArchitecture(qwen2_config, LLAMA_NAMES, as_it_is),
    "qwen3": GGUFArchitecture(qwen3_config, LLAMA_NAMES | QK_NORM_NAMES, as_it_is),
    "gemma2": GGUFArchitecture(gemma2_config, GEMMA2_NAMES, norms_less_one),
    "gemma3": GGUFArchitecture(gemma3_config, GEMMA2_NAMES | QK_NORM_NAMES, norms_less_one),
    "phi3": GGUFArchitecture(phi3_config, PHI3_NAMES, as_it_is),
    "smollm3": GGUFArchitecture(smollm3_config, LLAMA_NAMES, halves_apart),
    "granite": GGUFArchitecture(granite_config, LLAMA_NAMES, halves_apart),
}


def convert_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and their like into `folder`. Raises CheckpointError."""
    try:
        write_folder(GGUFFile(path), folder, progress)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} is broken: {error}") from error


def write_folder(file: GGUFFile, folder: Path, progress: Progress) -> None:
    name = file.metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {name} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}")
    architecture = GGUF_ARCHITECTURES[name]
    factors = {FACTORS, SHORT_FACTORS, LONG_FACTORS}
    names = {stored: hf_name(stored, architecture) for stored in file.tensors if stored not in factors}
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{file.path.name} has no token_embd.weight")
    dtype = folder_dtype(file)
    keys = Keys(file.metadata, name)
    config = architecture.config(keys) | rope_factors(file, keys)
    config |= {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": str(dtype).removeprefix("torch."),
        **token_ids(file.metadata),
    }
    tokenizer, tokenizer_config = gguf_tokenizer(file.metadata)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "config.json", {key: value for key, value in config.items() if value is not None})
    write_json(folder / "generation_config.json", token_ids(file.metadata))
    with (folder / "model.safetensors").open("wb") as out:
        undo = lambda stored, values: architecture.undo(stored, values, config)  # noqa: E731
        write_safetensors(out, file, names, dtype, undo, progress)


def hf_name(stored: str, architecture: GGUFArchitecture) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match stored.split("."):
        case ["blk", layer, part, "weight" | "bias" as kind] if layer.isdigit() and part in architecture.names:
            return f"model.layers.{layer}.{architecture.names[part]}.{kind}"
        case [part, "weight"] if part in MODEL_NAMES:
            return f"{MODEL_NAMES[part]}.weight"
    raise CheckpointError(f"the GGUF file has a tensor {stored} that this engine does not compute with")


def rope_factors(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    """By what each frequency is divided where the file has it as a tensor: Llama 3.1's scaling, done, or LongRoPE's.

    Both are LongRoPE in a config.json; Llama's has one set of factors, and does not stretch.
    """
    stored = {
        name: np.concatenate(list(file.values(name))).ravel() for name in file.tensors if name.startswith("rope_f")
    }
    factors = {name: [float(str(factor)) for factor in values.astype(np.float32)] for name, values in stored.items()}
    longest = keys("context_length")
    if FACTORS in factors:
        scaling = {"short_factor": factors[FACTORS], "long_factor": factors[FACTORS], "attention_factor": 1.0}
        scaling["original_max_position_embeddings"] = longest
    elif factors.keys() == {SHORT_FACTORS, LONG_FACTORS}:
        scaling = {"short_factor": factors[SHORT_FACTORS], "long_factor": factors[LONG_FACTORS]}
        scaling["attention_factor"] = keys("rope.scaling.attn_factor", 1.0)
        scaling["original_max_position_embeddings"] = keys("rope.scaling.original_context_length")
    elif keys("rope.scaling.type", "none") == "longrope":
        raise CheckpointError(f"{file.path.name} is scaled by longrope and lacks {SHORT_FACTORS} or {LONG_FACTORS}")
    else:
        return {}
    return {"rope_scaling": {"rope_type": "longrope", **scaling}}


def folder_dtype(file: GGUFFile) -> torch.dtype:
    """The type of the matrices where all are plain and of one type, else bfloat16."""
    plain = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
    matrices = {info.type for info in file.tensors.values() if len(info.shape) > 1}
    return plain.get(matrices.pop(), torch.bfloat16) if len(matrices) == 1 else torch.bfloat16


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, pad, and all that end an answer (an end-of-turn token among them), as config.json names them."""
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = [found[name] for name in ("eos", "eot") if found[name] is not None]
    named = {"bos_token_id": found["bos"], "pad_token_id": found["padding"]}
    named["eos_token_id"] = ends[0] if len(set(ends)) == 1 else sorted(set(ends)) or None
    return {key: value for key, value in named.items() if value is not None}


def write_safetensors(
    out: BinaryIO,
    file: GGUFFile,
    names: Mapping[str, str],
    dtype: torch.dtype,
    undo: Callable[[str, np.ndarray], np.ndarray],
    progress: Progress,
) -> None:
    """The header, then each tensor as it is dequantised; format: https://github.com/huggingface/safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored, name in names.items():
        shape = file.tensors[stored].shape
        start, end = end, end + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for done, stored in enumerate(names):
        progress(done, len(names), "tensors")
        for values in pieces(file, stored, undo):
            bits = torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
            out.write(bits.view(torch.uint8).numpy().data)
    progress(len(names), len(names), "tensors")


def pieces(file: GGUFFile, stored: str, undo: Callable[[str, np.ndarray], np.ndarray]) -> Iterator[np.ndarray]:
    """A tensor in consecutive pieces of rows; whole where rows change places."""
    if ".attn_" in stored:
        yield undo(stored, np.concatenate(list(file.values(stored))))
    else:
        yield from (undo(stored, piece) for piece in file.values(stored))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
