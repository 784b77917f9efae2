"""A decoder borrowed from transformers: its modules compute all but attention, which reads and writes our pages.

It serves every causal LM that the fused decoder does not compute. The tokens of a step go through the model as one row,
those of all sequences side by side, each with its position and without a mask, as in transformers' own continuous
batching; each attention layer calls `PagedLayers.attend`, which writes K and V through the page tables and attends to
them with the backend's ops. Scheduler, pool and cache see no difference.

What a layer is (heads, their size, scale, window) is not read from config.json, where every family spells it in its own
way, but asked of the model (`probe.py`). What cannot work is refused with the reason; what a family may do beside is
found by `check`, which holds the first logits against transformers' own attention.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.architectures.fields import MATHS
from engine.architectures.layers import GLOBAL, LOCAL
from engine.architectures.probe import NAME, attend_through, own_logits, probe, traits_of
from engine.architectures.rope import context_length
from engine.architectures.runner import Computed, Progress, Runner
from engine.architectures.weights import UNUSED, open_files, some
from engine.errors import CheckpointError
from kernels.spec import BLOCK_TOKENS, Backend, DecoderTraits, StepBatch, StepOps, layer_groups, no_weights

log = logging.getLogger(__name__)

BUFFERS = (*UNUSED, ".attention.bias", ".attn.bias", "masked_bias", "position_ids")  # that older files carry

# Median over the rows of a chunk of what a logit differs by, over the largest logit. A median, for where experts are
# chosen a rounding may choose another one; what is computed otherwise shows in all rows. Seen of sound ones are up to
# 2e-6 and 0.05, of a chunk that cannot see the one before it 0.7.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.2}
CUTS = ((0, 20, 33), (0, 5, 13))  # where the two prompts of `check` begin, are cut, and end

# While transformers makes a model it changes what the whole process sees (the default dtype, how weights are tied), and
# then puts back what it found: of two at once, what the other had changed.
MAKING = Lock()

# Rows from which on all processors multiply. PyTorch's threads go on spinning for a while, beside ours that attend:
# 256 rows take 283 ms in place of 415, but 16 take 116 in place of 92 (SmolLM2-135M, bf16, 2 cores, measured).
MANY_ROWS = 32


class BorrowedRunner(Runner):
    def forward(self, pool: Tensor, batch: StepBatch) -> Tensor:
        return self.decoder.forward(pool, batch).cpu()


def borrow(
    folder: Path, written: Mapping[str, Any], *, dtype: torch.dtype, backend: Backend, progress: Progress
) -> Computed:
    """Loads what transformers has for a folder whose config.json is `written`. Raises CheckpointError where it has
    nothing, or where what it has cannot run over pages."""
    try:
        config, model_class = known_to_transformers(folder, written)
        refuse_what_cannot_work(config, model_class, written)
        longest = longest_context(config)
        model = load_model(folder, config, model_class, dtype, progress).to(backend.device)
        prompts = [some_tokens(model, cuts[-1]) for cuts in CUTS]
        expected = [own_logits(model, prompt) for prompt in prompts]
        refuse_other_positions(model, prompts[0], expected[0])
        asked = probe(model, prompts[0], longest)
        traits = traits_of(asked, expected[0].shape[-1])
        if reason := backend.unsupported(traits, dtype):
            raise CheckpointError(f"the {backend.name} kernels cannot run its attention: {reason}")
        decoder = BorrowedDecoder(model, traits, len(asked), backend, dtype)
        check(decoder, traits, dtype, prompts, expected)
    except CheckpointError:
        raise
    except Exception as error:
        log.info("transformers cannot run %s", folder, exc_info=error)
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot run it: {type(error).__name__}: {first_line}"
        ) from error
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))  # tied ones come once
    return Computed(traits, longest, weight_bytes, decoder)


# -------------------------------------------------------------------------------------------------- before weights


def known_to_transformers(folder: Path, written: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The config, and the class of a causal LM for it: the very one that config.json names."""
    kind, name = written.get("model_type"), written["architectures"][0]
    if kind not in CONFIG_MAPPING:
        code = "; its own code (auto_map) is never run" if "auto_map" in written else ""
        raise CheckpointError(f"transformers {transformers.__version__} has no model_type {kind!r}{code}")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, return_dict=True)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None or found.__name__ != name:
        has = (
            f"its causal LM of model_type {kind} is {found.__name__}" if found else f"it has none of model_type {kind}"
        )
        raise CheckpointError(f"{name} is no causal LM that transformers {transformers.__version__} has: {has}")
    return config, found


