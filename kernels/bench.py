"""`python -m kernels.bench`: times steps of a decoder's shape beside the same work in PyTorch, on random weights.

Rounds of both are interleaved and medians taken, as only ratios from one run count on a shared machine. PyTorch's part
is what a step cannot do without: its linear layers by F.linear and its attention by SDPA over contiguous KV.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from kernels import BACKENDS, BackendUnavailable, load
from kernels.pages import empty_pages
from kernels.processors import processor_count
from kernels.spec import BLOCK_TOKENS, KEPT_BYTES, DecoderTraits, RopeTraits, StepBatch, layer_groups, weight_shapes


def _rope(head_dim: int, theta: float) -> RopeTraits:
    return RopeTraits(tuple((theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)).tolist()))


SHAPES: dict[str, Callable[[], DecoderTraits]] = {
    "smollm2-135m": lambda: DecoderTraits(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        layer_windows=(None,) * 30,
        layer_ropes=(_rope(64, 100_000.0),) * 30,
        norm_eps=1e-5,
        attention_scale=64**-0.5,
    ),
    "gemma3-270m": lambda: DecoderTraits(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        layer_windows=((512,) * 5 + (None,)) * 3,
        layer_ropes=((_rope(256, 10_000.0),) * 5 + (_rope(256, 1_000_000.0),)) * 3,
        norm_eps=1e-6,
        attention_scale=256**-0.5,
        activation="gelu_tanh",
        norm_weight_offset=1.0,
        embedding_scale=640**0.5,
        qk_norm=True,
        post_norms=True,
    ),
}


@dataclass(frozen=True)
class Load:
    """`sequences` of `context` tokens, `rows` of them new in this step; the first `shared` lie in the same pages."""

    name: str
    sequences: int
    rows: int
    context: int
    shared: int = 0


LOADS = (
    Load("decode 1", 1, 1, 600),
    Load("decode 4", 4, 1, 600),
    Load("decode 16", 16, 1, 600),
    Load("decode 16, 512 shared", 16, 1, 600, 512),
    Load("decode 64, 512 shared", 64, 1, 600, 512),
    Load("decode 1 of 8192", 1, 1, 8192),
    Load("prefill 40 after 512", 1, 40, 552),
    Load("prefill 512", 1, 512, 512),
)


class OurStep:
    """A forward of the backend; pages are dealt in random order."""

    def __init__(
        self,
        backend,
        traits: DecoderTraits,
        weights,
        dtype: torch.dtype,
        page_bytes: int,
        total_pages: int,
        *,
        precision: str | None = None,
    ):
        self.backend, self.traits = backend, traits
        self.decoder = backend.pack(traits, weights, dtype, precision=precision)
        self.pool = empty_pages(total_pages, page_bytes, backend.device).zero_()
        units_per_page = page_bytes // (BLOCK_TOKENS * traits.head_dim * dtype.itemsize)
        self.pages_per_block = [
            -(-len(group.layers) * 2 * traits.num_kv_heads // units_per_page) for group in layer_groups(traits)
        ]

    def batch(self, load: Load) -> StepBatch:
        pages = random.Random(0).sample(range(len(self.pool)), len(self.pool))
        blocks, shared = -(-load.context // BLOCK_TOKENS), load.shared // BLOCK_TOKENS

        def table(width: int) -> torch.Tensor:
            def deal(count):
                return torch.tensor([[pages.pop() for _ in range(width)] for _ in range(count)], dtype=torch.int32)

            prefix = deal(shared).view(shared, width)
            return torch.stack([torch.cat((prefix, deal(blocks - shared))) for _ in range(load.sequences)])

        first, n = load.context - load.rows, load.sequences
        positions = torch.arange(first, load.context, dtype=torch.int32).repeat(n)
        return StepBatch(
            tokens=positions * 31 % self.traits.vocab_size,
            positions=positions,
            query_starts=torch.arange(n + 1, dtype=torch.int32) * load.rows,
            context_lens=torch.full((n,), load.context, dtype=torch.int32),
            page_tables=tuple(map(table, self.pages_per_block)),
            logit_rows=torch.arange(1, n + 1, dtype=torch.int32) * load.rows - 1,
        )

    def runner(self, load: Load) -> Callable[[], None]:
        batch = self.batch(load)
        return to_the_end(lambda: self.backend.forward(self.decoder, self.pool, batch), self.backend.device)


class TorchStep:
    """The linear layers and SDPA of one step, nothing between them; KV is one contiguous tensor a layer."""

    def __init__(self, traits: DecoderTraits, weights, dtype: torch.dtype, device: torch.device):
        self.traits, self.dtype, self.device = traits, dtype, device
        names = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
        self.layers = [
            [torch.cat([weights[f"layers.{i}.{name}"] for name in part]).to(device, dtype) for part in names]
            for i in range(traits.num_layers)
        ]
        self.head = weights["head"].to(device, dtype)

    def runner(self, load: Load) -> Callable[[], None]:
        traits, rows, kind = self.traits, load.sequences * load.rows, (self.device, self.dtype)
        x, wanted = (torch.randn(n, traits.hidden_size).to(*kind) for n in (rows, load.sequences))
        inner = torch.randn(rows, traits.intermediate_size).to(*kind)
        width = traits.num_heads * traits.head_dim
        contexts = [min(load.context, (window or load.context) + load.rows) for window in traits.layer_windows]
        kv = [
            torch.randn(2, load.sequences, traits.num_kv_heads, context, traits.head_dim).to(*kind)
            for context in contexts
        ]
        masks = {
            context: torch.ones(load.rows, context, dtype=torch.bool, device=self.device).tril(context - load.rows)
            for context in contexts
        }

        @torch.inference_mode()
        def run() -> None:
            for (qkv, o, gate_up, down), (k, v) in zip(self.layers, kv, strict=True):
                q = F.linear(x, qkv)[:, :width].view(load.sequences, load.rows, traits.num_heads, -1).transpose(1, 2)
                mask = None if load.rows == 1 else masks[k.shape[2]]
                attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
                F.linear(attended.transpose(1, 2).reshape(rows, width), o)
                F.linear(x, gate_up)
                F.linear(inner, down)
            F.linear(wanted, self.head)

        return to_the_end(run, self.device)


def to_the_end(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run`, until the device is done with it."""
    if device.type != "cuda":
        return run

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize(device)

    return run_and_wait


