"""`arena engine simulate`: the experiments by name. What each prints, and where its plot goes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError

EXPERIMENTS = {
    "fig2": "where the memory goes, by policy",
    "fig13": "how many sequences are in a step",
    "fig15": "blocks saved when 2, 4 or 6 answers share a prompt",
    "fig16": "a prefix of 80 or 341 tokens, shared",
    "blocks": "blocks of 1 to 128 tokens",
    "load": "any machine, trace, rate and policy",
    "real": "the real engine: its kernels and SmolLM2 in a small pool, by policy",
    "growth": "the real engine: what a step costs by sequences, context and models",
}
SIMULATED = frozenset({"machine", "trace", "requests", "block_tokens", "seed"})
READ = {  # which options say something to an experiment; any other that is given is refused
    "fig2": SIMULATED,
    "fig13": SIMULATED,
    "fig15": SIMULATED,
    "fig16": SIMULATED - {"machine"},
    "blocks": SIMULATED - {"block_tokens"},
    "load": SIMULATED | {"rate", "policies", "samples", "beam_width", "prefix_tokens"},
    "real": {"trace", "seed", "policies", "pool_mib", "steps", "warm_up", "clock"},
    "growth": {"clock", "part"},
}
REQUESTS = 4000
# The names of MACHINES, TRACES and POLICIES, which a test compares: to import them takes a second that --help need not.
MACHINE_NAMES = (
    "opt-13b", "opt-66b", "opt-175b", "llama-13b",
    "llama-3-8b-h100", "llama-3-8b-h200", "llama-3-70b-h100", "llama-3-70b-h200",
)  # fmt: skip
TRACE_NAMES = ("sharegpt", "alpaca", "translation")
POLICY_NAMES = ("paged", "max", "pow2", "oracle")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "experiment", choices=EXPERIMENTS, help="; ".join(f"{name}: {words}" for name, words in EXPERIMENTS.items())
    )
    command.add_argument("--json", action="store_true", help="print one JSON document on stdout, the table on stderr")
    command.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw it")
    command.add_argument(
        "--seed", type=at_least(0), default=0, help="of lengths and arrivals; the same seed, the same figures"
    )
    scale = command.add_argument_group("simulated")
    scale.add_argument("--machine", choices=MACHINE_NAMES, default="opt-13b", help="model and chips (default: opt-13b)")
    scale.add_argument("--trace", choices=TRACE_NAMES, help="lengths of prompts and answers")
    scale.add_argument("--requests", type=at_least(1), default=REQUESTS, help=f"of each run (default: {REQUESTS:,})")
    scale.add_argument("--block-tokens", type=at_least(1), default=16, metavar="TOKENS", help="a block (default: 16)")
    load = command.add_argument_group("load")
    load.add_argument("--rate", type=above_zero, help="Poisson arrivals a second; default: the queue is never empty")
    load.add_argument(
        "--policy",
        dest="policies",
        choices=POLICY_NAMES,
        action="append",
        help="default: all; may be given several times",
    )
    load.add_argument("--samples", type=at_least(1), default=1, help="answers to a prompt (default: 1)")
    load.add_argument("--beam-width", type=at_least(2), help="beams to a prompt in place of samples; paged alone")
    load.add_argument(
        "--prefix-tokens", type=at_least(0), default=0, metavar="TOKENS", help="that every prompt begins with"
    )
    real = command.add_argument_group("real, growth")
    real.add_argument(
        "--pool-mib", type=at_least(1), default=128, metavar="MIB", help="pool of KV pages (default: 128)"
    )
    real.add_argument("--steps", type=at_least(1), default=800, help="measured, of each policy (default: 800)")
    real.add_argument("--warm-up", type=at_least(0), default=400, metavar="STEPS", help="before those (default: 400)")
    real.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: what this process used, for a machine that others use too; needs --threads 1",
    )
    real.add_argument("--part", choices=("sequences", "contexts", "models", "overhead", "layout"), help="of growth")


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return whole_number


def above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def refuse_what_is_not_read(options: argparse.Namespace) -> None:
    """Raises ConfigError, naming an option that was given and says nothing to the experiment."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, usual in vars(parser.parse_args([options.experiment])).items():
        if name in READ[options.experiment] or name in ("experiment", "json", "plot"):
            continue
        if getattr(options, name) != usual:
            flag = "--policy" if name == "policies" else "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} says nothing to the experiment {options.experiment}", param=flag)


def run(config: EngineConfig, options: argparse.Namespace) -> int:
    refuse_what_is_not_read(options)
    table = experiment(config, options)
    print(words(table), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(table.document, indent=2))
    if options.plot:
        options.plot.write_text(draw(table), encoding="utf-8")
    return 0


def experiment(config: EngineConfig, options: argparse.Namespace):
    """Runs what was asked for; its Table."""
    from engine.simulate import experiments

    name = options.experiment
    if name in ("real", "growth"):
        if options.clock == "processor" and config.threads != 1:
            raise ConfigError("--clock processor needs --threads 1: threads that wait for each other use time, too")
        from engine.simulate import growth, real

        return {"real": real.compare, "growth": growth.measure}[name](config, options)
    common = {
        "machine": options.machine,
        "requests": options.requests,
        "block_tokens": options.block_tokens,
        "seed": options.seed,
    }
    if name == "load":
        if options.prefix_tokens >= (most := experiments.MACHINES[options.machine].context_length):
            words = f"--prefix-tokens is {options.prefix_tokens:,}; {options.machine} allows less than {most:,}"
            raise ConfigError(words, param="--prefix-tokens")
        samples = {"samples": options.samples}
        if options.beam_width:
            if options.samples > 1 or options.policies != ["paged"]:
                words = "--beam-width goes with --policy paged, the one that shares blocks, and without --samples"
                raise ConfigError(words, param="--beam-width")
            samples = {"samples": options.beam_width, "turnover": experiments.BEAM_TURNOVER}
        return experiments.load(
            common,
            options.policies or POLICY_NAMES,
            trace=options.trace or "sharegpt",
            rate=options.rate,
            prefix_tokens=options.prefix_tokens,
            **samples,
        )
    given = {"trace": options.trace} if options.trace else {}
    return getattr(experiments, name)(common, **given)


def words(table) -> str:
    from engine.simulate.report import text_table

    lines = [text_table(table.title, table.columns, table.rows)]
    if table.assumed:
        lines.append("assumed:")
        lines += [f"  - {sentence}" for sentence in table.assumed]
    return "\n".join(lines)


def draw(table) -> str:
    """An SVG: bars where the table has some, else curves."""
    from engine.simulate import report

    x_name, y_name = table.axes
    if table.bars:
        return report.stacked_bars(table.title, table.bars, y_name)
    return report.lines(table.title, table.curves, x_name, y_name)
