"""Which causal LMs of transformers the engine serves: `python -m tests.engine.survey` writes it into docs/models.md.

Of each model_type a tiny random checkpoint is made and loaded as any other; what the loading says is the table. What
has images or sound beside its text is left out: a tiny one of those cannot be made by a rule.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

import kernels
from engine.architectures import Runner, load_checkpoint
from engine.architectures.borrowed import refuse_what_cannot_work
from engine.errors import CheckpointError
from kernels.spec import Backend
from tests.engine.families import save_tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
MOST_PARAMETERS = 20e6
SERVED, FUSED, NO_TINY_ONE = "through transformers", "fused", "not tried: no tiny one can be made by this rule"
# What a config may call its sizes -> a small one.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "inner_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length"), 256),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 384),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 20),
    **{"rotary_dim": 8, "num_kv_shared_layers": 2, "is_decoder": True, "pad_token_id": 0, "mlp_layer_types": None},
}  # fmt: skip


OWN: dict[str, dict[str, Any]] = {"lfm2": {"layer_types": ["conv", "full_attention"] * 2}}  # as its checkpoints have it


def tiny_config(kind: str) -> dict[str, Any]:
    """Changes of the fields that the config of this kind has, with a layer of each sort that it has by itself."""
    config = CONFIG_MAPPING[kind]()
    known = config.to_dict().keys() | config.attribute_map.keys()
    changes = {config.attribute_map.get(key, key): value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:
        changes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if types := getattr(config, "layer_types", None):
        changes["layer_types"] = (list(dict.fromkeys(types)) * 4)[:4]
    return changes | OWN.get(kind, {})


def verdict(kind: str, backend: Backend) -> str:
    """SERVED, FUSED, or why neither."""
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:
        return NO_TINY_ONE
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class._is_stateful or not model_class._supports_attention_backend:
        try:
            refuse_what_cannot_work(config, model_class, {})
        except CheckpointError as refusal:
            return str(refusal)
    if config.get_text_config() is not config:
        return "not tried: more than text"
    with tempfile.TemporaryDirectory() as folder:
        try:
            changes = tiny_config(kind)
            with torch.device("meta"):
                if model_class(CONFIG_MAPPING[kind](**changes)).num_parameters() > MOST_PARAMETERS:
                    return NO_TINY_ONE
            save_tiny(Path(folder), kind, changes, small={"bos_token_id": 1, "eos_token_id": 4})
            _, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            if found["missing_keys"]:
                return NO_TINY_ONE
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
            return NO_TINY_ONE
        try:
            made = load_checkpoint(Path(folder), dtype=torch.float32, backend=backend, progress=lambda *counts: None)
        except CheckpointError as refusal:
            return re.sub(r"(: logits differ by | \(read through transformers, ).*", "", str(refusal), flags=re.DOTALL)
    return FUSED if type(made) is Runner else SERVED


def survey() -> dict[str, list[str]]:
    """Verdict -> the kinds that have it."""
    backend, found = kernels.load("cpu", 2), defaultdict(list)
    kinds = [kind for kind in CONFIG_MAPPING if MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)]
    for kind in sorted(kinds):
        answer = verdict(kind, backend)
        print(f"{kind}: {answer}", file=sys.stderr, flush=True)
        found[answer].append(kind)
    return found


def table(found: dict[str, list[str]]) -> str:
    groups = sorted(found, key=lambda why: (why != FUSED, why != SERVED, "not tried" in why, -len(found[why]), why))
    rows = [f"| {why} | {len(found[why])} | {', '.join(f'`{kind}`' for kind in found[why])} |" for why in groups]
    return "\n".join(["| | | `model_type` |", "|---|---|---|", *rows])


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    text, made = PAGE.read_text(encoding="utf-8"), table(survey())
    begin, end = "<!-- survey -->\n", "\n<!-- end -->"
    before, after = text.split(begin)[0], text.split(end)[1]
    version = f"transformers {transformers.__version__}:\n\n"
    PAGE.write_text(f"{before}{begin}{version}{made}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
