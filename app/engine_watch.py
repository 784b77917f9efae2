"""Notices an engine of ours that hangs rather than dies, and ends it, at which it is started again.

An engine that works long at one step answers /health meanwhile and says for how long; one that hangs in a step says so
too, with a number that only grows; one whose process has stopped says nothing. Knows neither models nor battles.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from app.engine_client import EngineError

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks


class Process(Protocol):
    pid: int | None

    def url(self) -> str | None: ...

    def kill(self) -> None: ...


class Engine(Protocol):
    async def step_seconds(self, timeout_seconds: float) -> float: ...


async def end_when_hung(
    process: Process, engine: Engine, *, patience_seconds: float, clock: Callable[[], float], look_seconds=LOOK_SECONDS
) -> None:
    """For ever. Hung: at one step for longer than `patience_seconds`, or without a word for as long."""
    known: int | None = None
    well_at = clock()
    while True:
        await asyncio.sleep(look_seconds)
        if process.url() is None or process.pid != known:  # none that listens, or a new one
            known, well_at = process.pid, clock()
            continue
        try:
            step_seconds = await engine.step_seconds(patience_seconds / 2)
            well_at = clock()
        except EngineError:
            step_seconds = 0.0
        hung_seconds = max(step_seconds, clock() - well_at)
        if hung_seconds > patience_seconds and process.pid == known:
            log.error("engine hangs", extra={"pid": known, "hung_seconds": hung_seconds})
            process.kill()
            known = None
