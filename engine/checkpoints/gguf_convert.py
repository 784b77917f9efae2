"""A GGUF file to a checkpoint folder in the Hugging Face layout, tensor by tensor, in a few seconds and little memory.

Undoes what llama.cpp's converter does to the weights: q and k of llama are stored with the two halves of each head
interleaved, gemma's norms with 1 added. Quantised weights become bfloat16; plain ones keep the file's own type.
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
        if kind not in ("none", "linear"):
            raise CheckpointError(f"GGUF rope scaling {kind!r} is not supported")
        return {"rope_type": "linear", "factor": self("rope.scaling.factor")} if kind == "linear" else None


def llama_config(keys: Keys) -> dict[str, Any]:
    heads, hidden = keys("attention.head_count"), keys("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys("feed_forward_length"),
        "num_hidden_layers": keys("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys("attention.head_count_kv", heads),
        "head_dim": keys("rope.dimension_count", hidden // heads),
        "max_position_embeddings": keys("context_length"),
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys("rope.freq_base", 10_000.0),
        "rope_scaling": keys.rope_scaling(),
        "attention_bias": False,
        "mlp_bias": False,
    }


def llama_undo(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None or values.ndim != 2:
        return values
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def gemma3_config(keys: Keys) -> dict[str, Any]:
    heads, layers, head_dim = keys("attention.head_count"), keys("block_count"), keys("attention.key_length")
    pattern = keys("attention.sliding_window_pattern", 6)
    # The 27B checkpoint alone scales by its hidden size over its heads.
    scalar = keys("embedding_length") // heads if layers == 62 else head_dim
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": keys("embedding_length"),
        "intermediate_size": keys("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "max_position_embeddings": keys("context_length"),
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "sliding_window": keys("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        "rope_theta": keys("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": keys.rope_scaling(),
    }


def gemma3_undo(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return values - 1 if name.endswith("norm.weight") else values


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_NAMES = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture(llama_config, LAYER_NAMES | {"ffn_norm": "post_attention_layernorm"}, llama_undo),
    "gemma3": GGUFArchitecture(gemma3_config, LAYER_NAMES | GEMMA3_NAMES, gemma3_undo),
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
    names = {stored: hf_name(stored, architecture) for stored in file.tensors}
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{file.path.name} has no token_embd.weight")
    dtype = folder_dtype(file)
    config = architecture.config(Keys(file.metadata, name))
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
        case ["blk", layer, part, "weight"] if layer.isdigit() and part in architecture.names:
            return f"model.layers.{layer}.{architecture.names[part]}.weight"
        case [part, "weight"] if part in MODEL_NAMES:
            return f"{MODEL_NAMES[part]}.weight"
    raise CheckpointError(f"the GGUF file has a tensor {stored} that this engine does not compute with")


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
