"""Compiles the C++ kernels with the system's compiler at first use and keeps the library in a cache folder.

The file's name carries a hash of everything that decides its content (sources, compiler, flags, processor), so that
neither an update nor a home folder shared by unlike machines can load the wrong one. Of two processes that would build
at once, the second waits for what the first one builds; where the file system knows no locks each builds its own, and
the rename that puts it in place is atomic. A digest behind the library, where the loader does not look, tells one that
a power cut or a full disk cut short: it is built anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kernels import BackendUnavailable

log = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
_SEAL_BYTES = hashlib.sha256().digest_size
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-ivopts",  # gcc: induction variables of its own choosing cost the inner loops 7%
    "-ffp-contract=off",
    "-w",
)

# What simd.h makes of the processor, best first. The lower ones are there to be tested wherever the higher run, and so
# are compiled quickly.
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "native": ("-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",),
    "avx512": ("-O1", "-march=native", "-mno-avx512bf16", "-mno-avx512vnni"),
    "avx2": ("-O1", "-march=native", "-mno-avx512f"),
    "scalar": ("-O1", "-DARENA_SCALAR"),
}


def default_cache_folder() -> Path:
    """`$ARENA_CACHE`, else `~/.cache/paged-arena`, and in it `kernels`."""
    return Path(os.environ.get("ARENA_CACHE") or Path.home() / ".cache" / "paged-arena") / "kernels"


def find_compiler() -> str:
    """Path of the first C++ compiler there is. Raises BackendUnavailable."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BackendUnavailable(f"no C++ compiler found (looked for {', '.join(COMPILERS)}); Debian's package is g++")


def shared_object(isa: str = "native", cache_folder: Path | None = None) -> Path:
    """The compiled library, built where the cache does not hold it whole. Raises BackendUnavailable."""
    compiler, flags = find_compiler(), (*FLAGS, *ISA_FLAGS[isa])
    folder = (cache_folder or default_cache_folder()).absolute()  # the loader looks for a bare name elsewhere
    try:
        path = folder / f"cpu-{isa}-{_digest(compiler, flags)}.so"
        if not _is_whole(path):
            folder.mkdir(parents=True, exist_ok=True)
            with _turn_in(folder):
                if not _is_whole(path):
                    _compile(compiler, flags, path)
    except OSError as error:
        raise BackendUnavailable(f"cannot build in {folder}: {error}") from error
    return path


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return content[-_SEAL_BYTES:] == hashlib.sha256(content[:-_SEAL_BYTES]).digest()


def _seal(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


@contextlib.contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """Waits until no other process builds in the folder. The lock is the folder's own, and goes with its holder."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # such as a folder of NFS
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [compiler, version, *flags, platform.machine(), _processor_features()]
    sources = sorted(path for path in SOURCE_FOLDER.iterdir() if path.suffix in (".h", ".cpp"))
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _processor_features() -> str:
    """What `-march=native` depends on; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    log.info("compiling the CPU kernels into %s", path.parent)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        built = Path(scratch) / path.name
        command = [compiler, *flags, str(SOURCE_FOLDER / "kernels.cpp"), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BackendUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
        _seal(built)
        os.replace(built, path)
    log.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)
