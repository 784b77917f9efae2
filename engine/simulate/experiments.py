"""The experiments of the paper, each beside what the paper prints. What the paper leaves open is said, not tuned.

Every experiment is a list of runs (one simulation each, spread over the processors) and what their figures are called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.kv.reserved import POLICIES
from engine.simulate.machines import MACHINES
from engine.simulate.report import Table
from engine.simulate.simulation import MAX_SEQUENCES, Ask, Figures, Simulation, asks_of
from engine.simulate.traces import TRACES, arrivals, lengths
from kernels.processors import processor_count

PART_REQUESTS = 20_000
WARM_UP = 0.1  # share of the requests that are answered before anything counts

FIG2 = {  # percent of the pool; external and whatever else holds no token
    "max": {"token": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
    "pow2": {"token": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "oracle": {"token": 38.2, "reserved": 25.2, "internal": 0.0, "external": 36.6},
    "paged": {"token": 96.3},
}
FIG13 = {  # mean sequences in a step
    "sharegpt": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42},  # at 2 requests/s
    "alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44},  # at 30 requests/s
}
FIG15 = {  # percent of blocks saved, by answers to a prompt, and by beams
    "alpaca": {2: 6.09, 4: 8.53, 6: 9.79},
    "sharegpt": {2: 16.2, 6: 30.5},
}
FIG15_BEAMS = {
    "alpaca": {2: 37.6, 6: 55.2},
    "sharegpt": {2: 44.3, 6: 66.3},
}
BEAM_TURNOVER = 0.16  # share of the beams that a step drops
BEAMS_ASSUMED = (
    f"a step drops {BEAM_TURNOVER:.0%} of the beams for second continuations of others, as beam searches of "
    "SmolLM2-135M do in this engine (docs/paper.md)"
)
FIG16 = {80: 1.67, 341: 3.58}  # by prefix tokens: requests/s of vLLM over those of Orca (Oracle)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Run:
    machine: str = "opt-13b"
    trace: str = "sharegpt"
    policy: str = "paged"
    requests: int = 3000
    rate: float | None = None  # requests a second; None: the queue is never empty
    block_tokens: int = 16
    prefix_tokens: int = 0
    samples: int = 1
    turnover: float | None = None  # of beams, which the samples then are
    seed: int = 0


def simulate(run: Run) -> dict[str, Any]:
    """One run, as plain figures."""
    return summary(run, [figures_of(run, requests, part) for part, requests in enumerate(parts_of(run))])


def simulate_all(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The same of each, on all processors: every part of a run is a world of its own."""
    parts = [(run, requests, part) for run in runs for part, requests in enumerate(parts_of(run))]
    with ProcessPoolExecutor(min(len(parts), processor_count())) as pool:
        found = list(counted(pool.map(figures_of, *zip(*parts, strict=True)), len(parts)))
    return [summary(run, [each for each, (of, *_) in zip(found, parts, strict=True) if of is run]) for run in runs]


def counted(found: Iterable[Figures], total: int) -> Iterator[Figures]:
    """Passes them on; in a terminal, a line says how many there are, and goes with the last."""
    for done, figures in enumerate(found, 1):
        if sys.stderr.isatty():
            line = f"{done:,} of {total:,} simulations" if done < total else ""
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        yield figures


