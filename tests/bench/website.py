"""What a visitor waits for, and what the website costs beside the engine: battles at once on the shipped models.

    python -m tests.bench.website [--battles 8] [--rounds 2]

Starts an arena of its own, as `make run` does, on a data folder that ends with it. In each round as many visitors, who
have read the notice, ask at the same moment; a battle is two streams. The first round is what the first visitors of a
new process meet. Printed: the time from the question to the first words of both sides, and the processor time of the
web process while anybody was answered, in percent of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from app.config import AppConfig, environment_without_settings
from app.service_file import running_arena
from engine.bench import machine

MODELS = 3  # that are shipped
START_SECONDS = 300.0
LIMITS = {"ARENA_BATTLES_PER_VISITOR": "1000", "ARENA_BATTLES_PER_ADDRESS": "1000"}
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Heard:
    """One battle, in seconds since its question."""

    first_words: float  # when both sides had shown something
    end: float
    events: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.website", description=__doc__.split("\n\n")[0])
    parser.add_argument("--battles", type=int, default=8, help="at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="one after the other (default: %(default)s)")
    options = parser.parse_args()
    with arena() as (url, process), contextlib.ExitStack() as open_until_then:
        visitors = [open_until_then.enter_context(contextlib.closing(visitor(url))) for _ in range(options.battles)]
        print(f"{2 * options.battles} streams; {json.dumps(machine())}")
        for number in range(options.rounds):
            print(one_round(visitors, process, first_question=number * options.battles), flush=True)


def one_round(visitors: list[httpx.Client], process: int, first_question: int) -> str:
    together = threading.Barrier(len(visitors))
    with ThreadPoolExecutor(len(visitors)) as threads:
        began, used = time.monotonic(), processor_seconds(process)
        questions = range(first_question, first_question + len(visitors))
        heard = list(threads.map(lambda each, number: battle(each, number, together), visitors, questions))
        seconds, used = time.monotonic() - began, processor_seconds(process) - used
    events = sum(each.events for each in heard)
    waits = sorted(1000 * each.first_words for each in heard)
    return (
        f"first words of both sides: median {statistics.median(waits):.0f} ms, last {waits[-1]:.0f} ms; "
        f"{events} events in {seconds:.1f} s, for which the web process took {100 * used / seconds:.1f}% of one core, "
        f"{1000 * used / events:.2f} ms an event"
    )


@contextlib.contextmanager
def arena() -> Iterator[tuple[str, int]]:
    """Its address and the process of the website; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="website-") as folder:
        config = AppConfig(data_folder=Path(folder))
        command = ["-c", "from app.cli import main; main()", "serve", "--port", "0", "--data-folder", folder]
        process = subprocess.Popen([sys.executable, *command], env=environment_without_settings() | LIMITS)
        try:
            yield ready(config), process.pid
        finally:
            process.terminate()
            process.wait(30)


def ready(config: AppConfig) -> str:
    """Waits until the arena serves and its models are ready. Raises TimeoutError."""
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        with contextlib.suppress(httpx.HTTPError):
            running = running_arena(config)
            if running and httpx.get(f"{running.url}/api/status").json()["ready_models"] == MODELS:
                return running.url
        time.sleep(0.2)
    raise TimeoutError(f"the arena was not ready within {START_SECONDS:.0f} s")


def visitor(url: str) -> httpx.Client:
    """Who has read the notice."""
    client = httpx.Client(base_url=url, timeout=120)
    client.post("/api/notice").raise_for_status()
    return client


def battle(visitor: httpx.Client, number: int, together: threading.Barrier) -> Heard:
    question = f"Tell me a long story about {number + 2} dragons, in at least ten paragraphs."
    together.wait()
    began = time.monotonic()
    answer = visitor.post("/api/battles", json={"prompt": question}).raise_for_status().json()
    first: dict[str, float] = {}
    events = 0
    with visitor.stream("GET", f"/api/battles/{answer['battle']}/events") as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events += 1
                event = json.loads(line.removeprefix("data: "))
                if "html" in event:
                    first.setdefault(event["side"], time.monotonic() - began)
    return Heard(max(first.values()), time.monotonic() - began, events)


def processor_seconds(process: int) -> float:
    """That it has used, in its own code and for it in the system (proc(5), stat, fields 14 and 15)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


if __name__ == "__main__":
    main()
