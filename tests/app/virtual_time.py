"""An event loop whose time passes only when all wait, and then at once: a minute of pauses takes milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Selector(selectors.DefaultSelector):
    """Does not wait for the next timer: moves `time` on to it."""

    time = 0.0

    def select(self, timeout: float | None = None) -> list:
        self.time += max(timeout or 0.0, 0.0)
        return super().select(0 if timeout is not None else None)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.time


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(coroutine)
