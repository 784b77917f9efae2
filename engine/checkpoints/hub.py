"""Checkpoints of the Hugging Face hub: JSON, Jinja and safetensors files of one revision, never its code or pickles.

A revision that is a branch is resolved at the first fetch and then stays: the folder in the cache is what is served.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from engine.checkpoints.cache import POLL_SECONDS, Growth, Progress, made_once, need_space
from engine.errors import CheckpointError

PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def fetch_hub(written: str, cache: Path, progress: Progress) -> Path:
    match = NAME.fullmatch(written)
    if not match or ".." in written:
        raise CheckpointError(f"hf:{written} is not of the form hf:org/name or hf:org/name@revision")
    repository, revision = match["repository"], match["revision"]
    name = f"hf-{repository}@{revision or 'main'}".replace("/", "--")
    return made_once(cache, name, lambda folder: download(repository, revision, folder, progress))


def download(repository: str, revision: str | None, folder: Path, progress: Progress) -> None:
    from huggingface_hub import HfApi, snapshot_download  # slow to import, and most engines never need it
    from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

    disable_progress_bars()
    try:
        listed = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=20)
        names = list(filter_repo_objects((file.rfilename for file in listed.siblings or ()), allow_patterns=PATTERNS))
        if not any(name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{repository} has no .safetensors file; pickled weights are never read")
        total = sum(file.size or 0 for file in listed.siblings or () if file.rfilename in names)
        need_space(folder, total)
        fetched = in_thread(
            partial(snapshot_download, repository, revision=listed.sha, local_dir=folder, allow_patterns=PATTERNS)
        )
        watch = Growth(folder, 0, total, progress)
        try:
            while not fetched.done():
                watch()
                wait([fetched], timeout=POLL_SECONDS)
        except BaseException:
            fetched.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))  # which it will make again
            raise
        fetched.result()
    except CheckpointError:
        raise
    except Exception as error:  # the client's own, and those of whichever HTTP library it was made with
        raise CheckpointError(f"{repository} cannot be fetched from the hub: {first_line(error)}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    progress(total, total, "bytes")


def in_thread(work: Callable[[], Any]) -> Future:
    """Its own thread, and a daemon: the client cannot be told to stop, and must not keep the process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hub-download", daemon=True).start()
    return future


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
