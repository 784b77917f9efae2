"""One command for a machine with an NVIDIA GPU: `python -m tests.gpu.check [--checkpoint FOLDER] [--json]`.

Checks every Triton op and a whole model against the reference, and decodes beside a thread that loads, then times paged
attention beside attention over contiguous memory and beside the memory's bandwidth, and decode steps with and without
CUDA graphs. No number is printed for what disagrees; the exit status is 1 then. Works with torch 2.11 to 2.13 and
Triton 3.6 to 3.8; about two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from engine.architectures.runner import load_checkpoint
from kernels.reference import ReferenceBackend
from kernels.spec import BLOCK_TOKENS, DecoderTraits, StepBatch, layer_groups
from kernels.triton import TritonBackend
from tests.kernels.comparison import PAST, STEP, TRAITS, differences
from tests.kernels.decoders import llama_traits, random_weights, rope

BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
PAGE_BYTES = 8192
SMOLLM2 = llama_traits(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3,
    layer_windows=(None,) * 30, layer_ropes=(rope(64, 100_000.0),) * 30,
)  # fmt: skip
LLAMA_3_8B_LAYER = llama_traits(
    vocab_size=1024, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    layer_windows=(None,), layer_ropes=(rope(128, 500_000.0),),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table; `ours` and `other` are what `unit` says, `other` being what it is compared with."""

    what: str
    ours: float
    other: float
    unit: str
    right: bool = True

    @property
    def ratio(self) -> float:
        return self.ours / self.other if self.other else float("nan")


# ------------------------------------------------------------------------------------------------------------ values


def check_ops(backend: TritonBackend) -> Iterator[Row]:
    for name, traits in TRAITS.items():
        for dtype, bound in BOUNDS.items():
            found = differences(backend, traits, dtype, past=PAST, step=STEP, past_by=ReferenceBackend())
            op, worst = max(found.items(), key=lambda item: item[1])
            yield Row(f"ops, {name}, {str(dtype)[6:]}: worst is {op}", worst, bound, "difference", worst <= bound)


def check_model(backend: TritonBackend, checkpoint: Path | None, tokens: int = 64) -> Iterator[Row]:
    """Greedy tokens in fp32, alone and by graphs, against the reference; a first difference is a failure."""
    answers = []
    for each in (backend, ReferenceBackend()):
        if checkpoint:
            runner = load_checkpoint(checkpoint, dtype=torch.float32, backend=each, progress=lambda *counts: None)
            traits, decoder = runner.traits, runner.decoder
        else:
            traits, decoder = SMOLLM2, each.pack(SMOLLM2, random_weights(SMOLLM2), torch.float32)
        prompts = [[(7 * i + s) % traits.vocab_size for i in range(length)] for s, length in enumerate((5, 40, 130))]
        answers.append(greedy(each, traits, decoder, prompts, tokens))
    same = sum(a == b for ours, theirs in zip(*answers, strict=True) for a, b in zip(ours, theirs, strict=True))
    what = "greedy tokens of " + (checkpoint.name if checkpoint else "random weights of SmolLM2's shape") + ", fp32"
    yield Row(what, same, 3 * tokens, "equal tokens", same == 3 * tokens)


def greedy(backend, traits: DecoderTraits, decoder, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    memory = Memory(traits, torch.float32, len(prompts), max(map(len, prompts)) + tokens, backend.device)
    answers: list[list[int]] = [[] for _ in prompts]
    batch = memory.step(prompts, [0] * len(prompts))
    for _ in range(tokens):
        best = backend.forward(decoder, memory.pool, batch).argmax(-1).tolist()
        for answer, token in zip(answers, best, strict=True):
            answer.append(token)
        done = [len(p) + len(a) - 1 for p, a in zip(prompts, answers, strict=True)]
        batch = memory.step([[token] for token in best], done)
    return answers


def check_company(
    backend: TritonBackend,
    traits: DecoderTraits = SMOLLM2,
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16),
    rounds: int = 10,
) -> Iterator[Row]:
    """Decodes of sizes that no graph was made for yet, while another thread takes memory on the device and copies to
    it, as one that loads a model does. Neither may fail, and the tokens stay those of decodes without company."""
    weights, problems, done = random_weights(traits), [], threading.Event()

    def load() -> None:
        try:
            for number in itertools.count(1):
                if done.is_set():
                    return
                torch.empty(number % 97 * 2**20, dtype=torch.uint8, device=backend.device)
                torch.empty(number % 89 * 2**18, dtype=torch.uint8).to(backend.device)
                torch.cuda.empty_cache()
        except Exception as problem:
            problems.append(problem)

    def decode() -> list[list[list[int]]]:
        decoder = backend.pack(traits, weights, torch.float32)  # without graphs
        answers = [greedy(backend, traits, decoder, [[1 + s] for s in range(size)], 2) for size in sizes]
        if not all(decoder.graphs.made.values()):
            raise RuntimeError("a graph could not be made")
        return answers

    alone, same = decode(), 0
    loader = threading.Thread(target=load)
    loader.start()
    try:
        for _ in range(rounds):
            same += decode() == alone
    except Exception as problem:
        problems.append(problem)
    finally:
        done.set()
        loader.join()
    what = "decodes while another thread loads" + "".join(f"; {problem}" for problem in problems)
    yield Row(what, same, rounds, "equal rounds", same == rounds and not problems)


