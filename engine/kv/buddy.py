"""The buddy allocator: contiguous runs of a power of two units, as older serving systems place their reservations.

A free run is split in half until it fits; a run given back joins its buddy where that is free too. The place of a run
is a multiple of its size, so units that are no power of two begin as one run for each bit. Knows no pages.
"""

from __future__ import annotations


class Buddy:
    """`total` units, from 0 on. `free[order]`: the firsts of the free runs of 2**order units."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free: list[set[int]] = [set() for _ in range(total.bit_length())]
        first = 0
        for order in reversed(range(total.bit_length())):
            if total >> order & 1:
                self.free[order].add(first)
                first += 1 << order
        self.largest = 1 << (total.bit_length() - 1) if total else 0  # units that one run can have at most

    def fits(self, units: int) -> bool:
        return any(self.free[order_of(units) :])

    def take(self, units: int) -> int | None:
        """The first unit of a run that holds `units`; None where no free run is long enough."""
        wanted = order_of(units)
        order = next((order for order in range(wanted, len(self.free)) if self.free[order]), None)
        if order is None:
            return None
        first = self.free[order].pop()
        while order > wanted:
            order -= 1
            self.free[order].add(first + (1 << order))
        return first

    def give(self, first: int, units: int) -> None:
        """The opposite of `take`, with the same `units`."""
        order = order_of(units)
        while order < len(self.free) and (first ^ (1 << order)) in self.free[order]:
            self.free[order].remove(first ^ (1 << order))
            first &= ~(1 << order)
            order += 1
        self.free[order].add(first)


def order_of(units: int) -> int:
    """The run of 2**order units is the shortest that holds `units`."""
    return max(units - 1, 0).bit_length()
