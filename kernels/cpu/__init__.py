"""The decoder step in C++ on the processor's vectors: a whole forward is one call that holds no lock of Python's.

Read `layout.h` first, then `step.h`, which is the story; `linear.h` and `attention.h` are the two inner parts on top of
`precision.h` and `simd.h`. A row's result is the same to the bit whatever else is in the batch, whether it is prefilled
in chunks or decoded, and however many threads work.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels import BackendUnavailable
from kernels.cpu import binding, build
from kernels.processors import processor_count
from kernels.spec import (
    ADAPTABLE,
    DecoderTraits,
    Draws,
    LowRank,
    StepBatch,
    check_adapter,
    layer_groups,
    unkept,
    weight_shapes,
)

_HEAD_DIM_UNIT, _MOST_HEAD_DIM = 16, 512


class CpuDecoder:
    """Packed weights in memory of the library's own, with the structures that each step of this decoder refills."""

    def __init__(
        self, library: ctypes.CDLL, traits: DecoderTraits, dtype: torch.dtype, tied: bool, precision: str | None
    ):
        self.traits, self.dtype = traits, dtype
        self.handle = ctypes.c_void_p()
        given = _c_traits(traits, dtype, tied, precision)
        _raise(library.arena_decoder_open(given, ctypes.byref(self.handle)))
        weakref.finalize(self, library.arena_decoder_close, self.handle).atexit = False
        self.logits_stride = library.arena_logits_stride(self.handle)
        self.logits = torch.empty(0, self.logits_stride, dtype=torch.float32)
        self._result, self._results = self.logits, -1  # the rows of it that the last step wrote, and how many
        self.groups = len(layer_groups(traits))
        self.tables = (binding.PageTable * self.groups)()
        self._pool: Tensor | None = None
        self._batch: StepBatch | None = None
        self.step = binding.StepInput(groups=self.groups, tables=self.tables, logits_stride=self.logits_stride)

    def describe(self, pool: Tensor, batch: StepBatch) -> binding.StepInput:
        """The step's input as C sees it; valid as long as pool and batch are held. Kept, where both are the last, but
        for a batch with adapters: each of these holds its decoder, which would then hold itself."""
        if pool is not self._pool or batch is not self._batch:
            self._batch = None  # until all of it is there
            self._refill(pool, batch)
            self._pool, self._batch = pool, None if batch.adapters else batch
        return self.step

    def _refill(self, pool: Tensor, batch: StepBatch) -> None:
        step, wanted = self.step, len(batch.logit_rows)
        if wanted > len(self.logits):
            self.logits, self._results = torch.empty(wanted, self.logits_stride, dtype=torch.float32), -1
        step.pool, step.logits = pool.data_ptr(), self.logits.data_ptr()
        step.pages, step.page_bytes = pool.shape
        step.rows, step.sequences, step.wanted = len(batch.tokens), len(batch.context_lens), wanted
        step.tokens, step.positions = batch.tokens.data_ptr(), batch.positions.data_ptr()
        step.query_starts, step.context_lens = batch.query_starts.data_ptr(), batch.context_lens.data_ptr()
        step.logit_rows = batch.logit_rows.data_ptr()
        for table, pages in zip(self.tables, batch.page_tables, strict=True):
            table.pages, (_, table.blocks, table.pages_per_block) = pages.data_ptr(), pages.shape
        step.adapter_count = len(batch.adapters)
        if batch.adapters:
            step.adapters = (ctypes.c_void_p * step.adapter_count)(*(adapter.handle for adapter in batch.adapters))
            step.sequence_adapters = batch.sequence_adapters.data_ptr()

    def result(self, wanted: int) -> Tensor:
        """The logits [wanted, vocab] that a step wrote. The tensor is kept, as the next step mostly wants as many."""
        if self._results != wanted:
            self._result, self._results = self.logits[:wanted, : self.traits.vocab_size], wanted
        return self._result


class CpuAdapter:
    """The packed matrices of an adapter, and the decoder that they are added to."""

    def __init__(self, library: ctypes.CDLL, decoder: CpuDecoder, parts: Mapping[str, LowRank]):
        self.decoder, self.handle = decoder, ctypes.c_void_p()
        names = [f"layers.{i}.{target}" for i in range(decoder.traits.num_layers) for target in ADAPTABLE]
        ranks = binding.int32_array([len(parts[name].a) if name in parts else 0 for name in names])
        scales = binding.float_array([parts[name].scale if name in parts else 0 for name in names])
        _raise(library.arena_adapter_open(decoder.handle, ranks, scales, ctypes.byref(self.handle)))
        weakref.finalize(self, library.arena_adapter_close, self.handle).atexit = False
        for name, part in parts.items():
            _, layer, target = name.split(".")
            a, b = (each.to(decoder.dtype).contiguous() for each in (part.a, part.b))
            number = ADAPTABLE.index(target)
            library.arena_adapter_load(self.handle, int(layer), number, a.data_ptr(), b.data_ptr())


