"""Packed weights: in memory once, however many runners compute with them, and gone with the last of these."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary


class Decoders:
    """By digest of what was packed. May be used by several threads that load."""

    def __init__(self) -> None:
        self._packed: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._locks: dict[str, Lock] = {}

    def get(self, digest: str, pack: Callable[[], Any]) -> Any:
        """What somebody packed under this digest and still holds, else what `pack` gives now. Who wants the same waits
        for it; where it fails, the next one tries."""
        with self._locks.setdefault(digest, Lock()):
            decoder = self._packed.get(digest)
            if decoder is None:
                decoder = self._packed[digest] = pack()
            return decoder
