"""Waits for what another thread or process does, and for no longer than a test can."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(true: Callable[[], Any], *, seconds: float = 30) -> Any:
    """The first true value of `true()`; fails after that time."""
    ends = time.monotonic() + seconds
    while True:
        if value := true():
            return value
        assert time.monotonic() < ends, f"not within {seconds} s"
        time.sleep(0.01)
