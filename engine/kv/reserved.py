"""Contiguous reservation, as before PagedAttention: the policies `max`, `pow2` and `oracle`. Knows no scheduler.

A sequence is given, when it is admitted, one run of blocks for the longest text it may become, and keeps it whole until
it ends; nothing is shared, nothing grows, nothing is preempted. Kernels and page tables are those of the paged policy:
only admission differs. The rules are those of the paper's Orca variants (PagedAttention, section 6.1), placed by a
buddy allocator as there:

    max     the longest text the model allows
    pow2    the prompt, and the power of two that holds the answer
    oracle  the prompt and the answer: what nobody knows before the end. Here it is the request's `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import CheckpointError
from engine.kv.blocks import Block
from engine.kv.buddy import Buddy, order_of
from engine.kv.geometry import KVGeometry, blocks_of
from engine.kv.manager import BlockTable, CheckpointKV, KVManager, Turn, require
from engine.kv.page_map import PageMap
from engine.kv.pool import PagePool
from engine.sequence import Sequence

# Tokens to reserve for (prompt, answer, the longest that is allowed); never more than that longest.
RULES: dict[str, Callable[[int, int, int], int]] = {
    "max": lambda prompt, answer, longest: longest,
    "pow2": lambda prompt, answer, longest: min(prompt + (1 << order_of(answer)), longest),
    "oracle": lambda prompt, answer, longest: prompt + answer,
}
POLICIES = ("paged", *RULES)


def kv_manager(policy: str, pool: PagePool, *, share_prefixes: bool = True, **options) -> KVManager:
    """The manager of one of POLICIES. The contiguous ones never share."""
    if policy == "paged":
        return KVManager(pool, share_prefixes=share_prefixes, **options)
    return ReservedKV(pool, RULES[policy], **options)


class ReservedKV(KVManager):
    """One array of slots of one shape, as in the systems it stands for: its unit is a block of the first checkpoint,
    and another checkpoint is taken only with blocks of the same size. What the buddy allocator rounds a run up to stays
    free in the pool's books and is of no use to anybody: external fragmentation."""

    def __init__(
        self,
        pool: PagePool,
        rule: Callable[[int, int, int], int],
        *,
        chunk_tokens: int,
        page_map: PageMap | None = None,
    ) -> None:
        super().__init__(pool, chunk_tokens=chunk_tokens, share_prefixes=False, page_map=page_map)
        self.runs: dict[BlockTable, tuple[int, int]] = {}  # first unit, units
        self._rule = rule
        self._buddy = Buddy(0)
        self._unit_pages = 0

    def add_checkpoint(
        self, digest: str, geometry: KVGeometry, context_length: int | None = None, turn: Turn | None = None
    ) -> CheckpointKV:
        space = super().add_checkpoint(digest, geometry, context_length, turn)
        if len(self.spaces) == 1:
            self._unit_pages = space.pages_per_bundle
            self._buddy = Buddy(self.pool.total // self._unit_pages)
        elif space.pages_per_bundle != self._unit_pages:
            self.remove_checkpoint(space)
            raise CheckpointError(
                f"its blocks take {space.pages_per_bundle} pages; under a contiguous policy the pool is divided into "
                f"blocks of {self._unit_pages} pages, for the checkpoint that came first: use the policy paged"
            )
        return space

    def reserved_tokens(self, sequence: Sequence) -> int:
        """What the rule reserves for it, before any rounding."""
        longest = self._buddy.largest * sequence.space.block_tokens
        longest = min(sequence.space.context_length or longest, longest)
        prompt = sequence.prompt_length
        return max(sequence.limit, self._rule(prompt, sequence.limit - prompt, longest))

    # The questions

    def longest(self, space: CheckpointKV, tokens: int, pin: BlockTable | None = None) -> int:
        return min(tokens, self._buddy.largest * space.block_tokens)

    def admit(self, sequence: Sequence, *, alone: bool) -> bool:
        if not self._reserve(sequence):
            return False
        sequence.cached_tokens = 0
        return True

    def admits(self, sequence: Sequence) -> bool:
        return self._buddy.fits(blocks_of(self.reserved_tokens(sequence), sequence.space.block_tokens))

    def give_back(self, sequence: Sequence) -> None:
        """Nothing: what was reserved stays so to the end."""

    def fork(self, sequence: Sequence, child: Sequence) -> bool:
        """`child` gets a run of its own, and a copy of all that `sequence` has computed."""
        if not self._reserve(child):
            return False
        blocks = blocks_of(sequence.computed, sequence.space.block_tokens)
        for source, target in zip(sequence.table.pages, child.table.pages, strict=True):
            self.pool.copy(source[:blocks].reshape(-1), target[:blocks].reshape(-1))
        child.computed = sequence.computed
        return True

    # Private

    def _reserve(self, sequence: Sequence) -> bool:
        units = blocks_of(self.reserved_tokens(sequence), sequence.space.block_tokens)
        first = self._buddy.take(units)
        if first is None:
            return False
        table = BlockTable(sequence.space, self._blocks_of_run(sequence.space, first, units), units, promised=0)
        table.published = 0
        self.runs[table] = first, units
        self.tables[sequence] = sequence.table = table
        return True

    def _blocks_of_run(self, space: CheckpointKV, first: int, units: int) -> list[list[Block]]:
        """Per group its blocks: each unit of the run is a block of every group, one after the other."""
        pages = self.pool.take_run(first * self._unit_pages, units * self._unit_pages).reshape(units, -1)
        columns, start = [], 0
        for group in space.groups:
            end = start + group.pages_per_block
            columns.append([self.blocks.hold(group, row[start:end]) for row in pages])
            start = end
        return columns

    def _release_table(self, table: BlockTable) -> None:
        super()._release_table(table)
        self._buddy.give(*self.runs.pop(table))

    # Invariants

    def check_integrity(self, *, idle: bool = False) -> None:
        """Also: every unit is in one free run or one reservation, and a reservation's pages lie in its run."""
        super().check_integrity(idle=idle)
        require(set(self.runs) == set(self.tables.values()), "a run and a table lack each other")
        taken = [(first, order_of(units)) for first, units in self.runs.values()]
        free = [(first, order) for order, firsts in enumerate(self._buddy.free) for first in firsts]
        end = 0
        for first, order in sorted(taken + free):
            require(first == end and first % (1 << order) == 0, "a unit is lost or in two runs")
            end = first + (1 << order)
        require(end == self._buddy.total, "a unit is lost or in two runs")
        for table, (first, units) in self.runs.items():
            require(table.capacity == units * table.block_tokens, "a table is shorter or longer than its run")
            pages = sorted(int(page) for block in table.held() for page in block.pages)
            begin = first * self._unit_pages
            require(pages == list(range(begin, begin + units * self._unit_pages)), "a table has pages of another's run")
