"""A peer's server: a command that runs until we stop it, and everything it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from engine.bench import Endpoint
from engine.child import process_trees
from tests.bench.peers import Launch


class ServerError(Exception):
    """It did not start; `log` is the file with what it said."""

    def __init__(self, words: str, log: Path) -> None:
        super().__init__(words)
        self.log = log


class Server:
    """Started at once; `wait_until_ready` before the first request, `close` at the end, whatever happened."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._launch, self._log = launch, log
        self._start()

    def _start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [part.replace("{port}", str(port)) for part in self._launch.command]
        with self._log.open("ab") as output:
            self._said_before = output.tell()
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self._launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self._launch.model, changes=self._launch.changes)

    def wait_until_ready(self, timeout_seconds: float = 300) -> None:
        """Starts it once more where another program took the port that was free."""
        ends, tries = time.monotonic() + timeout_seconds, 2
        while not answers(self.url + self._launch.path):
            if (status := self._process.poll()) is not None:
                tries -= 1
                if tries and b"ddress already in use" in self._log.read_bytes()[self._said_before :]:
                    self._start()
                    continue
                raise ServerError(f"ended with status {status} before it was ready", self._log)
            if time.monotonic() > ends:
                raise ServerError(f"was not ready after {timeout_seconds:.0f} s", self._log)
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the whole tree, as a part of it may outlive its parent: asks first, and insists after ten seconds."""
        tree = process_trees([self.pid])
        for each in (signal.SIGTERM, signal.SIGKILL):
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, each)
            ends = time.monotonic() + 10
            while tree and time.monotonic() < ends:
                self._process.poll()
                tree = {pid for pid in tree if is_running(pid)}
                time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
