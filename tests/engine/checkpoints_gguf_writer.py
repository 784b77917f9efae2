"""Tiny checkpoints as GGUF files, written by the `gguf` package the way llama.cpp's converter would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

HALVES_INTERLEAVED = ("llama", "smollm3", "granite")  # as llama.cpp keeps q and k of these
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(folder: Path, path: Path, quantization=GGMLQuantizationType.F32, tensors=None, **changes) -> Path:
    """The tiny checkpoint of `folder` in one file; `changes` replace metadata (None leaves a key out), `tensors` are
    more of them, by name, in fp32."""
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"].removesuffix("_text")
    writer = GGUFWriter(path, arch)
    for key, value in {**metadata(arch, config, folder), **changes}.items():
        write_value(writer, key, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = stored(arch, name, tensor.float(), config).numpy()
        kind = quantization if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(arch, name), quantize(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(arch: str, name: str) -> str:
    *parts, kind = name.split(".")
    if parts[:2] == ["model", "layers"]:
        names = NAMES | GEMMA_NAMES if arch.startswith("gemma") else NAMES
        return f"blk.{parts[2]}.{names['.'.join(parts[3:])]}.{kind}"
    return f"{NAMES['.'.join(parts)]}.{kind}"


def stored(arch: str, name: str, tensor: torch.Tensor, config: dict) -> torch.Tensor:
    """As llama.cpp keeps it: some q and k with the halves of each head interleaved, gemma's norms with 1 added."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if arch in HALVES_INTERLEAVED and (part := name.split(".")[-2]) in heads:
        return tensor.view(heads[part], 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor + 1 if arch.startswith("gemma") and "norm" in name else tensor


def metadata(arch: str, config: dict, folder: Path) -> dict:
    keys = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
    more = {
        "llama": {"rope.dimension_count": "head_dim"},
        "qwen3": {"attention.key_length": "head_dim"},
        "gemma2": {
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        "gemma3": {"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"},
        "granite": {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    }
    keys |= more.get(arch, {})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokens += [added["content"] for added in tokenizer["added_tokens"] if added["id"] >= len(tokens)]
    special = {added["content"] for added in tokenizer["added_tokens"]}
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    ends = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    return {
        **{f"{arch}.{key}": config[name] for key, name in keys.items()},
        f"{arch}.rope.freq_base": (config.get("rope_parameters") or config)["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": ends[0],
        "tokenizer.ggml.eot_token_id": ends[-1],
        "tokenizer.ggml.add_bos_token": arch == "gemma3",
        "tokenizer.chat_template": template,
    }


def write_value(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list() | np.ndarray():
            writer.add_array(key, value)
