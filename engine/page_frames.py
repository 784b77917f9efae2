"""The page map on its way to those who watch it: a stream of small binary messages, at most so many a second.

    message = kind uint32, length uint32, payload[length]                       (little-endian)
    FIGURES   JSON of `engine.occupancy`; every few seconds also where nothing changed, as a sign of life
    WHOLE     zlib of the states of all drawn pages, uint8 [page]
    CHANGES   uint32 [run, 2]: the first page of a run, and 8 * its length + the state it has now

Of a pool of more than MOST_DRAWN pages every n-th is drawn; n is "stride" in the figures.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import numpy as np
import orjson

from engine.errors import EngineDead

if TYPE_CHECKING:
    from engine.core import Engine

FIGURES, WHOLE, CHANGES = range(3)
MOST_DRAWN = 262_144
MOST_A_SECOND = 20
FIGURES_SECONDS = 0.25
PING_SECONDS = 2.0
LONGEST_CHANGES = 4096  # bytes; what is longer is sent whole


def message(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


def whole(states: np.ndarray) -> bytes:
    return message(WHOLE, zlib.compress(states, 1))


def changes(before: np.ndarray, after: np.ndarray) -> bytes:
    """What turns `before` into `after`, both uint8 [page]; whole where the runs would be longer."""
    changed = np.flatnonzero(before != after)
    states = after[changed].astype(np.uint32)
    begins = np.flatnonzero((np.diff(changed, prepend=-2) != 1) | (np.diff(states, prepend=9) != 0))
    if 8 * len(begins) > LONGEST_CHANGES:
        return whole(after)
    runs = np.empty((len(begins), 2), "<u4")
    runs[:, 0] = changed[begins]
    runs[:, 1] = np.diff(begins, append=len(changed)) << 3 | states[begins]
    return message(CHANGES, runs.tobytes())


async def page_frames(engine: Engine, is_over: Callable[[], bool] = lambda: False) -> AsyncIterator[bytes]:
    """First everything, then what changes, until it is over or the engine is dead. A glance costs microseconds while
    nothing changes."""
    page_map, stride = engine.page_map, -(-engine.page_map.states.size // MOST_DRAWN)
    figures, told_at, drawn, asked_at = b"", -PING_SECONDS, None, (-1, -1)
    while not is_over():
        parts, now, at = [], time.monotonic(), (page_map.version, engine.counts.steps)
        if now - told_at >= (FIGURES_SECONDS if at != asked_at else PING_SECONDS):
            try:
                fresh = orjson.dumps({**await asyncio.to_thread(engine.occupancy), "stride": stride})
            except EngineDead:
                return
            asked_at = at
            if fresh != figures or now - told_at >= PING_SECONDS:
                figures, told_at = fresh, now
                parts.append(message(FIGURES, figures))
        states = page_map.states[::stride].copy()
        if drawn is None:
            parts.append(whole(states))
        elif not np.array_equal(states, drawn):
            parts.append(changes(drawn, states))
        drawn = states
        if parts:
            yield b"".join(parts)
        await asyncio.sleep(1 / MOST_A_SECOND)
