"""A folder that one peer is installed into, step by step. A step that was done is not done again.

Knows pip, a virtual environment and a log; not what is installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from email.message import Message
from pathlib import Path


class InstallError(Exception):
    """A step failed; `log` is the file that says why."""

    def __init__(self, words: str, log: Path) -> None:
        super().__init__(words)
        self.log = log


class Place:
    """`checkpoint`: the Hugging Face folder of the weights; `jobs`: compilers at once."""

    def __init__(self, folder: Path, checkpoint: Path, jobs: int) -> None:
        self.folder, self.checkpoint, self.jobs = folder, checkpoint, jobs
        self.log = folder / "install.log"
        self._failure: InstallError | None = None

    def install(self, recipe: Callable[[Place], None]) -> None:
        """Does what of the recipe is not done yet. Raises InstallError where a step fails, and at once from then on."""
        if self._failure:
            raise self._failure
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            recipe(self)
        except InstallError as error:
            self._failure = error
            raise

    @property
    def python(self) -> Path:
        return self.binary("python")

    @property
    def site_packages(self) -> Path:
        return self.folder / "venv/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def binary(self, name: str) -> Path:
        return self.folder / "venv/bin" / name

    def find(self, name: str) -> Path:
        """A file somewhere in the folder. Raises InstallError where there is none."""
        for found in sorted(self.folder.rglob(name)):
            return found
        raise InstallError(f"no {name} in {self.folder}", self.log)

    def metadata(self, distribution: str) -> Message:
        (found,) = importlib.metadata.distributions(name=distribution, path=[str(self.site_packages)])
        return found.metadata

    def make_environment(self) -> None:
        self.run(sys.executable, "-m", "venv", "venv")

    def pip(self, *arguments: str) -> None:
        self.run(self.python, "-m", "pip", "install", "--no-input", "--progress-bar", "off", *arguments)

    def debian(self, package: str) -> None:
        """Unpacks a package of the system's distribution into the folder; installs nothing outside it."""
        self.run("apt-get", "download", package)
        self.run("sh", "-c", f"dpkg-deb -x {package}_*.deb debian")

    def unpack(self, archive: str, into: str) -> None:
        def extract() -> None:
            with tarfile.open(self.folder / archive) as tar:
                members = [each.replace(name=each.name.partition("/")[2]) for each in tar if "/" in each.name]
                tar.extractall(self.folder / into, members, filter="data")

        self.once(f"unpack {archive} into {into}", extract)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *command: str | Path) -> None:
        """Runs a command in the folder, its output added to the log. Raises InstallError when it fails."""
        words = list(map(str, command))

        def call() -> None:
            with self.log.open("ab") as log:
                status = subprocess.run(words, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            if status.returncode:
                raise InstallError(f"{' '.join(words)[:200]}: status {status.returncode}", self.log)

        self.once(" ".join(words), call)

    def once(self, step: str, do: Callable[[], None]) -> None:
        """Does a step that was not done yet, and notes it; a step is known by its words."""
        done = self.folder / ".done" / hashlib.sha256(step.encode()).hexdigest()[:16]
        if done.exists():
            return
        done.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            print(f"\n{time.strftime('%H:%M:%S')} $ {step}", file=log)
        do()
        done.write_text(step + "\n")