def parts_of(run: Run) -> list[int]:
    """Requests of each part of a long run: parts are simulated apart, and added up."""
    count = -(-run.requests // PART_REQUESTS)
    return [(run.requests + number) // count for number in range(count)]


def figures_of(run: Run, requests: int, part: int) -> Figures:
    machine, seed = MACHINES[run.machine], (run.seed, part)
    simulation = Simulation(
        machine,
        run.policy,
        block_tokens=run.block_tokens,
        prefix_tokens=run.prefix_tokens,
        share=run.policy == "paged" and (run.prefix_tokens > 0 or run.samples > 1),
        warm_up=int(WARM_UP * requests * run.samples),
        seed=run.seed,
    )
    queued = MAX_SEQUENCES if run.rate is None else 0  # those that only keep the queue full
    pairs = lengths(TRACES[run.trace], requests + queued, machine.context_length - run.prefix_tokens, seed)
    if run.rate is None:
        return simulation.run(asks_of(pairs, run.samples, run.turnover))
    times = arrivals(run.rate, requests, seed).tolist()
    asks = (
        Ask(prompt, answer, run.samples, when, run.turnover)
        for (prompt, answer), when in zip(pairs, times, strict=True)
    )
    return simulation.run(asks, always_full=False)


def summary(run: Run, parts: Sequence[Figures]) -> dict[str, Any]:
    figures = sum(parts[1:], parts[0])
    if not figures.steps:
        raise EngineError(f"{run.requests:,} requests are too few to measure anything: ask for more")
    latencies = figures.seconds_per_token
    return {
        **figures.shares(MACHINES[run.machine].slots),
        "waste_of_allocated": round(figures.waste_percent, 2),
        "saved_by_sharing": round(figures.saved_percent, 2),
        "tokens_per_second": round(figures.tokens_per_second, 1),
        "latency_seconds_per_token": round(sum(latencies) / len(latencies), 4) if latencies else None,
        "preemptions_per_request": round(figures.preemptions / max(1, len(latencies)), 3),
        "steps": figures.steps,
    }


def difference(ours: dict[str, float], paper: dict[str, float]) -> dict[str, float]:
    return {key: round(ours[key] - value, 2) for key, value in paper.items()}


ASSUMED = (
    "16 tokens a block; a reservation is rounded up to blocks, then by the buddy allocator to a power of two of blocks",
    "contexts of 2,048 tokens (OPT), 8,192 (Llama 3); at most "
    f"{MAX_SEQUENCES} sequences in a step; a prompt is computed in one step",
    "lengths are log-normal: the paper prints means alone (ShareGPT 161.31 in, 337.99 out; Alpaca 19.31, 58.45). "
    "Spreads are assumed (engine/simulate/traces.py); one of them, of ShareGPT's answers, is read back from Fig. 2",
    "paged admits a request when its prompt and one block fit beside 1% of the pool; preempts the newest, recomputes",
    "every step counts the same; the first tenth of the requests does not count",
)
POW2 = (
    "pow2 reserves the prompt and the power of two that holds the answer: the paper says that Orca (Pow2) "
    "over-reserves outputs by at most 2 times (25 -> 32) and leaves open how prompt and output are placed together"
)


def fig2(common: dict[str, Any], trace: str = "sharegpt") -> Table:
    """Where the memory goes, by policy; the queue is never empty."""
    found = simulate_all([Run(**common, trace=trace, policy=policy) for policy in POLICIES])
    ours = dict(zip(POLICIES, found, strict=True))
    rows, document = [], {}
    for policy in ("max", "pow2", "oracle", "paged"):
        paper = FIG2[policy] if trace == "sharegpt" else {}
        gap = difference(ours[policy], paper)
        for key in ("token", "reserved", "internal", "external"):
            rows.append((policy, key, paper.get(key), ours[policy][key], gap.get(key)))
        document[policy] = {**ours[policy], "paper": paper, "difference": gap}
    return Table(
        f"Fig. 2: share of {MACHINES[common['machine']].slots:,} slots, percent ({trace})",
        ("policy", "slots", "paper", "ours", "difference"),
        rows,
        document,
        (*ASSUMED, POW2, "external, of paged: free blocks"),
        bars={
            f"{policy}, {who}": {key: figures[key] for key in FIG2["max"] if key in figures}
            for policy, row in document.items()
            for who, figures in (("paper", row["paper"]), ("ours", row))
            if figures
        },
        axes=("", "% of the pool"),
    )


def fig13(common: dict[str, Any], trace: str = "sharegpt") -> Table:
    """How many sequences are in a step. `trace` is the one at the top of the document."""
    traces = (trace, *(each for each in FIG13 if each != trace))
    runs = [Run(**common, trace=each, policy=policy) for each in traces for policy in POLICIES]
    found = dict(zip([(run.trace, run.policy) for run in runs], simulate_all(runs), strict=True))
    rows, document = [], {}
    for each in traces:
        for policy in ("max", "pow2", "oracle", "paged"):
            ours, paper = found[each, policy]["batch"], FIG13.get(each, {}).get(policy)
            gap = f"{100 * (ours / paper - 1):+.1f}%" if paper else None
            rows.append((each, policy, paper, ours, gap))
            row = {**found[each, policy], "paper": {"batch": paper}, "difference_percent": gap}
            if each == trace:
                document[policy] = row
            else:
                document[policy][each] = row
    return Table(
        "Fig. 13: mean sequences in a step",
        ("trace", "policy", "paper", "ours", "difference"),
        rows,
        document,
        (
            *ASSUMED,
            POW2,
            "the paper runs ShareGPT at 2 and Alpaca at 30 requests a second: its vLLM was not short of memory then "
            "(30.42, 132.44), so paged, here with a queue that is never empty, holds more",
        ),
        bars=paper_beside_ours(rows),
        axes=("", "sequences"),
    )


def fig15(common: dict[str, Any], trace: str = "") -> Table:
    """Blocks saved when several answers to one prompt share it, or several beams what they have in common."""
    traces = (trace,) if trace else tuple(FIG15)
    common = {**common, "requests": common["requests"] // 4}
    runs = [
        Run(**common, trace=each, samples=samples, turnover=turnover)
        for turnover in (None, BEAM_TURNOVER)
        for each in traces
        for samples in (2, 4, 6)
    ]
    rows, document = [], {}
    for run, found in zip(runs, simulate_all(runs), strict=True):
        what, figures = ("n", FIG15) if run.turnover is None else ("beams", FIG15_BEAMS)
        ours, paper = found["saved_by_sharing"], figures.get(run.trace, {}).get(run.samples)
        gap = round(ours - paper, 2) if paper else None
        rows.append((run.trace, f"{what} = {run.samples}", paper, ours, gap))
        row = {**found, "paper": paper, "difference": gap}
        document.setdefault(run.trace, {}).setdefault(what, {})[str(run.samples)] = row
    return Table(
        "Fig. 15: blocks saved by sharing, percent, with n answers to a prompt or so many beams",
        ("trace", "", "paper", "ours", "difference"),
        rows,
        document,
        (
            *ASSUMED,
            "all answers to a prompt are equally long; the last, begun block of the prompt is copied at the fork",
            BEAMS_ASSUMED,
        ),
        bars=paper_beside_ours(rows),
        axes=("", "% of blocks"),
    )


def fig16(common: dict[str, Any], trace: str = "translation") -> Table:
    """A prefix that every prompt begins with, shared by paged alone."""
    common = {**common, "machine": "llama-13b"}
    cases = [(tokens, policy) for tokens in FIG16 for policy in ("paged", "oracle")]
    runs = [Run(**common, trace=trace, prefix_tokens=tokens, policy=policy) for tokens, policy in cases]
    found = dict(zip(cases, simulate_all(runs), strict=True))
    rows, document = [], {}
    for tokens, paper in FIG16.items():
        paged, oracle = found[tokens, "paged"], found[tokens, "oracle"]
        speedup = round(paged["tokens_per_second"] / oracle["tokens_per_second"], 2)
        rows += [
            (tokens, "throughput, paged / oracle", paper, speedup, round(speedup - paper, 2)),
            (tokens, "sequences, paged", None, paged["batch"], None),
            (tokens, "sequences, oracle", None, oracle["batch"], None),
            (tokens, "blocks saved by sharing, %", None, paged["saved_by_sharing"], None),
        ]
        document[str(tokens)] = {"paged": paged, "oracle": oracle, "speedup": speedup, "paper": paper}
    return Table(
        "Fig. 16: a shared prefix of 80 or 341 tokens, LLaMA-13B",
        ("prefix", "figure", "paper", "ours", "difference"),
        rows,
        document,
        (
            *ASSUMED,
            "the paper prints no lengths of its translations: 35 in, 40 out are assumed",
            "the ratio of throughputs is that of a machine that pays for reading weights and KV and for arithmetic, "
            f"and for nothing else; at most {MAX_SEQUENCES} sequences in a step",
        ),
        bars=paper_beside_ours([(tokens, "tokens", *row) for tokens, name, *row in rows if "throughput" in name]),
        axes=("", "paged / oracle"),
    )


def blocks(common: dict[str, Any], trace: str = "") -> Table:
    """What the size of a block costs in memory. The paper (Fig. 18) measures its cost in time, not this."""
    traces = (trace,) if trace else ("sharegpt", "alpaca")
    runs = [Run(**{**common, "block_tokens": size}, trace=each) for each in traces for size in BLOCK_SIZES]
    rows, document = [], {}
    for run, found in zip(runs, simulate_all(runs), strict=True):
        rows.append((run.trace, run.block_tokens, found["waste_of_allocated"], found["token"], found["batch"]))
        document.setdefault(run.trace, {})[str(run.block_tokens)] = found
    columns = ("trace", "tokens a block", "allocated, no token %", "pool with a token %", "sequences")
    curves = {each: [(row[1], row[2]) for row in rows if row[0] == each] for each in traces}
    axes = ("tokens a block", "% of allocated slots without a token")
    return Table("Paged: block sizes", columns, rows, document, ASSUMED, curves=curves, axes=axes)


def load(common: dict[str, Any], policies: Iterable[str], **given: Any) -> Table:
    """Any model, trace, rate: no paper beside it."""
    runs = [Run(**common, **given, policy=policy) for policy in policies]
    rows, document = [], {}
    for run, found in zip(runs, simulate_all(runs), strict=True):
        keys = ("token", "reserved", "internal", "external", "batch", "tokens_per_second", "latency_seconds_per_token")
        rows.append((run.policy, *(found[key] for key in keys), found["preemptions_per_request"]))
        document[run.policy] = found
    machine, run = MACHINES[common["machine"]], runs[0]
    how = f"{run.rate:g} requests/s" if run.rate else "queue never empty"
    return Table(
        f"{machine.model} on {machine.chips} x {machine.chip}, {machine.slots:,} slots; {run.trace}, {how}",
        (
            "policy",
            "token %",
            "reserved %",
            "internal %",
            "external %",
            "sequences",
            "tokens/s",
            "s/token",
            "preempted",
        ),
        rows,
        document,
        (
            *ASSUMED,
            *(() if run.turnover is None else (BEAMS_ASSUMED,)),
            "tokens/s and latency are bounds: weights and KV are read at the chip's bandwidth, nothing else costs time",
        ),
        bars={policy: {key: found[key] for key in FIG2["max"]} for policy, found in document.items()},
        axes=("", "% of the pool"),
    )


def paper_beside_ours(rows: Sequence[Sequence[Any]]) -> dict[str, dict[str, float]]:
    """Bars of rows (..., paper, ours, difference)."""
    bars = {}
    for *names, paper, ours, _ in rows:
        name = " ".join(str(each) for each in names)
        if paper is not None:
            bars[f"{name}, paper"] = {"paper": paper}
        bars[f"{name}, ours"] = {"ours": ours}
    return bars
