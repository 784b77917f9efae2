"""The decoder step: one signature, several backends. Knows pages, weights and shapes; nothing of ours.

`spec` says what they share, `reference` is the definition in plain PyTorch, `cpu` the same in C++, `triton` the same on
an NVIDIA GPU. Importing this package loads no torch, and it has no version attribute: transformers would take it for
the hub's package of that name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.spec import Backend

log = logging.getLogger(__name__)


class BackendUnavailable(RuntimeError):
    """A backend cannot run on this machine; the message says what is missing."""


def _open_reference(threads: int | None, **_: Any) -> Backend:
    return import_module("kernels.reference").ReferenceBackend(threads)


def _open_cpu(threads: int | None, **options: Any) -> Backend:
    return import_module("kernels.cpu").CpuBackend(threads, **options)


def _open_triton(threads: int | None, **_: Any) -> Backend:
    return import_module("kernels.triton").TritonBackend()


BACKENDS: dict[str, Callable[..., Backend]] = {"reference": _open_reference, "cpu": _open_cpu, "triton": _open_triton}


def load(name: str = "auto", threads: int | None = None, *, cache_folder: Path | None = None) -> Backend:
    """The backend called `name`; "auto" takes the fastest that runs here and says in the log why another did not.

    `threads` None means one for each processor this process may use, as far as its container's share pays for them.
    Compiled code is kept in `cache_folder`. Raises ValueError for an unknown name, BackendUnavailable where a backend
    asked for by name cannot run.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"no kernel backend named {name!r}; there are: auto, {', '.join(BACKENDS)}")
        return BACKENDS[name](threads, cache_folder=cache_folder)
    torch = import_module("torch")
    threads_of_torch = torch.get_num_threads()
    for candidate in ("triton", "cpu") if torch.cuda.is_available() else ("cpu",):
        try:
            backend = BACKENDS[candidate](threads, cache_folder=cache_folder)
            import_module("kernels.self_check").check(backend)
        except Exception as reason:  # drivers, compilers and file systems fail in ways of their own
            log.warning(
                "kernel backend %s is not available, the next one is slower: %s",
                candidate,
                reason,
                exc_info=not isinstance(reason, BackendUnavailable),
            )
            torch.set_num_threads(threads_of_torch)  # which one that began may have changed
            continue
        log.info("kernel backend: %s", backend.name)
        return backend
    log.info("kernel backend: reference")
    return BACKENDS["reference"](threads)
