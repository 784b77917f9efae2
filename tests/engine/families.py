"""Tiny random checkpoints of every family, made and saved by transformers: what the engine must compute like it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from engine.architectures import Runner, load_checkpoint
from tests.engine.tiny import BOS, CHATML_TEMPLATE, IM_END, VOCAB_SIZE, tiny_tokenizer
from tests.kernels.decoders import Pages, with_adapters

LOCAL, GLOBAL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 5e5,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [9.0] * 12,
    "original_max_position_embeddings": 128, "rope_theta": 1e4, "partial_rotary_factor": 0.75,
}  # fmt: skip
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "pad_token_id": 0,
}

# Family -> model_type and, one by one, the configs that it is tried with; the first one also in Triton's interpreter.
FAMILIES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "llama": (
        "llama",
        [
            {"head_dim": 48, "rope_parameters": LLAMA3},
            {"rope_parameters": YARN, "tie_word_embeddings": True, "num_key_value_heads": 1},
            {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 8}},
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}},
        ],
    ),
    "mistral": ("mistral", [{"sliding_window": 20, "head_dim": 48}, {"sliding_window": None, "head_dim": 80}]),
    "qwen2": (
        "qwen2",
        [
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
            {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": YARN},
            {"use_sliding_window": True, "sliding_window": 17, "layer_types": [LOCAL, GLOBAL, LOCAL]},
            {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0},
        ],
    ),
    "qwen3": (
        "qwen3",
        [
            {"head_dim": 80, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2},
            {"head_dim": 32, "tie_word_embeddings": True, "num_key_value_heads": 1},
        ],
    ),
    "gemma2": (
        "gemma2",
        [
            {"head_dim": 48, "sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
            {"head_dim": 80, "sliding_window": 300, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
            {"head_dim": 32, "sliding_window": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        ],
    ),
    "gemma3": ("gemma3_text", [{"head_dim": 48, "sliding_window": 20, "query_pre_attn_scalar": 40}]),
    "phi3": (
        "phi3",
        [
            {"hidden_size": 128, "partial_rotary_factor": 0.75, "sliding_window": 20},
            {"hidden_size": 192, "num_key_value_heads": 4, "tie_word_embeddings": True},
            {"hidden_size": 128, "rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
        ],
    ),
    "smollm3": (
        "smollm3",
        [
            {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 20},
            {"no_rope_layer_interval": 2, "tie_word_embeddings": False, "rope_parameters": YARN},
        ],
    ),
    "granite": (
        "granite",
        [
            {
                "attention_multiplier": 0.4, "embedding_multiplier": 6.0, "residual_multiplier": 0.22,
                "logits_scaling": 3.0, "tie_word_embeddings": True,
            },
            {"num_key_value_heads": 1, "hidden_size": 192, "attention_multiplier": 0.15},
        ],
    ),
}  # fmt: skip
CASES = {
    f"{family} {number}": (kind, changes)
    for family, (kind, configs) in FAMILIES.items()
    for number, changes in enumerate(configs, 1)
}


def tiny_checkpoint(folder: Path, case: str, seed: int = 1) -> PreTrainedModel:
    """Saves the checkpoint as transformers does, with a tokenizer; returns the model, fp32, to compare with."""
    return save_tiny(folder, *CASES[case], seed=seed)


def save_tiny(
    folder: Path, kind: str, changes: dict[str, Any], seed: int = 1, small: dict[str, Any] = SMALL
) -> PreTrainedModel:
    """The same of any `model_type` and changes of `small`."""
    config = CONFIG_MAPPING[kind](**{**small, "initializer_range": 0.15, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.0 if "gemma" in kind else 1.0, std=0.2)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=False).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"chat_template": CHATML_TEMPLATE, "bos_token": "<bos>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return model


def right_answer(model: PreTrainedModel, tokens: list[int], new_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits of the tokens, [token, vocab], and the tokens that it then generates, whatever they are."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([tokens])
    with torch.inference_mode():
        answer = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)[0, len(tokens) :]
        return model(prompt).logits[0], answer.tolist()


def load(folder: Path, backend, dtype: torch.dtype = torch.float32, **options) -> Runner:
    return load_checkpoint(folder, dtype=dtype, backend=backend, progress=lambda *counts: None, **options)


def logits_of(runner: Runner, pages: Pages, tokens: list[int], chunks: Iterable[int]) -> torch.Tensor:
    """fp32 [token, vocab] of a prompt that is computed in chunks of so many tokens."""
    rows, done = [], 0
    for count in chunks:
        batch = pages.step([(0, tokens[done : done + count], done)])
        if runner.adapter:
            batch = with_adapters(batch, [runner.adapter.packed], [0])
        rows.append(runner.forward(pages.pool, batch).clone())
        done += count
    return torch.cat(rows)
