"""The note that a running arena leaves in its data folder, by which the command line finds it.

Only the folder's owner reads it: it holds a key of the running arena's admin API.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.config import AppConfig
from app.errors import ConfigError

NAME = "service.json"


@dataclass(frozen=True)
class RunningArena:
    url: str
    key: str


class ServiceFile:
    """Held while the arena runs: a second one on the same data folder is refused. Ends with the process, however."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        self._file: IO[str] = os.fdopen(descriptor, "r+", encoding="utf-8")
        if not _lock(self._file):
            self._file.close()
            raise ConfigError(
                f"an arena is running on the data folder {folder.absolute()} already; "
                "end it, or give this one another with --data-folder",
                key="data_folder",
            )
        self.write()

    def write(self, **note: str | int | None) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump({"pid": os.getpid(), **note}, self._file)
        self._file.flush()

    def close(self) -> None:
        self._file.truncate(0)
        self._file.close()


def running_arena(config: AppConfig) -> RunningArena | None:
    """The arena that runs on this data folder and serves by now; None where none does."""
    try:
        with (config.data_folder / NAME).open("r+", encoding="utf-8") as file:
            if _lock(file):  # nobody holds it: what it says was left by one that was killed
                return None
            note = json.loads(file.read())
    except (OSError, json.JSONDecodeError):
        return None
    return RunningArena(note["url"], note["key"]) if "key" in note else None


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