class CpuBackend:
    """One team of threads and its buffers; any number of decoders take turns on it, whichever threads call. One decoder
    computes for one caller at a time: its input and its logits lie in buffers of its own.

    PyTorch is left with one thread in the whole process."""

    device = torch.device("cpu")

    def __init__(self, threads: int | None = None, *, cache_folder: Path | None = None, isa: str = "native"):
        """`isa` names a lower instruction set than the processor's, for tests (build.ISA_FLAGS). Raises
        BackendUnavailable."""
        self._library = binding.open_library(build.shared_object(isa, cache_folder))
        self.threads = threads or processor_count()
        self.isa = self._library.arena_isa().decode()
        self.keeps_compact = bool(self._library.arena_keeps_compact())
        self.name = f"cpu ({self.isa}, {self.threads} threads)"
        self._engine = ctypes.c_void_p()
        if reason := self._library.arena_engine_open(self.threads, ctypes.byref(self._engine)):
            raise BackendUnavailable(f"cannot start {self.threads} threads: {reason.decode()}")
        weakref.finalize(self, self._library.arena_engine_close, self._engine).atexit = False
        torch.set_num_threads(1)  # OpenMP's go on spinning after each call, beside ours

    def unsupported(self, traits: DecoderTraits, dtype: torch.dtype, *, precision: str | None = None) -> str | None:
        if dtype not in (torch.bfloat16, torch.float32):
            return f"the CPU kernels compute in bfloat16 or float32, not {dtype}"
        if traits.head_dim % _HEAD_DIM_UNIT or traits.head_dim > _MOST_HEAD_DIM:
            return f"head_dim {traits.head_dim} is no multiple of {_HEAD_DIM_UNIT} up to {_MOST_HEAD_DIM}"
        if traits.activation not in binding.ACTIVATIONS:
            return f"activation {traits.activation!r} is none of {', '.join(binding.ACTIVATIONS)}"
        if reason := unkept(precision, dtype):
            return reason
        if precision == "compact" and not self.keeps_compact:
            return f"compact weights need a processor that multiplies bfloat16 (AVX512-BF16), this is {self.isa}"
        return None

    def pack(
        self, traits: DecoderTraits, weights: Mapping[str, Tensor], dtype: torch.dtype, *, precision: str | None = None
    ) -> CpuDecoder:
        """Reads one weight after another, so that a lazy mapping never has more than one in memory."""
        if reason := self.unsupported(traits, dtype, precision=precision):
            raise ValueError(reason)
        tied = weights["head"].data_ptr() == weights["embedding"].data_ptr()
        decoder = CpuDecoder(self._library, traits, dtype, tied, precision)
        for name, shape in weight_shapes(traits).items():
            if name == "embedding" and tied:
                continue
            weight = weights[name].to(dtype).contiguous()
            if math.prod(shape) != weight.numel():
                raise ValueError(f"weight {name} has shape {tuple(weight.shape)}, the decoder needs {shape}")
            layer, slot = (int(name.split(".")[1]), name.split(".")[2]) if name.startswith("layers.") else (0, name)
            number = binding.SLOTS.index(slot)
            _raise(self._library.arena_decoder_load(decoder.handle, layer, number, weight.data_ptr()))
        return decoder

    def pack_adapter(self, decoder: CpuDecoder, parts: Mapping[str, LowRank]) -> CpuAdapter:
        check_adapter(decoder.traits, parts)
        return CpuAdapter(self._library, decoder, parts)

    def forward(self, decoder: CpuDecoder, pool: Tensor, batch: StepBatch) -> Tensor:
        step = decoder.describe(pool, batch)
        _raise(self._library.arena_forward(self._engine, decoder.handle, ctypes.byref(step)))
        return decoder.result(step.wanted)

    def draw(self, logits: Tensor, draws: Draws) -> list[int]:
        rows, vocab = logits.shape
        if not rows:
            return []
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        settings = binding.double_array([*draws.temperature, *draws.top_p, *draws.min_p, *draws.chance])
        numbers = binding.int32_array([*draws.top_k, *[-1] * rows])  # behind them, the tokens
        column, number = ctypes.addressof(settings), ctypes.addressof(numbers)
        columns = (*range(column, column + 32 * rows, 8 * rows), number, number + 4 * rows)
        given = binding.DrawInput(logits.data_ptr(), logits.stride(0), rows, vocab, *columns)
        _raise(self._library.arena_draw(self._engine, ctypes.byref(given)))
        return numbers[rows:]

    def ops(self, decoder: CpuDecoder, pool: Tensor, batch: StepBatch) -> CpuOps:
        return CpuOps(self._library, self._engine, decoder, pool, batch)