def refuse_what_cannot_work(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], written: Mapping[str, Any]
) -> None:
    if config.is_encoder_decoder:
        raise CheckpointError("it is an encoder with a decoder; decoders alone are served")
    if model_class._is_stateful:
        raise CheckpointError("its layers keep a state that is no KV (as mamba, rwkv, linear attention)")
    if not model_class._supports_attention_backend:
        raise CheckpointError("its attention in transformers cannot be replaced (_supports_attention_backend)")
    if others := set(getattr(config.get_text_config(), "layer_types", None) or ()) - {LOCAL, GLOBAL}:
        raise CheckpointError(f"its layers are of kinds that are no paged attention: {', '.join(sorted(others))}")
    fields, kept = {*type(config)().to_dict(), *config.attribute_map}, config.to_dict()
    for key in kept.keys() & written.keys() & MATHS.keys() - fields:
        if not MATHS[key](written[key]):
            raise CheckpointError(
                f"config.json: {key} is {written[key]!r}, which transformers does not read for it either"
            )


def refuse_other_positions(model: PreTrainedModel, tokens: Tensor, expected: Tensor) -> None:
    """Told the positions that we count, it has to compute what it does untold: to the bit, where it does so twice."""
    again, told = own_logits(model, tokens), own_logits(model, tokens, position_ids=torch.arange(len(tokens))[None])
    if not (told - expected).abs().max() <= 10 * (again - expected).abs().max():
        raise CheckpointError("its positions do not count from 0, so that sequences cannot lie side by side")


def longest_context(config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    return context_length({**text.to_dict(), "max_position_embeddings": getattr(text, "max_position_embeddings", None)})


def load_model(
    folder: Path, config: PreTrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype, progress: Progress
) -> PreTrainedModel:
    """With attention of transformers' own. Every weight comes from the files, and the files hold no other."""
    count = len(open_files(folder))
    progress(0, count, "tensors")
    transformers.utils.logging.disable_progress_bar()
    with MAKING:
        model, found = model_class.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="eager", use_safetensors=True,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    if found["missing_keys"]:
        raise CheckpointError(f"weights are missing: {some(sorted(found['missing_keys']))}")
    if extra := sorted(key for key in found["unexpected_keys"] if not key.endswith(BUFFERS)):
        raise CheckpointError(f"weights that this architecture does not have: {some(extra)}")
    for weight in (*model.parameters(), *model.buffers()):  # what is still the file's own bytes, which may change
        weight.data = weight.data.clone()
    progress(count, count, "tensors")
    return model.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------------------- steps


class PagedLayers:
    """Attention of one model over pages, in the step that `ops` are of. Its layers come in the order of the probe's."""

    def __init__(self, traits: DecoderTraits) -> None:
        self.traits = traits
        self.ops: StepOps | None = None
        self.called = 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, others: Mapping[str, Any]
    ) -> Tensor:
        layer, self.called = self.called, self.called + 1
        if scale != self.traits.attention_scale:
            query = query * (scale / self.traits.attention_scale)
        self.ops.write_kv(layer, self._rows(key), self._rows(value))
        attended = self.ops.attend(layer, self._rows(query))
        return attended[None, ..., : value.shape[-1]].to(query.dtype)

    def _rows(self, heads: Tensor) -> Tensor:
        """[1, head, row, dim] -> [row, head, head_dim], zeros behind what the model has."""
        missing = self.traits.head_dim - heads.shape[-1]
        rows = heads[0].transpose(0, 1)
        return F.pad(rows, (0, missing)) if missing else rows


