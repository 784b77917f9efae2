"""The note that a running arena leaves in its data folder, so that the command line finds its engine."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO

from app.config import AppConfig
from app.errors import ConfigError


class ServiceFile:
    """Held while the arena runs: a second one on the same data folder is refused. Ends with the process, however."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / "service.json").open("a+", encoding="utf-8")
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
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), **note}, self._file)
        self._file.flush()

    def close(self) -> None:
        self._file.truncate(0)
        self._file.close()


def engine_url(config: AppConfig) -> str | None:
    """The engine of the arena that runs on this data folder; None where none does."""
    if config.engine_url:
        return config.engine_url
    try:
        return json.loads((config.data_folder / "service.json").read_text(encoding="utf-8")).get("engine_url")
    except (OSError, json.JSONDecodeError):
        return None
