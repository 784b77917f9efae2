"""Compiles every kernel for real chips, without one: `python -m kernels.triton.compile_ahead [--json]`.

Signatures and attributes are those of a run: pointers of 16 bytes' alignment, integers that a launch specialises when
16 divides them. Each row says what ptxas used for one kernel at one model's shapes; a spill to local memory or more
shared memory than the chip has is an error, and the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from kernels.triton import attention, elementwise
from kernels.triton.plan import BLOCK_KEYS, SPAN, attention_options, decode_rows, prefill_rows

CHIPS = {"sm_80": (80, 163 * 1024), "sm_90": (90, 227 * 1024), "sm_100": (100, 227 * 1024)}  # capability, shared bytes
PAGE_BYTES = 8192
DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model, in bf16 pages."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    window: int = 0
    qk_norm: bool = False
    post_norms: bool = False
    gelu: bool = False
    bias: bool = False
    softcap: float = 0.0
    pairs: int | None = None  # of dimensions that turn; None: all
    hidden: int = 1024


SHAPES = {
    "SmolLM2-135M": Shape(9, 3, 64, 30, hidden=576),
    "Gemma-3-270m": Shape(4, 1, 256, 18, window=512, qk_norm=True, post_norms=True, gelu=True, hidden=640),
    "Gemma-2-2B": Shape(8, 4, 256, 26, window=4096, softcap=50.0, post_norms=True, gelu=True, hidden=2304),
    "Phi-2": Shape(32, 32, 80, 32, bias=True, hidden=2560),
    "Phi-3-mini": Shape(32, 32, 96, 32, hidden=3072),
    "Phi-4-mini": Shape(24, 8, 128, 32, pairs=48, hidden=3072),
    "Llama-3-8B": Shape(32, 8, 128, 32, hidden=4096),
}


@dataclass(frozen=True)
class Compiled:
    kernel: str
    model: str
    chip: str
    registers: int
    shared_bytes: int
    spilled_bytes: int

    @property
    def fits(self) -> bool:
        return self.spilled_bytes == 0 and self.shared_bytes <= CHIPS[self.chip][1]


def kernels(shape: Shape) -> Iterator[tuple[str, triton.JITFunction, dict[str, str], dict]]:
    """Name, function, argument types (an integer that 16 divides ends in :16) and constants of each launch."""
    unit_elements = 16 * shape.head_dim
    units_per_page = PAGE_BYTES // 2 // unit_elements
    dims = dict(DIM=shape.head_dim, PADDED_DIM=triton.next_power_of_2(shape.head_dim))
    pages = dict(
        UNITS_PER_PAGE=units_per_page,
        PAGE_ELEMENTS=PAGE_BYTES // 2,
        PAGES_PER_BLOCK=-(-shape.layers * 2 * shape.kv_heads // units_per_page),
    )
    group = shape.heads // shape.kv_heads
    attend = dict(
        q="*bf16", output="*bf16", part_maximum="*fp32", part_sum="*fp32", part_output="*fp32", pool="*bf16",
        table="*i32", tile_sequence="*i32", tile_start="*i32", query_starts="*i32", context_lens="*i32",
        scale="fp32", unit="i32", table_stride="i32", spans="i32",
    )  # fmt: skip
    for name, rows, split in (
        ("decode", decode_rows(group), True),
        ("prefill", prefill_rows(group, shape.head_dim), False),
    ):
        for window in {0, shape.window}:
            constants = dict(
                KV_HEADS=shape.kv_heads, GROUP=group, **dims, **pages, WINDOW=window, SOFTCAP=shape.softcap,
                BLOCK_ROWS=rows, BLOCK_KEYS=BLOCK_KEYS, SPAN=SPAN, SPLIT=split, UPCAST=False,
            )  # fmt: skip
            label = f"paged_attention, {name}" + (f", window {window}" if window else "")
            yield label, attention.paged_attention, attend, constants | attention_options(rows, dims["PADDED_DIM"])
    merge = dict(
        output="*bf16", part_maximum="*fp32", part_sum="*fp32", part_output="*fp32",
        tile_sequence="*i32", query_starts="*i32", context_lens="*i32", spans="i32",
    )  # fmt: skip
    yield "merge_spans", attention.merge_spans, merge, dict(HEADS=shape.heads, **dims, num_warps=1)
    norm = dict(
        x="*fp32", added="*fp32", added_weight="*fp32", weight="*fp32", normed="*bf16", source_rows="*i32",
        width="i32:16", eps="fp32", weight_offset="fp32", residual_scale="fp32",
    )  # fmt: skip
    block = triton.next_power_of_2(shape.hidden)
    flags = dict(ADD=True, NORM_ADDED=shape.post_norms, NORM=True, GATHER=False, BLOCK=block)
    yield "add_rms_norm", elementwise.add_rms_norm, norm, flags
    rotate = dict(
        qkv="*fp32", bias="*fp32", q_norm="*fp32", k_norm="*fp32", angles="*fp32", q="*bf16", pool="*bf16",
        table="*i32", positions="*i32", row_sequence="*i32", unit="i32", rope="i32", table_stride="i32",
        eps="fp32", weight_offset="fp32",
    )  # fmt: skip
    yield "rotate_and_write_kv", elementwise.rotate_and_write_kv, rotate, dict(
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, DIM=shape.head_dim,
        PADDED_HALF=triton.next_power_of_2(shape.head_dim // 2), ROPES=1 + bool(shape.window),
        PAIRS=shape.head_dim // 2 if shape.pairs is None else shape.pairs, **pages,
        BIAS=shape.bias, QK_NORM=shape.qk_norm, num_warps=1,
    )  # fmt: skip
    write = dict(
        kv="*bf16", pool="*bf16", table="*i32", positions="*i32", row_sequence="*i32", unit="i32", table_stride="i32"
    )
    yield "write_kv", elementwise.write_kv, write, dict(HEADS=2 * shape.kv_heads, **dims, **pages, num_warps=1)
    gate = dict(gate_up="*fp32", product="*bf16", width="i32:16")
    yield "gated_activation", elementwise.gated_activation, gate, dict(GELU=shape.gelu, BLOCK=1024)
    copy = dict(words="*i32", sources="*i32", targets="*i32", page_words="i32:16")
    yield "copy_pages", elementwise.copy_pages, copy, dict(BLOCK=1024)


def compile_one(fn: triton.JITFunction, types: dict[str, str], constants: dict, chip: str):
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    place = {name: (number,) for number, name in enumerate(fn.arg_names)}
    divisible = [name for name, kind in types.items() if kind.startswith("*") or kind.endswith(":16")]
    source = ASTSource(
        fn=fn,
        signature={name: kind.split(":")[0] for name, kind in types.items()} | dict.fromkeys(constants, "constexpr"),
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: DIVISIBLE for name in divisible},
    )
    return compile_kernel(source, target=GPUTarget("cuda", CHIPS[chip][0], 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of local memory it spills to, as cuobjdump reads them from the machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def compile_all(models: list[str], chips: list[str]) -> Iterator[Compiled]:
    for model in models:
        for name, fn, types, constants in kernels(SHAPES[model]):
            for chip in chips:
                made = compile_one(fn, types, dict(constants), chip)
                registers, spilled = resources(made.asm["cubin"])
                yield Compiled(name, model, chip, registers, made.metadata.shared, spilled)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.compile_ahead", description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="default: all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = list(compile_all(arguments.model or list(SHAPES), arguments.chip or list(CHIPS)))
    if arguments.json:
        print(json.dumps([asdict(each) | {"fits": each.fits} for each in found]))
    else:
        print("| kernel | model | chip | registers | shared bytes | spilled bytes |\n|---|---|---|---|---|---|")
        for each in found:
            print("|", " | ".join(map(str, asdict(each).values())), "|")
    return not all(each.fits for each in found)


if __name__ == "__main__":
    sys.exit(main())