class BorrowedDecoder:
    """A model of transformers, and the backend's side of its attention."""

    def __init__(
        self, model: PreTrainedModel, traits: DecoderTraits, calls: int, backend: Backend, dtype: torch.dtype
    ) -> None:
        self.model, self.backend, self.calls = model, backend, calls
        self.packed = backend.pack(traits, no_weights(traits), dtype)
        self.layers = PagedLayers(traits)
        self.keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        attend_through(model, NAME, self.layers)

    @torch.inference_mode()
    def forward(self, pool: Tensor, batch: StepBatch) -> Tensor:
        """fp32 logits [wanted, vocab], on the backend's device."""
        tokens, positions, rows = (
            each.long().to(self.backend.device) for each in (batch.tokens, batch.positions, batch.logit_rows)
        )
        self.layers.called = 0
        self.layers.ops = self.backend.ops(self.packed, pool, replace(batch, logit_rows=batch.logit_rows[:0]))
        wanted = {"logits_to_keep": rows} if self.keeps_rows else {}
        given = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, **wanted}
        with torch_threads(getattr(self.backend, "threads", None) if len(batch.tokens) >= MANY_ROWS else None):
            logits = self.model(**given).logits[0]
        self.layers.ops = None
        if self.layers.called != self.calls:
            raise RuntimeError(f"{self.layers.called} layers attended, not {self.calls}")
        return (logits if self.keeps_rows else logits[rows]).float()


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many inside; None: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------------- check


def some_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """int64 [count], from the middle of the vocabulary: what is special lies at its ends."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return vocab_size // 4 + torch.arange(count) * 7919 % max(vocab_size // 2, 1)


def check(
    decoder: BorrowedDecoder, traits: DecoderTraits, dtype: torch.dtype, prompts: list[Tensor], expected: list[Tensor]
) -> None:
    """Raises CheckpointError unless the prompts, side by side in two chunks each, get the logits expected."""
    pool, tables = room_for(traits, dtype, decoder.backend.device, len(prompts), max(map(len, prompts)))
    for step in (0, 1):
        spans = [slice(*cuts[step : step + 2]) for cuts in CUTS]
        counts = [span.stop - span.start for span in spans]
        found = decoder.forward(pool, side_by_side(prompts, spans, tables)).cpu().split(counts)
        for ours, theirs, span in zip(found, expected, spans, strict=True):
            difference = (ours - theirs[span]).abs().amax(-1).median() / theirs.abs().max()
            if not difference <= BOUNDS[dtype]:
                raise CheckpointError(
                    f"over pages it computes something else than transformers alone: logits differ by {difference:.1e} "
                    f"of the largest; {BOUNDS[dtype]:g} are allowed in {str(dtype)[6:]}"
                )


def side_by_side(prompts: list[Tensor], spans: list[slice], tables: tuple[Tensor, ...]) -> StepBatch:
    """The step that computes a span of each prompt, all before it being in the pages; logits of every row."""
    positions = [torch.arange(span.start, span.stop) for span in spans]
    parts = (
        torch.cat([prompt[span] for prompt, span in zip(prompts, spans, strict=True)]),
        torch.cat(positions),
        torch.tensor([0, *map(len, positions)]).cumsum(0),
        torch.tensor([span.stop for span in spans]),
        torch.arange(sum(map(len, positions))),
    )
    *before, rows = (part.int() for part in parts)
    return StepBatch(*before, tables, rows)


def room_for(
    traits: DecoderTraits, dtype: torch.dtype, device: torch.device, sequences: int, tokens: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A pool full of NaN with a unit a page, and the page tables of so many sequences."""
    blocks, tables, used = -(-tokens // BLOCK_TOKENS), [], 0
    for group in layer_groups(traits):
        shape = (sequences, blocks, len(group.layers) * 2 * traits.num_kv_heads)
        count = shape[0] * shape[1] * shape[2]
        tables.append(torch.arange(used, used + count, dtype=torch.int32).view(shape))
        used += count
    pool = torch.full((used, BLOCK_TOKENS * traits.head_dim * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
    return pool, tuple(tables)
