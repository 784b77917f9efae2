"""The engine's page map on the wire: the messages of `GET /kv/pages` (docs/engine.md), read and written.

    message = kind uint32, length uint32, payload[length]                       (little-endian)

Browsers are sent the same messages. Knows no battle and no viewer.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

FIGURES, WHOLE, CHANGES = range(3)
STATES = ("free", "cached", "used", "shared", "pinned", "pinned_in_use")
FREE, CACHED, USED, SHARED, PINNED, PINNED_IN_USE = range(len(STATES))
HEAD = struct.Struct("<II")
LONGEST_CHANGES = 4096  # bytes; what is longer is sent whole
LONGEST_MESSAGE = 16 * 1024 * 1024


def message(kind: int, payload: bytes) -> bytes:
    return HEAD.pack(kind, len(payload)) + payload


def figures_message(figures: dict[str, Any]) -> bytes:
    return message(FIGURES, orjson.dumps(figures))


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


def split(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """Takes the whole messages out of the front of `buffer`. Raises ValueError where it holds something else."""
    while len(buffer) >= HEAD.size:
        kind, length = HEAD.unpack_from(buffer)
        if kind > CHANGES or length > LONGEST_MESSAGE:
            raise ValueError("this is no stream of page frames")
        if len(buffer) < HEAD.size + length:
            return
        payload = bytes(buffer[HEAD.size : HEAD.size + length])
        del buffer[: HEAD.size + length]
        yield kind, payload


def applied(states: np.ndarray | None, kind: int, payload: bytes) -> np.ndarray:
    """The states after a WHOLE or CHANGES message. Raises ValueError, zlib.error for what is none."""
    if kind == WHOLE:
        return np.frombuffer(zlib.decompress(payload), np.uint8).copy()
    if states is None:
        raise ValueError("changes came before the whole")
    for start, run in np.frombuffer(payload, "<u4").reshape(-1, 2).tolist():
        states[start : start + (run >> 3)] = run & 7
    return states


def counted(states: np.ndarray) -> dict[str, int]:
    return dict(zip(STATES, np.bincount(states, minlength=len(STATES)).tolist(), strict=True))
