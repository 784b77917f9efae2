"""Where the real votes and right values lie; they are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("ARENA_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def shared_data(name: str) -> Path:
    """The path of `name` under the data folder; skips the calling test where the data is absent."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{name} is not at {ROOT}; set ARENA_SHARED_DATA to the folder that holds it")
    return path
