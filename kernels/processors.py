"""How many processors this process may use: all that it may run on, or what its share of their time comes to."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def processor_count(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """As many threads as compute at once. With more than a container's quota pays for (`docker run --cpus`), the system
    would stop all of them for the rest of each period, in the middle of what the others wait for."""
    quotas = [quota for folder in _groups(cgroups, own) if (quota := _quota(folder))]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Folders of the control groups that the process is in (cgroups(7)), inner ones first: a container may see its own
    as the outermost one, under a path that is not there."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            inner = PurePosixPath(path)
            for group in (inner, *inner.parents):
                yield cgroups / ("cpu" if controllers else "") / group.relative_to("/")


def _quota(folder: Path) -> float | None:
    """Processors' worth of time; None where there is no limit. Version 2 has one file for it, version 1 has two."""
    with suppress(OSError, ValueError):
        if (limit := folder / "cpu.max").is_file():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            return int(quota) / int(period)
    return None
