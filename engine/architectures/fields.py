"""The fields of config.json that a family does not read: harmless, or not for the fused decoder. Better no answer than
a wrong one.

A family's `traits` reads what it computes with. Of the rest, MATHS are fields with which some family of decoders
computes something else, and the values that leave everything as it is; HARMLESS are of no matter to an answer. What is
in neither table is said in the log. The tests hold both against every field of transformers' own configs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from engine.architectures.architecture import Config, NotFused

log = logging.getLogger(__name__)


def off(value: Any) -> bool:
    return not value


def one(value: Any) -> bool:
    return value is None or value == 1


def all_full(value: Any) -> bool:
    return not value or set(value) == {"full_attention"}


MATHS: dict[str, Callable[[Any], bool]] = {
    # biases
    "attention_bias": off,
    "attention_out_bias": off,
    "bias": off,
    "lm_head_bias": off,
    "mlp_bias": off,
    "qkv_bias": off,
    "use_bias": off,
    "use_qkv_bias": off,
    # positions
    "alibi": off,
    "no_rope_layers": lambda value: not value or all(value),
    "partial_rotary_factor": one,
    "position_embedding_type": lambda value: value in (None, "rope", "absolute"),  # the latter: what BERT's base left
    "rope_interleaved": off,
    "rotary_pct": one,
    "use_mrope": off,
    # what a token sees
    "attention_chunk_size": off,
    "layer_types": all_full,
    "sliding_window": off,
    "use_bidirectional_attention": off,
    "use_sliding_window": off,
    # scores, logits, residual stream
    "attention_multiplier": one,
    "attn_logit_softcapping": off,
    "clip_qkv": off,
    "embedding_multiplier": one,
    "final_logit_softcapping": off,
    "logit_scale": one,
    "logits_scaling": one,
    "qk_layernorm": off,
    "query_pre_attn_scalar": off,
    "residual_multiplier": one,
    "scale_attn_by_inverse_layer_idx": off,
    "scale_depth": one,
    "scale_emb": one,
    "use_parallel_residual": off,
    "use_qk_norm": off,
    # experts
    "moe_intermediate_size": off,
    "n_routed_experts": off,
    "num_experts": off,
    "num_local_experts": off,
}

HARMLESS = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",  # read with the context length
    "max_window_layers",  # read where use_sliding_window is on
    "model_type",
    "no_rope_layer_interval",  # read where no_rope_layers are not named
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # into how many pieces sums were cut
    "problem_type",
    "quantization_config",  # refused before
    "resid_pdrop",
    "return_dict",
    "tie_word_embeddings",  # read with the weights
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def refuse_unread(config: Config) -> None:
    """After a family has read its fields. Raises NotFused for one that would change what is computed."""
    unread = config.unread()
    for key, value in unread.items():
        if key in MATHS and not MATHS[key](value):
            name = unread.get("model_type") or "this architecture"
            raise NotFused(f"config.json: {key} is {value!r}, which the fused decoder does not compute for {name}")
    if unknown := sorted(unread.keys() - MATHS.keys() - HARMLESS):
        log.info("config.json says more than this engine reads: %s", ", ".join(unknown))
