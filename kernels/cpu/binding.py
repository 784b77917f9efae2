"""The C interface of kernels.cpp, field by field as layout.h has it. Calls release the interpreter's lock."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from kernels import BackendUnavailable

ACTIVATIONS = ("silu", "gelu_tanh")
PRECISIONS = (None, "int8", "compact")  # of weights, in the order of layout.h
SLOTS = (
    "embedding",
    "final_norm",
    "head",
    "attention_norm",
    "q",
    "k",
    "v",
    "q_bias",
    "k_bias",
    "v_bias",
    "q_norm",
    "k_norm",
    "o",
    "post_attention_norm",
    "mlp_norm",
    "gate",
    "up",
    "down",
    "post_mlp_norm",
)
OPS = (
    "embed",
    "project_qkv",
    "attend",
    "project_output",
    "project_gate_up",
    "project_down",
    "project_head",
    "write_kv",
)


def _int32s(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int32) for name in names]


class Traits(Structure):
    _fields_ = (
        *_int32s("is_bf16", "vocab", "hidden", "inner", "heads", "kv_heads", "head_dim", "layers", "ropes"),
        *_int32s("activation", "qk_norm", "post_norms", "qkv_bias", "tied", "weights"),
        ("norm_eps", c_float),
        ("norm_weight_offset", c_float),
        ("embedding_scale", c_float),
        ("attention_scale", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("attention_softcap", c_float),
        ("logit_softcap", c_float),
        *((name, POINTER(c_int32)) for name in ("window", "group", "group_layer", "rope", "rope_pairs")),
        ("inv_freq", POINTER(c_float)),
        ("rope_factor", POINTER(c_float)),
    )


class PageTable(Structure):
    _fields_ = (("pages", c_void_p), *_int32s("blocks", "pages_per_block"))


class StepInput(Structure):
    _fields_ = (
        ("pool", c_void_p),
        ("pages", c_int64),
        ("page_bytes", c_int64),
        *_int32s("rows", "sequences", "wanted", "groups"),
        *((name, c_void_p) for name in ("tokens", "positions", "query_starts", "context_lens", "logit_rows")),
        ("tables", POINTER(PageTable)),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("adapters", POINTER(c_void_p)),
        ("sequence_adapters", c_void_p),
        ("adapter_count", c_int64),
    )


class DrawInput(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        *_int32s("rows", "vocab"),
        *((name, c_void_p) for name in ("temperature", "top_p", "min_p", "chance", "top_k", "tokens")),
    )


def int32_array(values) -> ctypes.Array:
    return (c_int32 * len(values))(*values)


def float_array(values) -> ctypes.Array:
    return (c_float * len(values))(*values)


def double_array(values) -> ctypes.Array:
    return (c_double * len(values))(*values)


def open_library(path: Path) -> ctypes.CDLL:
    """The library with its argument types declared. Raises BackendUnavailable where the system does not load it."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # such as a file system on which nothing may be executed; names the path
        raise BackendUnavailable(f"the compiled kernels cannot be loaded: {error}") from error
    for name, result, arguments in (
        ("arena_isa", c_char_p, ()),
        ("arena_keeps_compact", c_int, ()),
        ("arena_engine_open", c_char_p, (c_int, POINTER(c_void_p))),
        ("arena_engine_close", None, (c_void_p,)),
        ("arena_decoder_open", c_char_p, (POINTER(Traits), POINTER(c_void_p))),
        ("arena_decoder_close", None, (c_void_p,)),
        ("arena_decoder_load", c_char_p, (c_void_p, c_int, c_int, c_void_p)),
        ("arena_adapter_open", c_char_p, (c_void_p, POINTER(c_int32), POINTER(c_float), POINTER(c_void_p))),
        ("arena_adapter_close", None, (c_void_p,)),
        ("arena_adapter_load", None, (c_void_p, c_int, c_int, c_void_p, c_void_p)),
        ("arena_logits_stride", c_int64, (c_void_p,)),
        ("arena_forward", c_char_p, (c_void_p, c_void_p, POINTER(StepInput))),
        ("arena_draw", c_char_p, (c_void_p, POINTER(DrawInput))),
        (
            "arena_op",
            c_char_p,
            (c_void_p, c_void_p, POINTER(StepInput), c_int, c_int, c_void_p, c_void_p, c_void_p),
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