class Memory:
    """A pool with room for some sequences of one length, their pages shuffled."""

    def __init__(self, traits: DecoderTraits, dtype: torch.dtype, sequences: int, length: int, device: torch.device):
        unit_bytes = BLOCK_TOKENS * traits.head_dim * dtype.itemsize
        units_per_page, blocks = PAGE_BYTES // unit_bytes, -(-length // BLOCK_TOKENS)
        shapes = []
        for group in layer_groups(traits):
            pages = -(-len(group.layers) * 2 * traits.num_kv_heads // units_per_page)
            shapes.append((sequences, blocks, pages))
        sizes = [math.prod(shape) for shape in shapes]
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0)).int()
        self.tables = [ids.view(shape) for ids, shape in zip(order.split(sizes), shapes, strict=True)]
        self.pool = torch.zeros(len(order), PAGE_BYTES, dtype=torch.uint8, device=device)

    def step(self, tokens: list[list[int]], first: list[int]) -> StepBatch:
        """The next tokens of each sequence, `first` being the position of the first of them; the last logits wanted."""
        counts = torch.tensor([len(each) for each in tokens])
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
        positions = [f + i for f, each in zip(first, tokens, strict=True) for i in range(len(each))]
        return StepBatch(
            tokens=torch.tensor([token for each in tokens for token in each], dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            query_starts=starts,
            context_lens=torch.tensor([f + len(each) for f, each in zip(first, tokens, strict=True)]).int(),
            page_tables=tuple(self.tables),
            logit_rows=starts[1:] - 1,
        )


# ------------------------------------------------------------------------------------------------------------- times


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes: the limit of a decode's attention."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: target.copy_(source)) * 1e-3)


def time_attention(backend: TritonBackend, limit: float) -> Iterator[Row]:
    """One layer of Llama-3-8B's shape in bf16: decodes and a prefill, beside flash attention over contiguous KV."""
    traits, dtype = LLAMA_3_8B_LAYER, torch.bfloat16
    decoder = backend.pack(traits, random_weights(traits), dtype)
    heads, kv_heads, dim = traits.num_heads, traits.num_kv_heads, traits.head_dim
    for sequences, context, rows in ((1, 8192, 1), (16, 2048, 1), (64, 2048, 1), (256, 1024, 1), (1, 4096, 4096)):
        memory = Memory(traits, dtype, sequences, context, backend.device)
        memory.pool.view(dtype).normal_()
        ops = backend.ops(decoder, memory.pool, memory.step([[1] * rows] * sequences, [context - rows] * sequences))
        q = torch.randn(sequences * rows, heads, dim, dtype=dtype, device=backend.device)
        ours = do_bench(lambda ops=ops, q=q: ops.attend(0, q))
        k, v = (torch.randn(sequences, kv_heads, context, dim, dtype=dtype, device=backend.device) for _ in range(2))
        queries = q.view(sequences, rows, heads, dim).transpose(1, 2)

        def contiguous(queries=queries, k=k, v=v, causal=rows > 1):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
                return F.scaled_dot_product_attention(queries, k, v, is_causal=causal, enable_gqa=True)

        label = f"attention, {sequences} x {rows} rows, context {context}"
        yield Row(f"{label}, beside SDPA on contiguous memory", ours, do_bench(contiguous), "ms")
        if rows == 1:
            moved = 2 * sequences * context * kv_heads * dim * dtype.itemsize
            yield Row(f"{label}, beside the bandwidth", ours, moved / limit * 1e3, "ms")


def time_steps(backend: TritonBackend) -> Iterator[Row]:
    """Decodes of SmolLM2's shape at context 600, replayed as a graph beside launched one by one."""
    decoder = backend.pack(SMOLLM2, random_weights(SMOLLM2), torch.bfloat16)
    plain = TritonBackend(graphs=False)
    for sequences in (1, 16, 64, 256):
        memory = Memory(SMOLLM2, torch.bfloat16, sequences, 601, backend.device)
        batch = memory.step([[1]] * sequences, [600] * sequences)
        times = [
            do_bench(lambda one=one, m=memory, b=batch: one.forward(decoder, m.pool, b)) for one in (backend, plain)
        ]
        yield Row(f"decode step, {sequences} sequences, graph beside launches", *times, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="a folder in the Hugging Face layout; else random weights")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    backend = TritonBackend()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    rows = [*check_ops(backend), *check_model(backend, arguments.checkpoint), *check_company(backend)]
    if all(row.right for row in rows):
        limit = bandwidth(backend.device)
        machine += f", copy {limit / 1e9:,.0f} GB/s"
        rows += [*time_attention(backend, limit), *time_steps(backend)]
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}))
    else:
        print(machine)
        for row in rows:
            verdict = "" if row.right else "  WRONG"
            print(f"{row.what:<90} {row.ours:>12.5g} {row.other:>12.5g} {row.unit:<12} x{row.ratio:.3f}{verdict}")
    return not all(row.right for row in rows)


if __name__ == "__main__":
    sys.exit(main())
