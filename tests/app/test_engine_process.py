"""The engine's watcher outlives what goes wrong around the engine: a full disk, a log that cannot be opened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from app import engine_process
from app.engine_process import EngineProcess

CHILD = """
import json, os, sys, time
print("loads", file=sys.stderr, flush=True)
print(json.dumps({"ready": True, "url": f"http://engine-{os.getpid()}"}), flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where `python -m engine` is a child that is ready at once."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    (tmp_path / "engine" / "__main__.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_process, "BACKOFF_SECONDS", (0.01,))
    return tmp_path


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


def watched(log_file: Path, story: Callable) -> None:
    async def run() -> None:
        process = EngineProcess(port=0, environment=os.environ, log_file=log_file)
        process.start()
        try:
            await story(process)
        finally:
            await process.stop()
        assert process.pid is None or process._process.returncode is not None

    asyncio.run(run())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_takes_the_log_and_not_the_engine(folder):
    async def story(process: EngineProcess) -> None:
        await until(process.url)
        first = process.pid
        await asyncio.sleep(0.2)  # in which a watcher that fell over its log would have ended the child
        assert process.ends == 0 and process.url() == f"http://engine-{first}"
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.url() not in (None, f"http://engine-{first}"))
        assert process.ends == 1

    watched(Path("/dev/full"), story)


def test_an_engine_that_could_not_be_started_is_started_later(folder):
    in_the_way = folder / "logs"
    in_the_way.write_text("a file where the folder of the log should be")

    async def story(process: EngineProcess) -> None:
        await until(lambda: process.ends)
        assert process.url() is None and "logs" in process.ending
        in_the_way.unlink()
        await until(process.url)

    watched(in_the_way / "engine.log", story)
