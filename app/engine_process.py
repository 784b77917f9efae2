"""Our own engine as a child process: started, watched, started again when it dies, ended with us.

Knows the child's command line and its first line of output; talks to it no further (that is `EngineClient`'s).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before the next start; the last one repeats
SETTLED_SECONDS = 30.0  # an engine that lived so long starts again at once
END_SECONDS = 0.5  # from SIGTERM to SIGKILL: an engine has nothing to save


class EngineProcess:
    """`environment` is the child's whole environment; `log_file` None passes its log lines on to standard error."""

    def __init__(self, *, port: int, environment: Mapping[str, str], log_file: Path | None):
        self._port = port
        self._environment = environment
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task | None = None
        self._url: str | None = None
        self.ends = 0  # how often it has ended by itself
        self.ending = ""  # how it ended the last time, for who wonders why
        self._last_line = ""  # of its standard error

    def url(self) -> str | None:
        """Where it listens; None before it does and after it died."""
        return self._url

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        self._watch = asyncio.create_task(self._keep_running(), name="engine process")

    async def stop(self) -> None:
        """Ends the child at once: a request in flight is lost, nothing else is."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self._end()

    def kill(self) -> None:
        """Ends a child that hangs; it is started again like one that died."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                code = await self._run_once()
                ending = how_it_ended(code, self._last_line)
            except Exception as error:  # no memory for a process, no room for its log: the next one may have them
                log.exception("engine not watched")
                await self._end()
                code, ending = None, str(error)
            self.ends += 1
            self.ending = ending
            lived = asyncio.get_running_loop().time() - began
            failures = 0 if lived > SETTLED_SECONDS else failures + 1
            pause = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)]
            log.error("engine ended", extra={"exit_code": code, "lived_seconds": lived, "restart_in_seconds": pause})
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        """From start to end of one child; its exit code."""
        self._port = free_port(self._port)
        with open_log(self._log_file) as output:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "engine", "serve",
                "--host", "127.0.0.1", "--port", str(self._port),
                "--exit-with-parent", "--parent-pid", str(os.getpid()),
                env=dict(self._environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in our terminal is for us alone; we end the child
            )  # fmt: skip
            try:
                async with asyncio.TaskGroup() as readers:
                    readers.create_task(self._read_lines(process.stdout, self._note_ready))
                    readers.create_task(self._read_lines(process.stderr, lambda line: self._copy(output, line)))
                return await process.wait()
            finally:
                self._url = None

    def _note_ready(self, line: str) -> None:
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            return
        if isinstance(message, dict) and message.get("ready"):
            self._url = message["url"]
            log.info("engine listens", extra={"url": self._url, "pid": self.pid})

    def _copy(self, output: IO[bytes], line: str) -> None:
        self._last_line = line
        with contextlib.suppress(OSError):  # a line that a full disk does not take is lost, and no engine with it
            output.write((("engine: " if self._log_file is None else "") + line + "\n").encode())
            output.flush()

    @staticmethod
    async def _read_lines(stream: asyncio.StreamReader, each: Callable[[str], None]) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the reader's buffer, which drops it
                continue
            if not line:
                return
            each(line.decode("utf-8", "replace").rstrip())

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


def free_port(preferred: int) -> int:
    """`preferred` if nobody listens on it, else one that is free now."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError("no free port on 127.0.0.1")


def open_log(path: Path | None) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Unbuffered: nothing is left for its end, which a full disk would make fail."""
    if path is None:
        return contextlib.nullcontext(sys.stderr.buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


def how_it_ended(code: int, last_line: str) -> str:
    """In words, from a child's exit code. Who was killed has not said why: its last line is about something else."""
    if code < 0:
        return f"{signal.Signals(-code).name} from outside, or the system, ended it."
    return f"exit status {code}. Its last line: {last_line or '(none)'}"
