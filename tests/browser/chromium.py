"""Finds the Chromium that the browser tests drive; as a command, installs one where there is none and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def find() -> Path | None:
    """ARENA_CHROMIUM, then a browser on PATH, then Playwright's own."""
    named = os.environ.get("ARENA_CHROMIUM")
    candidates = [named] if named else [shutil.which(name) for name in NAMES] + [_playwrights_own()]
    return next((Path(path) for path in candidates if path and Path(path).exists()), None)


def _playwrights_own() -> str:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return playwright.chromium.executable_path


def install() -> None:
    """Debian's package when root on a Debian system, Playwright's own build otherwise."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print("No Chromium found: installing Debian's package (apt-get install chromium).", flush=True)
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "-qq", "update"], env=quiet, check=True)
        subprocess.run(
            ["apt-get", "-qq", "install", "-y", "chromium"], env=quiet, check=True, stdout=subprocess.DEVNULL
        )
    else:
        print("No Chromium found: installing Playwright's own build (playwright install chromium).", flush=True)
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)


def main() -> int:
    """Exit status 1, and a word on what to do, where there is none that runs."""
    path = find()
    if path is None:
        try:
            install()
        except subprocess.CalledProcessError as error:
            print(f"That failed: {error}", file=sys.stderr)
        path = find()
    if path is None:
        print("No Chromium could be installed; set ARENA_CHROMIUM to one.", file=sys.stderr)
        return 1
    if said := _why_it_does_not_run(path):
        print(f"{path} does not run here: {said}", file=sys.stderr)
        print("As root: apt-get install chromium, or python -m playwright install-deps chromium", file=sys.stderr)
        return 1
    print(f"Browser tests use {path}")
    return 0


def _why_it_does_not_run(path: Path) -> str:
    """Playwright's own build comes without the libraries of the system that it needs."""
    try:
        subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=True)
    except subprocess.CalledProcessError as error:
        return error.stderr.strip() or f"exit status {error.returncode}"
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
