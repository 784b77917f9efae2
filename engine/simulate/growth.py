"""How the cost of a step grows: with sequences, context, models, cached blocks, and pages that lie apart.

One step is timed in its parts: what scheduler and pool do in Python, and the forward with its kernels. Sequences are
brought to their context without computing it: their KV is zeros, which costs a step as much as any other.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from engine.architectures import Runner
from engine.batch import build_batch
from engine.config import EngineConfig
from engine.kv.geometry import blocks_of, default_page_bytes
from engine.kv.pool import PagePool
from engine.kv.reserved import kv_manager
from engine.scheduler import Scheduler, Step
from engine.sequence import Sequence
from engine.simulate.real import CLOCKS, Clock, load_runner
from engine.simulate.report import Table

CONTEXT = 8192
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8128)
STEPS = 24  # timed, after
WARM_UP = 4  # that are not
ROOM = 64  # tokens that a sequence may grow
COLUMNS = ("sequences", "context", "models", "cached blocks", "pages", "step ms", "Python ms", "Python %", "tokens/s")


class Stepper:
    """`models` checkpoints (the same weights, kept apart) with `sequences` in all, each at `context` tokens, in a pool
    with `cached_blocks` more that hold old prefixes."""

    def __init__(
        self,
        runner: Runner,
        *,
        sequences: int,
        context: int,
        models: int = 1,
        cached_blocks: int = 0,
        policy: str = "paged",
        scattered: bool = False,
        clock: Clock = CLOCKS["wall"],
    ) -> None:
        self.runner = runner
        self._clock = clock
        page_bytes = default_page_bytes(runner.dtype.itemsize)
        bundle = sum(group.pages_per_block(page_bytes) for group in runner.geometry.groups)
        blocks = (blocks_of(context + ROOM) + 1) * sequences * (2 if policy != "paged" else 1)
        total = int(1.02 * (blocks + cached_blocks) * bundle) + bundle
        order = np.random.default_rng(0).permutation(total) if scattered else None
        self.pool = PagePool(total, page_bytes, order)
        self.pool.memory.zero_()
        budget = sequences * context  # all are brought to their context in one step
        self.kv = kv_manager(policy, self.pool, chunk_tokens=budget)
        self.scheduler = Scheduler(
            self.kv, max_sequences=sequences, max_batch_tokens=budget, prefill_tokens_beside_decodes=budget
        )
        self.spaces = [
            self.kv.add_checkpoint(f"{runner.digest} {number}", runner.geometry, context + ROOM)
            for number in range(models)
        ]
        self._tokens = np.random.default_rng(1)
        if cached_blocks:
            self._fill_cache(cached_blocks)
        for number in range(sequences):
            self.scheduler.add(self._sequence(self.spaces[number % models], context, ROOM))
        for _ in self.spaces:
            self._commit(self.scheduler.schedule(), [])

    def step(self) -> tuple[float, float, int]:
        """Seconds of the whole step and of all but its forward and draw, and the tokens it generated."""
        began = self._clock()
        step = self.scheduler.schedule()
        batch = build_batch(step)
        ready = self._clock()
        drawn = self.runner.forward(self.pool.memory, batch).argmax(-1).tolist()
        computed = self._clock()
        self._commit(step, drawn)
        ended = self._clock()
        return ended - began, ended - began - (computed - ready), len(step.sequences)

    def measure(self, steps: int = STEPS) -> tuple[float, float, float]:
        """Of the median step: ms, ms of Python, tokens a second."""
        for _ in range(WARM_UP):
            self.step()
        whole, python, tokens = zip(*(self.step() for _ in range(steps)), strict=True)
        return 1e3 * statistics.median(whole), 1e3 * statistics.median(python), sum(tokens) / sum(whole)

    def _commit(self, step: Step, drawn: list[int]) -> None:
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            self.kv.commit(sequence, count)
            if sequence.computed == sequence.length:
                sequence.append(drawn.pop(0) if drawn else 1)

    def _sequence(self, space, context: int, more: int) -> Sequence:
        return Sequence(space, self._tokens.integers(1000, 40_000, context, dtype=np.int32), more)

    def _fill_cache(self, blocks: int) -> None:
        """Leaves so many blocks published and released."""
        size = self.spaces[0].block_tokens
        sequence = self._sequence(self.spaces[0], blocks * size, 0)
        self.kv.admit(sequence, alone=True)
        self.kv.grow(sequence, sequence.uncomputed)
        self.kv.commit(sequence, sequence.uncomputed)
        self.kv.release(sequence)


Case = dict[str, int | str | bool]
PARTS: dict[str, list[Case]] = {
    "sequences": [{"sequences": count, "context": 512} for count in SEQUENCES],
    "contexts": [{"sequences": 8, "context": context} for context in CONTEXTS],
    "models": [{"sequences": 16, "context": 512, "models": models} for models in (1, 2, 3, 4)],
    "overhead": [{"sequences": 64, "context": 512, "cached_blocks": blocks} for blocks in (0, 100, 1000, 4000)],
    "layout": [
        {"sequences": 16, "context": 600, "policy": "oracle"},
        {"sequences": 16, "context": 600, "policy": "paged", "scattered": True},
    ],
}
X_AXIS = {"sequences": "sequences", "contexts": "context", "models": "models", "overhead": "cached_blocks"}


def measure(config: EngineConfig, options: argparse.Namespace) -> Table:
    """All parts, or the one asked for."""
    runner = load_runner(config, CONTEXT)
    parts = [options.part] if options.part else list(PARTS)
    document = {
        part: (in_turns if part == "layout" else table_of)(part, runner, CLOCKS[options.clock]) for part in parts
    }
    rows = [row for part in parts for row in map(cells, document[part])]
    curves = {part: [(row[X_AXIS[part]], row["step_ms"]) for row in document[part]] for part in parts if part in X_AXIS}
    return Table(
        f"A decode step of SmolLM2-135M, {runner.dtype}",
        COLUMNS,
        rows,
        document,
        (
            f"{runner.backend.name}, {options.clock} time",
            f"median of {STEPS} steps; Python: schedule, batch and commit, which is scheduler and pool",
            "models: copies of one checkpoint that share nothing but the weights in memory; each step is one model's",
        ),
        curves={parts[0]: curves[parts[0]]} if parts[0] in curves else {},
        bars={} if parts[0] in curves else {pages_of(row): {"ms a step": row["step_ms"]} for row in document[parts[0]]},
        axes=(X_AXIS.get(parts[0], ""), "ms a step"),
    )


def table_of(part: str, runner: Runner, clock: Clock) -> list[dict]:
    return [result(case, *Stepper(runner, clock=clock, **case).measure()) for case in PARTS[part]]


def in_turns(part: str, runner: Runner, clock: Clock) -> list[dict]:
    """Contiguous KV and pages that lie anywhere, step by step in turns: what else the machine does hits both."""
    steppers = [Stepper(runner, clock=clock, **case) for case in PARTS[part]]
    found = [[] for _ in steppers]
    for _ in range(40):
        for each, stepper in zip(found, steppers, strict=True):
            each.append(stepper.step())
    results = []
    for case, steps in zip(PARTS[part], found, strict=True):
        whole, python, tokens = zip(*steps[WARM_UP:], strict=True)
        medians = 1e3 * statistics.median(whole), 1e3 * statistics.median(python)
        results.append(result(case, *medians, sum(tokens) / sum(whole)))
    return results


def result(case: Case, milliseconds: float, python: float, tokens_per_second: float) -> dict:
    defaults = {"models": 1, "cached_blocks": 0, "policy": "paged", "scattered": False}
    return {
        **defaults,
        **case,
        "step_ms": round(milliseconds, 3),
        "python_ms": round(python, 3),
        "python_percent": round(100 * python / milliseconds, 2),
        "tokens_per_second": round(tokens_per_second, 1),
    }


def cells(row: dict) -> tuple:
    keys = ("step_ms", "python_ms", "python_percent", "tokens_per_second")
    shape = (row["sequences"], row["context"], row["models"], row["cached_blocks"], pages_of(row))
    return (*shape, *(row[key] for key in keys))


def pages_of(row: dict) -> str:
    return "scattered" if row["scattered"] else "contiguous" if row["policy"] != "paged" else "in order"
