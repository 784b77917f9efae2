"""The alarm: of the newest votes suddenly fewer count than did before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

NEWEST, BEFORE = 50, 500
LEVEL = 0.001  # how rarely the alarm may ring by chance alone


@dataclass(frozen=True)
class Alarm:
    """Shares of votes that counted, and the chance of such a drop if nothing had changed (Fisher's exact test)."""

    newest: float
    before: float
    p: float


def alarm(counted: Sequence[bool]) -> Alarm | None:
    """`counted`: of the votes in their order, whether each counts; the last NEWEST against up to BEFORE before them."""
    newest, before = counted[-NEWEST:], counted[-NEWEST - BEFORE : -NEWEST]
    if len(newest) < NEWEST or len(before) < NEWEST:
        return None
    total, good = len(newest) + len(before), sum(newest) + sum(before)
    as_few = sum(comb(good, k) * comb(total - good, len(newest) - k) for k in range(sum(newest) + 1))
    p = as_few / comb(total, len(newest))
    if p >= LEVEL:
        return None
    return Alarm(sum(newest) / len(newest), sum(before) / len(before), p)
