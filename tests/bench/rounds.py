"""Rounds: each load on each engine, in turns, every one on a server freshly started. One record a measurement.

Records are lines of JSON, added to a file as they come, so that a run which was interrupted, or made in pieces, goes on
where it stopped. A measurement that failed is a record too, and is tried again by the next run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from engine.bench import LOADS, MODEL, ROOT, SOURCE, Endpoint, Load, machine, measure
from engine.child import EngineChild, register
from engine.config import PRECISIONS
from engine.errors import EngineError
from tests.bench.peers import Peer
from tests.bench.place import InstallError, Place
from tests.bench.server import Server, ServerError

OURS = "paged-arena"
Record = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """A name of the table, and how to measure it: the load, the warm-up and the log in, the figures out."""

    name: str
    precision: str
    version: str
    measure: Callable[[Load, Load, Path], Record]
    loads: tuple[str, ...] = LOADS


APART = f"{OURS}-apart"
IN_PRECISION = {f"{OURS}-{precision}": precision for precision in PRECISIONS}


def ours(*, apart: Path | None = None, precision: str | None = None, settings: Sequence[str] = ()) -> Contestant:
    """Our engine, one process and one pool for both models of a battle, which share the weights they have in common.

    `apart`: battles alone, and the second model reads its weights from this folder, as another checkpoint would.
    `precision` is that of the weights, where they are not of the engine's dtype.
    """

    def measure_ours(load: Load, warm_up: Load, log: Path) -> Record:
        start_ours_once(tuple(settings))
        began = time.perf_counter()
        sources = [SOURCE, f"path:{apart}" if apart else SOURCE][: 2 if load.name == "W4" else 1]
        with closing(EngineChild(settings)) as child:
            for number, source in enumerate(sources):
                register(child.url, {"name": f"{MODEL}-{number}", "source": source, "precision": precision})
            launch_seconds = time.perf_counter() - began
            endpoints = [Endpoint(child.url, f"{MODEL}-{number}") for number in range(len(sources))]
            return measure(load, endpoints, warm_up, [child.process.pid]) | {"launch_seconds": launch_seconds}

    name, loads = (APART, ("W4",)) if apart else (f"{OURS}-{precision}" if precision else OURS, LOADS)
    return Contestant(name, precision or "bf16", commit(), measure_ours, loads)


@functools.cache
def start_ours_once(settings: tuple[str, ...]) -> None:
    """The kernels are compiled at the first start."""
    EngineChild(settings).close()


def contestant(peer: Peer, place: Place) -> Contestant:
    """A peer, installed when it is first measured. A battle takes two servers, on half of the cores each."""

    def measure_peer(load: Load, warm_up: Load, log: Path) -> Record:
        install(peer, place, log)
        cores = sorted(os.sched_getaffinity(0))
        halves = [cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :]]
        launches = [peer.launch(place, part) for part in (halves if load.name == "W4" else [cores])]
        with ExitStack() as stack:
            began = time.perf_counter()
            servers = [stack.enter_context(closing(Server(launch, log))) for launch in launches]
            for server in servers:
                server.wait_until_ready()
            launch_seconds = time.perf_counter() - began
            endpoints, pids = [server.endpoint for server in servers], [server.pid for server in servers]
            return measure(load, endpoints, warm_up, pids) | {"launch_seconds": launch_seconds}

    return Contestant(peer.name, peer.precision, peer.version, measure_peer)


def install(peer: Peer, place: Place, log: Path) -> None:
    """Installs it, and starts it once, where that was not done yet: some compile at their first start."""
    place.install(peer.install)

    def start() -> None:
        with closing(Server(peer.launch(place, sorted(os.sched_getaffinity(0))), log)) as server:
            server.wait_until_ready(timeout_seconds=1200)

    place.once(f"first start of {peer.name}", start)


def run(
    contestants: Sequence[Contestant],
    loads: Sequence[str],
    rounds: int,
    results: Path,
    build: Callable[[str, str], Load],
) -> Iterator[Record]:
    """Measures what `results` does not have yet. `build`: the load of a name, in the words of a seed.

    All engines get the same words in a round, and other words in each round, so that nothing is left in a cache.
    """
    done = {key(record) for record in read(results) if not failed(record)}
    for number in range(1, rounds + 1):
        for name in loads:
            load, warm_up = build(name, f"round {number}"), build("warm-up", f"round {number}")
            for each in contestants:
                if name in each.loads and (each.name, name, number) not in done:
                    record = attempt(each, load, warm_up, number, results.parent / "logs")
                    with results.open("a") as file:
                        print(json.dumps(record), file=file)
                    yield record


def attempt(each: Contestant, load: Load, warm_up: Load, number: int, logs: Path) -> Record:
    """The record of one measurement; where it fails, with the reason, the log's name and its last lines."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{each.name}-{load.name}-{number}.log"
    log.unlink(missing_ok=True)
    record = {
        "engine": each.name,
        "precision": each.precision,
        "version": each.version,
        "load": load.name,
        "round": number,
        "date": date.today().isoformat(),
        "machine": machine(),
    }
    try:
        figures = each.measure(load, warm_up, log)
    except (InstallError, ServerError) as error:
        return record | {"failure": str(error), "log": str(error.log), "log_end": last_lines(error.log)}
    except (EngineError, OSError) as error:  # ours did not start, or ended
        return record | {"failure": str(error), "log": str(log), "log_end": last_lines(log)}
    return record | figures | {"launch_seconds": round(figures["launch_seconds"], 1)}


def read(results: Path) -> list[Record]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def key(record: Record) -> tuple[str, str, int]:
    return record["engine"], record["load"], record["round"]


def failed(record: Record) -> bool:
    return "failure" in record or record["errors"] > 0


def last_lines(log: Path, count: int = 15) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-count:] if log.exists() else []


def commit() -> str:
    """Which source ours is: the commit, and whether the work tree differs from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