@dataclass(frozen=True)
class CpuOps:
    """The very ops that a forward runs, one at a time on operands copied in and out; see kernels.spec.StepOps."""

    compiled: ctypes.CDLL
    engine: ctypes.c_void_p
    decoder: CpuDecoder
    pool: Tensor
    batch: StepBatch

    def embed(self) -> Tensor:
        return self._run("embed", 0, (self.decoder.traits.hidden_size,))

    def project_qkv(self, layer: int, x: Tensor) -> Tensor:
        return self._run("project_qkv", layer, (self.decoder.traits.num_heads, self.decoder.traits.head_dim), x)

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._run("write_kv", layer, (0,), None, torch.stack((k, v), dim=1))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        return self._run("attend", layer, (self.decoder.traits.num_heads, self.decoder.traits.head_dim), None, q)

    def project_output(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        return self._run("project_output", layer, (self.decoder.traits.hidden_size,), x, attended)

    def project_gate_up(self, layer: int, x: Tensor) -> Tensor:
        return self._run("project_gate_up", layer, (self.decoder.traits.intermediate_size,), x)

    def project_down(self, layer: int, x: Tensor, product: Tensor) -> Tensor:
        return self._run("project_down", layer, (self.decoder.traits.hidden_size,), x, product)

    def project_head(self, x: Tensor) -> Tensor:
        self._run("project_head", 0, (0,), x)
        return self.decoder.result(len(self.batch.logit_rows)).clone()

    def _run(self, op: str, layer: int, shape: tuple[int, ...], x: Tensor | None = None, other: Tensor | None = None):
        step = self.decoder.describe(self.pool, self.batch)
        x, other = (None if values is None else values.float().contiguous() for values in (x, other))
        result = torch.empty(step.rows, *shape, dtype=torch.float32)
        pointers = (None if values is None else values.data_ptr() for values in (x, other, result))
        number = binding.OPS.index(op)
        handle, reference = self.decoder.handle, ctypes.byref(step)
        _raise(self.compiled.arena_op(self.engine, handle, reference, number, layer, *pointers))
        return result


def _raise(message: bytes | None) -> None:
    if message:
        raise ValueError(message.decode())


def _c_traits(traits: DecoderTraits, dtype: torch.dtype, tied: bool, precision: str | None) -> binding.Traits:
    group, number = [0] * traits.num_layers, [0] * traits.num_layers
    for group_number, layers in enumerate(layer_groups(traits)):
        for i, layer in enumerate(layers.layers):
            group[layer], number[layer] = group_number, i
    ropes, half = list(dict.fromkeys(traits.layer_ropes)), traits.head_dim // 2
    return binding.Traits(
        is_bf16=dtype == torch.bfloat16,
        vocab=traits.vocab_size,
        hidden=traits.hidden_size,
        inner=traits.intermediate_size,
        heads=traits.num_heads,
        kv_heads=traits.num_kv_heads,
        head_dim=traits.head_dim,
        layers=traits.num_layers,
        ropes=len(ropes),
        activation=binding.ACTIVATIONS.index(traits.activation),
        qk_norm=traits.qk_norm,
        post_norms=traits.post_norms,
        qkv_bias=traits.qkv_bias,
        tied=tied,
        weights=binding.PRECISIONS.index(precision),
        norm_eps=traits.norm_eps,
        norm_weight_offset=traits.norm_weight_offset,
        embedding_scale=traits.embedding_scale,
        attention_scale=traits.attention_scale,
        residual_scale=traits.residual_scale,
        logit_scale=traits.logit_scale,
        attention_softcap=traits.attention_softcap or 0,
        logit_softcap=traits.logit_softcap or 0,
        window=binding.int32_array([window or 0 for window in traits.layer_windows]),
        group=binding.int32_array(group),
        group_layer=binding.int32_array(number),
        rope=binding.int32_array([ropes.index(rope) for rope in traits.layer_ropes]),
        rope_pairs=binding.int32_array([len(rope.inv_freq) for rope in ropes]),
        inv_freq=binding.float_array([value for rope in ropes for value in rope.padded(half)]),
        rope_factor=binding.float_array([rope.attention_factor for rope in ropes]),
    )
