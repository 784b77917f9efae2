"""Tiny random checkpoints in the Hugging Face layout: real files, real tokenizer, untrained. Same seed, same bytes.

    folder = tiny_llama(tmp_path / "llama")
    folder = tiny_gemma3(tmp_path / "gemma", seed=7, sliding_window=16)

Every keyword that is not `seed` or `dtype` replaces a field of config.json.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 384
SPECIAL_TOKENS = ("<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
BOS, EOS, IM_END, END_OF_TURN = (SPECIAL_TOKENS.index(t) for t in ("<bos>", "<eos>", "<|im_end|>", "<end_of_turn>"))

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Gemma's way: one BOS, no system role, turns must alternate.
TURN_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the warm sun",
    "a page of memory holds the keys and values of sixteen tokens and is shared by many sequences",
    "user: what is the capital of france? assistant: the capital of france is paris.",
    "naïve café, déjà vu, 你好，世界, مرحبا بالعالم, emoji 🦊🚀",
)


def tiny_llama(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> Path:
    """Three layers, four heads over two KV heads of 32, tied embeddings, ChatML template."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        **overrides,
    }
    weights = _decoder_weights(config, norm_center=1.0, gemma=False, seed=seed)
    tokenizer_config = {"chat_template": CHATML_TEMPLATE, "bos_token": "<bos>", "eos_token": "<|im_end|>"}
    return _write(folder, config, weights, dtype, tokenizer_config, adds_bos=False)


def tiny_gemma3(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> Path:
    """Four layers (sliding, sliding, full, sliding; window 32), two heads over one KV head of 32, tied embeddings."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END_OF_TURN],
        "pad_token_id": 0,
        **overrides,
    }
    weights = _decoder_weights(config, norm_center=0.0, gemma=True, seed=seed)
    tokenizer_config = {"chat_template": TURN_TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>"}
    return _write(folder, config, weights, dtype, tokenizer_config, adds_bos=True)


def tiny_adapter(folder: Path, base: Path, *, seed: int = 0, ranks: dict[str, int] | None = None, **fields) -> Path:
    """A LoRA adapter of a checkpoint, as PEFT saves it. `ranks`: of each module that it is for, by the end of its name;
    all linear ones of rank 4 if not said. `fields` are more of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    ranks = dict.fromkeys(LINEAR, 4) if ranks is None else ranks
    config = {
        "peft_type": "LORA",
        "r": max(ranks.values()),
        "lora_alpha": 8,
        "target_modules": sorted(ranks),
        "rank_pattern": ranks,
        "bias": "none",
        "init_lora_weights": True,
        "lora_dropout": 0.05,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "a/base",
        "use_dora": False,
        "modules_to_save": None,
        **fields,
    }
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if rank := ranks.get(module.rpartition(".")[2]):
            a, b = (torch.randn(shape, generator=generator) for shape in ((rank, weight.shape[1]), (len(weight), rank)))
            tensors[f"base_model.model.{module}.lora_A.weight"] = a * weight.shape[1] ** -0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = b / 3
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    return folder


def merged(folder: Path, base: Path, adapter: Path, scale_of: Callable[[str], float]) -> Path:
    """A copy of `base` with the adapter in its weights; `scale_of` a module's name."""
    shutil.copytree(base, folder)
    weights, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in parts if ".lora_A." in name]:
        module = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)[1]
        product = parts[name.replace("lora_A", "lora_B")] @ parts[name]
        weights[f"{module}.weight"] += scale_of(module) * product
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def tiny_tokenizer(*, adds_bos: bool) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE entries; ids 0.. are SPECIAL_TOKENS. `adds_bos`: `encode` puts <bos> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 16, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fill = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<unused{i}>", normalized=False, special=True) for i in range(fill)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
        )
    return tokenizer


def _decoder_weights(config: dict, *, norm_center: float, gemma: bool, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"] or hidden // config["num_attention_heads"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> torch.Tensor:
        return norm_center + 0.2 * torch.randn(size, generator=generator)

    # Small beside what the layers add: with tied embeddings the last token would otherwise predict itself for ever.
    embedding = 0.03 * torch.randn(config["vocab_size"], hidden, generator=generator)
    weights = {"model.embed_tokens.weight": embedding * (hidden**-0.5 if gemma else 1.0)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        weights[at + "self_attn.q_proj.weight"] = linear(q_size, hidden)
        weights[at + "self_attn.k_proj.weight"] = linear(kv_size, hidden)
        weights[at + "self_attn.v_proj.weight"] = linear(kv_size, hidden)
        weights[at + "self_attn.o_proj.weight"] = linear(hidden, q_size)
        weights[at + "mlp.gate_proj.weight"] = linear(inner, hidden)
        weights[at + "mlp.up_proj.weight"] = linear(inner, hidden)
        weights[at + "mlp.down_proj.weight"] = linear(hidden, inner)
        weights[at + "input_layernorm.weight"] = norm(hidden)
        weights[at + "post_attention_layernorm.weight"] = norm(hidden)
        if gemma:
            weights[at + "pre_feedforward_layernorm.weight"] = norm(hidden)
            weights[at + "post_feedforward_layernorm.weight"] = norm(hidden)
            weights[at + "self_attn.q_norm.weight"] = norm(head_dim)
            weights[at + "self_attn.k_norm.weight"] = norm(head_dim)
        if config.get("attention_bias"):
            for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size), ("o", hidden)):
                weights[f"{at}self_attn.{name}_proj.bias"] = 0.1 * torch.randn(size, generator=generator)
    weights["model.norm.weight"] = norm(hidden) + 4 * (hidden**0.5 if gemma else 1.0)  # logits of a useful spread
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(config["vocab_size"], hidden)
    return weights


def _write(folder: Path, config: dict, weights: dict, dtype: torch.dtype, tokenizer_config: dict, *, adds_bos) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation_config = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    tiny_tokenizer(adds_bos=adds_bos).save(str(folder / "tokenizer.json"))
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
