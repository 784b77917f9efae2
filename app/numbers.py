"""Numbers in English sentences ("1 vote", "2,000 votes") and along the axes of plots."""

from __future__ import annotations

import math


def many(count: int, one: str, more: str = "") -> str:
    """`one` is the noun for a single one; `more` that for several, where it is not just an s longer."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def axis_numbers(low: float, high: float, most: int = 8) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high` (which is greater), about `most` at most."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(n * step, 12) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
