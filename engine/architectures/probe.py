"""What the attention layers of a model of transformers are: asked of the model itself, by calling it.

Its modules call attention through transformers' AttentionInterface; `attend` is known there by two names. Under PROBE
nothing is computed: one forward notes what each layer asks for, and what the mask would show that transformers would
have made for it. Under NAME transformers makes no masks, and what hangs on the modules attends (`borrowed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.errors import CheckpointError
from kernels.spec import DecoderTraits, attention_alone

NAME, PROBE = "paged_arena", "paged_arena_probe"
HEAD_DIM_UNIT = 16  # what the kernels of all backends divide heads by; a head of another size is padded with zeros
NO_MATTER = {
    "dropout", "is_causal", "sliding_window", "position_ids", "position_embeddings", "use_cache", "cache_position",
    "logits_to_keep", "return_dict",
}  # fmt: skip
WORDS = {"s_aux": "attention sinks (s_aux)", "indices": "a choice of tokens (indices)"}


class Attention(Protocol):
    """What hangs on every module of a model, as `paged_arena`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, others: Mapping[str, Any]
    ) -> Tensor:
        """query [1, head, row, dim], key, value [1, kv head, row, dim] -> [1, row, head, dim]."""


@dataclass(frozen=True)
class Asked:
    """What one layer asks of attention."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None  # None: sees all tokens before it


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. query [1, head, row, dim], key, value [1, kv head, row, dim] -> [1, row, head, dim]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    others.setdefault("is_causal", getattr(module, "is_causal", True))
    return module.paged_arena.attend(query, key, value, scale, attention_mask, others), None


def attend_through(model: PreTrainedModel, name: str, attention: Attention) -> None:
    for module in model.modules():
        module.paged_arena = attention
    model.set_attn_implementation(name)


def unmade_mask(mask_function: Callable[..., Any], kv_length: int, **_: Any) -> Tensor:
    """In place of a mask: something that is passed on to the layers, and knows which tokens the mask would show."""
    mask = torch.zeros(1, 1, 1, kv_length)
    mask.shows = mask_function
    return mask


AttentionInterface.register(NAME, attend)  # transformers makes no masks for one without a function for them
AttentionInterface.register(PROBE, attend)
AttentionMaskInterface.register(PROBE, unmade_mask)


class Probe:
    """Stands in for attention in one forward, and notes what it is asked for."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.asked: list[Asked] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, others: Mapping[str, Any]
    ) -> Tensor:
        softcap = others.get("softcap")
        for name, given in others.items():
            if given is not None and given is not False and name not in NO_MATTER | {"softcap"}:
                raise CheckpointError(f"its attention asks for {WORDS.get(name, name)}, which the kernels do not have")
        if others["is_causal"] is False:
            raise CheckpointError("its attention looks both ways (is_causal is off)")
        if mask is not None and not hasattr(mask, "shows"):
            raise CheckpointError("its attention adds something of its own to the scores")
        window = None if mask is None else window_of(mask.shows, self.longest)
        heads, rows = query.shape[1:3]
        self.asked.append(Asked(heads, key.shape[1], key.shape[-1], value.shape[-1], scale, softcap, window))
        return query.new_zeros(1, rows, heads, value.shape[-1])


def probe(model: PreTrainedModel, tokens: Tensor, longest: int) -> list[Asked]:
    """What the layers ask for, in the order in which they do."""
    attention = Probe(longest)
    attend_through(model, PROBE, attention)
    own_logits(model, tokens)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if len(attention.asked) < (layers or 1):
        raise CheckpointError(
            f"only {len(attention.asked)} of its {layers} layers go through transformers' AttentionInterface"
        )
    return attention.asked


def window_of(shows: Callable[..., Any], longest: int) -> int | None:
    """How many tokens a token sees, itself the last; None for all. `shows`: transformers' mask, as a function of batch,
    head, query and key. Raises CheckpointError for any other pattern."""
    keys, zero = torch.arange(longest), torch.tensor(0)
    counts = []
    for place in (longest - 1, max(longest - 2, 0), longest // 2, 0):
        seen = keys[torch.as_tensor(shows(zero, zero, torch.tensor(place), keys)).cpu().expand(longest)]
        if len(seen) == 0 or int(seen[-1]) != place or int(seen[0]) != place + 1 - len(seen):
            raise CheckpointError("its tokens see others than themselves and those right before them")
        counts.append((place, len(seen)))
    window = counts[0][1]
    if any(count != min(window, place + 1) for place, count in counts):
        raise CheckpointError("its tokens see chunks, not all tokens nor a window of them")
    return None if window == longest else window


def traits_of(asked: list[Asked], vocab_size: int) -> DecoderTraits:
    """Raises CheckpointError where the layers differ in more than scale and window."""
    shapes = {(each.heads, each.kv_heads, each.key_dim, each.value_dim, each.softcap) for each in asked}
    if len(shapes) > 1:
        raise CheckpointError("its layers differ in the number or the size of their heads")
    ((heads, kv_heads, key_dim, value_dim, softcap),) = shapes
    if heads % kv_heads:
        raise CheckpointError(f"its {heads} attention heads cannot share {kv_heads} key-value heads")
    head_dim = -(-max(key_dim, value_dim) // HEAD_DIM_UNIT) * HEAD_DIM_UNIT
    windows = tuple(each.window for each in asked)
    return attention_alone(vocab_size, heads, kv_heads, head_dim, windows, asked[0].scale, softcap)


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: Tensor, **told: Tensor) -> Tensor:
    """[row, vocab] of a prompt by the model as it is, told nothing but the tokens and `told`."""
    given = {name: each.to(model.device) for name, each in {"input_ids": tokens[None], **told}.items()}
    return model(**given, use_cache=False).logits[0].float().cpu()
