"""docs/votes.md names every format and every reason."""

from __future__ import annotations

from pathlib import Path

from app.votes.formats import FORMATS, format_named
from db.decisions import REASONS

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "votes.md").read_text(encoding="utf-8")


def test_every_format_has_its_row_and_says_where_it_is_documented():
    assert all(f"| `{name}` |" in PAGE for name in FORMATS)
    assert all(format_named(name).documented and format_named(name).name == name for name in FORMATS)


def test_every_reason_is_explained():
    assert all(f"`{reason}`" in PAGE for reason in REASONS)
