"""A running engine in a child process, seen from outside: to start it, ask it, weigh it. For benches and tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.errors import EngineError


class EngineChild:
    """An engine on a free port of loopback, ended with us. Raises EngineError where it does not start."""

    def __init__(self, arguments: Sequence[str] = (), *, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "engine", "serve", "--host", "127.0.0.1", "--port", "0"]
        ends_with_us = ["--exit-with-parent", "--parent-pid", str(os.getpid())]
        self.process = subprocess.Popen([*command, *ends_with_us, *arguments], stdout=subprocess.PIPE, env=environment)
        line = self.process.stdout.readline()
        if not line:
            raise EngineError(f"the engine ended with status {self.process.wait()} before it listened")
        self.url: str = json.loads(line)["url"]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def call(url: str, method: str = "GET", body: Any = None, key: str | None = None) -> Any:
    """One JSON request. Raises EngineError with the words of the answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or 'none'}"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise EngineError(f"{method} {url}: {error.code} {error.read().decode(errors='replace')}") from None


def register(url: str, model: dict[str, Any], key: str | None = None, *, timeout_seconds: float = 600) -> None:
    """Puts a model and waits until it is ready. Raises EngineError with the engine's reason if it fails."""
    name = model["name"]
    status = call(f"{url}/models/{name}", "PUT", {k: v for k, v in model.items() if k != "name"}, key)
    ends = time.monotonic() + timeout_seconds
    while status["status"] == "loading":
        if time.monotonic() > ends:
            raise EngineError(f"{name} was still loading after {timeout_seconds:.0f} s")
        time.sleep(0.05)
        status = next(each for each in call(f"{url}/models", key=key)["models"] if each["name"] == name)
    if status["status"] != "ready":
        raise EngineError(f"{name} did not load: {status['reason']}")


class PeakMemory:
    """The highest PSS (own pages, shared ones by share) of processes and all they started, sampled now and then."""

    def __init__(self, *pids: int, every_seconds: float = 0.25) -> None:
        self.mib = 0
        self._pids, self._every_seconds = pids, every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            kib = sum(map(pss_kib, process_trees(self._pids)))
            self.mib = max(self.mib, round(kib / 1024))
            if self._over.wait(self._every_seconds):
                return


def process_trees(pids: Iterable[int]) -> set[int]:
    """The processes and all their descendants, as far as they run now."""
    found, waiting = set(), list(pids)
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                waiting += map(int, children.read_text().split())
    return found


def pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