def timed(runners: list[Callable[[], None]], seconds: float) -> list[float]:
    """Median seconds of each; they take turns of a quarter of a second, the first call of which does not count.

    Not call by call: OpenMP's threads, PyTorch's among them, go on spinning for a while after each call.
    """
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for runner, samples in zip(runners, times, strict=True):
            runner()
            turn_end = time.perf_counter() + 0.25
            while time.perf_counter() < turn_end:
                started = time.perf_counter()
                runner()
                samples.append(time.perf_counter() - started)
    return [median(samples) for samples in times]


def machine_limits(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """GFLOP/s of a 2048^3 product in `dtype` and GB/s of a sum over 512 MiB, both by PyTorch."""
    a, b = torch.randn(2, 2048, 2048).to(device, dtype)
    memory = torch.ones(2**27, device=device)
    product, total = timed([to_the_end(work, device) for work in (lambda: torch.mm(a, b), lambda: memory.sum())], 1.5)
    return 2 * 2048**3 / product / 1e9, memory.nbytes / total / 1e9


def work(traits: DecoderTraits, load: Load, itemsize: int, *, precision: str | None = None) -> tuple[float, float]:
    """Arithmetic (FLOP) and memory (bytes of weights and KV, each read once) that a step cannot do without."""
    matrices = [
        shape for name, shape in weight_shapes(traits).items() if len(shape) == 2 and name not in ("embedding", "head")
    ]
    linear = sum(outputs * inputs for outputs, inputs in matrices)
    head, rows = traits.vocab_size * traits.hidden_size, load.sequences * load.rows
    flop, memory = 2.0 * (linear * rows + head * load.sequences), float((linear + head) * itemsize)
    if precision:
        memory = float(sum(starmap(KEPT_BYTES[precision], (*matrices, (traits.vocab_size, traits.hidden_size)))))
    for window in traits.layer_windows:
        seen = [min(p + 1, window or p + 1) for p in range(load.context - load.rows, load.context)]
        flop += 4.0 * traits.num_heads * traits.head_dim * sum(seen) * load.sequences
        tokens = min(load.context, (window or load.context) + load.rows - 1)
        kept = max(0, min(load.shared, load.shared - load.context + tokens))
        stored = load.sequences * (tokens - kept) + kept
        memory += stored * 2.0 * traits.num_kv_heads * traits.head_dim * itemsize
    return flop, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    parser.add_argument("--shape", default="smollm2-135m", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--precision", choices=KEPT_BYTES, help="of our weights; PyTorch's stay as they are")
    parser.add_argument("--threads", type=int, help="default: one for each processor")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each load, both sides together")
    parser.add_argument("--only", default="", help="loads whose name contains this")
    options = parser.parse_args()

    dtype, traits, precision = getattr(torch, options.dtype), SHAPES[options.shape](), options.precision
    try:
        backend = load(options.backend, options.threads)
    except BackendUnavailable as reason:
        parser.exit(2, f"{parser.prog}: {reason}\n")
    if reason := backend.unsupported(traits, dtype, precision=precision):
        parser.exit(2, f"{parser.prog}: {reason}\n")
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(s, generator=generator) * 0.02 for name, s in weight_shapes(traits).items()}
    weights["head"] = weights["embedding"]
    torch.set_num_threads(options.threads or processor_count())
    page_bytes = 12 * BLOCK_TOKENS * 64 * dtype.itemsize
    ours = OurStep(backend, traits, weights, dtype, page_bytes, 12_000, precision=precision)
    theirs = TorchStep(traits, weights, dtype, backend.device)
    flops, bandwidth = machine_limits(dtype, backend.device)

    print(f"{_processor()}; {backend.name}; torch {torch.__version__} with {torch.get_num_threads()} threads")
    kind = f"{options.dtype}, {precision} weights" if precision else options.dtype
    print(f"{options.shape}, {kind}; PyTorch multiplies at {flops:.0f} GFLOP/s, reads {bandwidth:.0f} GB/s")
    print(f"\n| {'load':<22} | ms | tokens/s | torch's linear + SDPA, ms | times as fast | GFLOP/s | GB/s |")
    print("|---|---|---|---|---|---|---|")
    for one in LOADS:
        if options.only not in one.name:
            continue
        mine, other = timed([ours.runner(one), theirs.runner(one)], options.seconds)
        flop, memory = work(traits, one, dtype.itemsize, precision=precision)
        tokens = one.sequences * one.rows / mine
        print(
            f"| {one.name:<22} | {mine * 1e3:.2f} | {tokens:.0f} | {other * 1e3:.2f} | {other / mine:.2f} "
            f"| {flop / mine / 1e9:.0f} | {memory / mine / 1e9:.1f} |",
            flush=True,
        )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
