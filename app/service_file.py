"""The note that a running arena leaves in its data folder, so that the command line finds its engine.

Only the folder's owner reads it: it holds the key with which that engine's models are listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import IO

from app.config import AppConfig
from app.engine_client import EngineClient
from app.errors import ConfigError

NAME = "service.json"


class ServiceFile:
    """Held while the arena runs: a second one on the same data folder is refused. Ends with the process, however."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        self._file: IO[str] = os.fdopen(descriptor, "r+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"an arena is running on the data folder {folder.absolute()} already; "
                "end it, or give this one another with --data-folder",
                key="data_folder",
            ) from None
        self.write()

    def write(self, **note: str | int | None) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump({"pid": os.getpid(), **note}, self._file)
        self._file.flush()

    def close(self) -> None:
        self._file.truncate(0)
        self._file.close()


def engine_of_running_arena(config: AppConfig) -> EngineClient:
    """A client of the engine of the arena that runs on this data folder; of none where none does."""
    note = {"engine_url": config.engine_url or None, "engine_key": config.engine_admin_key or config.engine_api_key}
    if not config.engine_url:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            note = json.loads((config.data_folder / NAME).read_text(encoding="utf-8"))
    return EngineClient(lambda: note.get("engine_url"), api_key=note.get("engine_key"))
