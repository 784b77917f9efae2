"""Folders of the cache: made whole or not at all, also where the power fails, and by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError

Progress = Callable[[int, int, str], None]

FORMAT = "1"  # part of a converted folder's name; raised when the conversion changes what it writes
POLL_SECONDS = 0.2  # between two looks at how far a download is


def made_once(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """cache/checkpoints/name, filled by `make(folder)` in a folder beside it, under a lock, and renamed when done."""
    home = cache / "checkpoints"
    made = home / name
    if made.is_dir():
        return made
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.is_dir():  # another process was faster
            return made
        for left_over in home.glob(f"{name}.making-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        making = Path(tempfile.mkdtemp(prefix=f"{name}.making-", dir=home))
        try:
            making.chmod(0o755)  # mkdtemp's is for its owner alone
            make(making)
            write_through(making)
            making.rename(made)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        sync_folder(home)
    return made


def write_through(folder: Path) -> None:
    """Has the disk keep all that is in it; a rename may otherwise outlive a power cut that the content does not."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync(Path(path, name))
        sync_folder(Path(path))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Where the file system has it for folders, as some shared ones have not."""
    with contextlib.suppress(OSError):
        sync(path)


def need_space(folder: Path, num_bytes: int) -> None:
    """Raises CheckpointError if the disk under `folder` has less free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(f"{num_bytes / 1e6:,.0f} MB are needed in {folder}; {free / 1e6:,.0f} MB are free")


@dataclass(frozen=True)
class Growth:
    """Tells `progress`, each time it is called, how many bytes the files under `folder` have, plus `before`."""

    folder: Path
    before: int
    total: int
    progress: Progress

    def __call__(self) -> None:
        self.progress(min(self.before + size_under(self.folder), self.total), self.total, "bytes")


def size_under(folder: Path) -> int:
    """Bytes of the files there now; those that go while we look, or folders of theirs, count as gone."""
    total = 0
    for path, _, names in os.walk(folder):  # passes over a folder that it cannot read any more
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(path, name)).st_size
    return total
