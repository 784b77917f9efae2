"""Numbers in English sentences: "1 vote", "2,000 votes"."""

from __future__ import annotations


def many(count: int, one: str, more: str = "") -> str:
    """`one` is the noun for a single one; `more` that for several, where it is not just an s longer."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"
