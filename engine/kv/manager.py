"""Who holds which blocks: one table a sequence, filled as it grows and emptied when it ends. Knows no scheduler.

This is the *paged* policy of allocation; `reserved` holds the others. It is asked five things: how long can a
request become at all (`longest`), may it start (`admit`), may it compute n tokens more (`grow`), it computed them
(`commit`), it is gone (`release`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.kv.blocks import Block, BlockGroup, Blocks, IntegrityError
from engine.kv.geometry import KVGeometry, blocks_of, first_seen_block
from engine.kv.page_map import PageMap
from engine.kv.pool import PagePool
from engine.kv.prefix_cache import NothingShared, PrefixCache, root_hash
from engine.sequence import Sequence

WATERMARK = 0.01  # share of the pool that an admission leaves untouched, for those that run to grow into
MOST_PINNED = 0.5  # share of the pool that system prompts may take for good


class Turn:
    """Who takes turns at the forward: checkpoints with the same one, over the same weights, are computed together."""

    def __init__(self) -> None:
        self.last = 0  # number of the step that was theirs


@dataclass(eq=False)
class CheckpointKV:
    """What the pool knows of one loaded checkpoint."""

    geometry: KVGeometry
    groups: tuple[BlockGroup, ...]
    cache: PrefixCache | NothingShared
    context_length: int | None = None  # tokens that it was made for
    turn: Turn = field(default_factory=Turn)

    def __post_init__(self) -> None:
        self.block_tokens = self.geometry.block_tokens
        self.has_windows = any(group.window is not None for group in self.groups)
        self.pages_per_bundle = sum(group.pages_per_block for group in self.groups)  # one block of each group

    def most_pages(self, tokens: int, chunk_tokens: int) -> int:
        """The most pages that a sequence of `tokens` tokens holds at once."""
        shapes = zip(self.groups, self.geometry.groups, strict=True)
        return sum(group.pages_per_block * shape.most_blocks(tokens, chunk_tokens) for group, shape in shapes)


class BlockTable:
    """What one sequence, or one pinned prefix, holds: per layer group its blocks, and their pages as kernels read them.

    Blocks stand at their place in the sequence; those below a window are None, and -1 in `pages`
    (int32 [block, page_in_block], longer than needed).
    """

    __slots__ = ("block_tokens", "blocks", "capacity", "first", "found", "pages", "promised", "published", "space")

    def __init__(self, space: CheckpointKV, blocks: list[list[Block | None]], room: int, promised: int) -> None:
        self.space = space
        self.blocks = blocks
        self.block_tokens = space.block_tokens
        self.capacity = len(blocks[0]) * self.block_tokens  # tokens
        self.published = len(blocks[0])  # blocks, from the start, that are full and published
        self.first = [sum(block is None for block in column) for column in blocks]  # per group the first one held
        self.promised = promised  # pages that it may still count on to finish its prompt
        self.found = 0  # pages of blocks that others held already
        self.pages = [np.full((room, group.pages_per_block), -1, np.int32) for group in space.groups]
        for pages, column in zip(self.pages, blocks, strict=True):
            for index, block in enumerate(column):
                if block is not None:
                    pages[index] = block.pages

    def append(self, bundle: list[Block]) -> None:
        index = len(self.blocks[0])
        for group, block in enumerate(bundle):
            if index == len(self.pages[group]):
                self.pages[group] = np.concatenate([self.pages[group], np.full_like(self.pages[group], -1)])
            self.blocks[group].append(block)
            self.pages[group][index] = block.pages
        self.capacity += self.block_tokens

    def pop(self) -> list[Block]:
        """The opposite of `append`."""
        for pages in self.pages:
            pages[len(self.blocks[0]) - 1] = -1
        self.capacity -= self.block_tokens
        return [column.pop() for column in self.blocks]

    def put(self, group: int, index: int, block: Block | None) -> None:
        self.blocks[group][index] = block
        self.pages[group][index] = -1 if block is None else block.pages

    def held(self) -> list[Block]:
        """Every reference this table counts for."""
        return present(self.blocks)

    @property
    def own_pages(self) -> int:
        """Pages it holds beside those that others held already."""
        columns = zip(self.blocks, self.first, self.space.groups, strict=True)
        held = sum((len(column) - first) * group.pages_per_block for column, first, group in columns)
        return max(0, held - self.found)


class KVManager:
    def __init__(
        self, pool: PagePool, *, chunk_tokens: int, share_prefixes: bool = True, page_map: PageMap | None = None
    ) -> None:
        self.pool = pool
        self.blocks = Blocks(pool, page_map)
        self.tables: dict[Sequence, BlockTable] = {}  # of the sequences that run
        self.pins: dict[BlockTable, int] = {}  # and how many tokens each holds
        self.spaces: set[CheckpointKV] = set()
        self.pinned_pages = 0  # of distinct blocks
        self.promised_pages = 0
        self.window_blocks_freed = 0
        self.cached_tokens_served = 0
        self._chunk_tokens = chunk_tokens
        self._watermark_pages = int(WATERMARK * pool.total)
        self.share_prefixes = share_prefixes
        self._cache_type = PrefixCache if share_prefixes else NothingShared

    # Checkpoints

    def add_checkpoint(
        self, digest: str, geometry: KVGeometry, context_length: int | None = None, turn: Turn | None = None
    ) -> CheckpointKV:
        """Raises CheckpointError where this pool's pages are too small for it."""
        shapes = geometry.groups
        groups = tuple(BlockGroup(shape.window, shape.pages_per_block(self.pool.page_bytes)) for shape in shapes)
        cache = self._cache_type(root_hash(digest, geometry), groups, self.blocks, geometry.block_tokens)
        space = CheckpointKV(geometry, groups, cache, context_length, turn or Turn())
        self.spaces.add(space)
        return space

    def remove_checkpoint(self, space: CheckpointKV) -> None:
        """Gives back all it has cached; its sequences and pins must be gone."""
        if any(group.live_blocks for group in space.groups):
            raise IntegrityError("a checkpoint was removed while its blocks were in use")
        for group in space.groups:
            for block in list(group.published.values()):
                self.blocks.evict(block)
        self.spaces.remove(space)

    # The five questions

    def longest(self, space: CheckpointKV, tokens: int, pin: BlockTable | None = None) -> int:
        """The most tokens, up to `tokens`, that one sequence can reach in this pool beside what is pinned.

        `pin` is the prefix it shares, if any: its full blocks, but those under a window, which the sequence leaves
        behind. Safe to call from any thread.
        """
        shared = pin.published * sum(each.pages_per_block for each in space.groups if each.window is None) if pin else 0
        possible = self.pool.total - self.pinned_pages + shared
        if space.most_pages(tokens, self._chunk_tokens) <= possible:
            return tokens
        return bisect_right(range(1, tokens), possible, key=lambda length: space.most_pages(length, self._chunk_tokens))

    def admit(self, sequence: Sequence, *, alone: bool) -> bool:
        """Takes the cached part of the sequence if the rest of it and one block more fit beside what others were
        promised and a watermark. `alone`: nobody runs, so nobody needs to be left anything."""
        blocks, missing, fits = self._plan(sequence, alone)
        if not fits:
            return False
        self._take(sequence, blocks, missing)
        if not sequence.scored:
            self._copy_begun(sequence)
        if sequence.cached_tokens is None:
            self._count_served(sequence, 0, sequence.computed)
        return True

    def admits(self, sequence: Sequence) -> bool:
        """Whether `admit` would say yes beside those that run; takes nothing."""
        return self._plan(sequence, alone=False)[2]

    def needs(self, sequence: Sequence) -> int:
        """Pages that it would hold of its own if it was admitted and took all it is promised."""
        blocks, missing, _ = self._plan(sequence, alone=False)
        return missing + pages_at_rest(blocks)

    def shortage(self, sequence: Sequence) -> int:
        """Pages that are lacking for it to be admitted beside those that run; 0 or less where none are."""
        return self.needs(sequence) + self.promised_pages + self._watermark_pages - self.blocks.available_pages

    def released_by(self, sequences: list[Sequence]) -> int:
        """Pages that nobody would hold or be promised any more without these that run."""
        references = Counter(block for sequence in sequences for block in sequence.table.held())
        freed = sum(b.group.pages_per_block for b, count in references.items() if b.references == count)
        return freed + sum(sequence.table.promised for sequence in sequences)

    def rematch(self, sequence: Sequence) -> None:
        """Lets a sequence that prefills skip what others have published since it was admitted."""
        cache = sequence.space.cache
        hit = cache.match(sequence)
        if hit * sequence.space.block_tokens > sequence.computed:
            old, computed = sequence.table, sequence.computed
            blocks = cache.held(sequence, hit)
            self._take(sequence, blocks, self._pages_to_finish(sequence, blocks))
            self._release_table(old)
            sequence.table.found = sum(b.group.pages_per_block for b in present(blocks) if b.references > 1)
            self._count_served(sequence, computed, sequence.computed)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Makes room for the KV of `tokens` tokens more; False, and nothing taken, where the pages do not suffice."""
        table = sequence.table
        end = sequence.computed + tokens
        if end <= table.capacity:
            return True
        if table.space.has_windows:
            self._drop_below_windows(table, sequence.computed)
        missing = blocks_of(end - table.capacity, table.block_tokens)
        pages = missing * table.space.pages_per_bundle
        if pages > self.blocks.available_pages:
            return False
        for _ in range(missing):
            table.append([self.blocks.allocate(group) for group in table.space.groups])
        self._keep_promise(table, pages)
        return True

    def give_back(self, sequence: Sequence) -> None:
        """Frees the blocks that were taken for tokens that were guessed wrong."""
        table = sequence.table
        while table.capacity - table.block_tokens >= sequence.computed:
            for block in table.pop():
                self.blocks.release(block)

    def commit(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` tokens more have their KV: what became full is published. Content that someone published before is
        shared from here on, and the duplicate given back."""
        sequence.computed += tokens
        table = sequence.table
        full = sequence.computed // table.block_tokens
        for index in range(table.published, full):
            for group, column in enumerate(table.blocks):
                if (block := column[index]) is not None:
                    self._hold_published(table, group, index, table.space.cache.publish(sequence, block, index))
        table.published = full

    def fork(self, sequence: Sequence, child: Sequence) -> bool:
        """Gives `child` all that `sequence` has computed: the full blocks by reference, for nobody writes to them any
        more, the begun one as a copy of its own. False, and nothing taken, where there are no pages for the copy."""
        table = sequence.table
        full = sequence.computed // table.block_tokens
        begun = sequence.computed > full * table.block_tokens
        if begun and table.space.pages_per_bundle > self.blocks.available_pages:
            return False
        self._take(child, [column[:full] for column in table.blocks], promised=0)
        if begun:
            copies = [self.blocks.allocate(group) for group in table.space.groups]
            for column, copy in zip(table.blocks, copies, strict=True):
                self.pool.copy(column[full].pages, copy.pages)
            child.table.append(copies)
        child.computed = sequence.computed
        return True

    def release(self, sequence: Sequence, *, in_doubt: bool = False) -> None:
        """Drops all the sequence holds, the tail first so that it is evicted first. `in_doubt`: nobody shall find the
        content that it alone holds."""
        table = self.tables.pop(sequence, None)
        if table is None:
            return
        if in_doubt:
            for block in table.held():
                if block.references == 1:
                    self.blocks.unpublish(block)
        self._release_table(table)
        sequence.known = max(sequence.known, sequence.computed)
        sequence.table, sequence.computed = None, 0

    # Pinned prefixes

    def pin(self, sequence: Sequence) -> BlockTable | None:
        """Keeps the blocks of a fully computed sequence until `unpin`: all that a later hit at its end needs, which is
        given a copy of the last one where that is only begun. The sequence holds nothing afterwards. None, where that
        is too much of the pool."""
        table = sequence.table
        begun = sequence.computed - table.published * table.block_tokens
        self._drop_below_windows(table, sequence.computed - begun)
        if begun:
            for group, column in enumerate(table.blocks):
                found = table.space.cache.publish_begun(sequence, column[-1], table.published, begun)
                self._hold_published(table, group, table.published, found)
        pages = pages_of([*self.pins, table])
        if pages > MOST_PINNED * self.pool.total:
            return None
        self._keep_promise(table, table.promised)
        self.pins[table] = sequence.computed
        for block in table.held():
            self.blocks.pin(block)
        self.pinned_pages = pages
        del self.tables[sequence]
        sequence.table = None
        return table

    def unpin(self, table: BlockTable) -> None:
        del self.pins[table]
        for block in table.held():
            self.blocks.pin(block, -1)
        self._release_table(table)
        self.pinned_pages = pages_of(self.pins)

    # Figures

    def slot_utilisation(self) -> float:
        """Share of the slots of live blocks that hold a token, weighted by bytes; 1 where nothing is live."""
        slots = sum(
            group.live_blocks * group.pages_per_block * space.block_tokens
            for space in self.spaces
            for group in space.groups
        )
        filled = [(table, sequence.computed) for sequence, table in self.tables.items()] + list(self.pins.items())
        empty = sum((table.capacity - tokens) * table.space.pages_per_bundle for table, tokens in filled)
        return 1 - empty / slots if slots else 1.0

    def used_pages(self) -> int:
        return self.pool.total - self.blocks.available_pages

    # Invariants

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raises IntegrityError unless every page is free or of one block, every block live or cached, and every
        reference in a table counted once; when `idle`, only pins may hold anything."""
        require(not (idle and self.tables), "nothing runs, but blocks are held")
        held = Counter(block for table in [*self.tables.values(), *self.pins] for block in table.held())
        cached = self.blocks.cached
        require(held.keys().isdisjoint(cached), "a cached block stands in a table")
        require(all(block.references == count for block, count in held.items()), "references differ from the tables")
        require(all(block.references == 0 for block in cached), "a cached block has references")
        known = [*held, *cached]
        pages = np.concatenate([self.pool.free_pages, *(block.pages for block in known)])
        require(np.array_equal(np.sort(pages), np.arange(self.pool.total)), "a page is lost or has two owners")
        require(self.pinned_pages == pages_of(self.pins), "pinned pages are miscounted")
        require(self.blocks.shared == sum(count > 1 for count in held.values()), "shared blocks are miscounted")
        require(
            self.blocks.cached_pages == sum(block.group.pages_per_block for block in cached),
            "cached pages are miscounted",
        )
        require(self.promised_pages == sum(table.promised for table in self.tables.values()), "promises are miscounted")
        for block in known:
            require(block.hash is None or block.group.published.get(block.hash) is block, "a block has a stale hash")
        published = sum(len(group.published) for space in self.spaces for group in space.groups)
        require(published == sum(block.hash is not None for block in known), "a hash leads to a freed block")
        for table in [*self.tables.values(), *self.pins]:
            check_table(table)

    # Private

    def _plan(self, sequence: Sequence, alone: bool) -> tuple[list[list[Block | None]], int, bool]:
        """The cached blocks it would begin with, the pages it would be promised, and whether they fit."""
        cache = sequence.space.cache
        blocks = cache.held(sequence, 0 if sequence.scored else cache.match(sequence))
        missing = self._pages_to_finish(sequence, blocks)
        spare = 0 if alone else self.promised_pages + self._watermark_pages
        return blocks, missing, missing + pages_at_rest(blocks) + spare <= self.blocks.available_pages

    def _take(self, sequence: Sequence, blocks: list[list[Block | None]], promised: int) -> None:
        """Gives the sequence a table of these cached blocks."""
        table = BlockTable(
            sequence.space, blocks, blocks_of(sequence.length, sequence.space.block_tokens) + 2, promised
        )
        table.found = sum(block.group.pages_per_block for block in present(blocks) if block.references)
        for block in present(blocks):
            self.blocks.retain(block)
        self.promised_pages += promised
        self.tables[sequence] = sequence.table = table
        sequence.computed = table.capacity

    def _copy_begun(self, sequence: Sequence) -> None:
        """Begins the block behind the cached ones with a copy of one that was kept half full, if there is such."""
        tokens, kept = sequence.space.cache.begun(sequence, len(sequence.table.blocks[0]))
        for block in kept:
            self.blocks.retain(block)  # or it could be evicted for the copy
        if kept and self.grow(sequence, tokens):
            for column, block in zip(sequence.table.blocks, kept, strict=True):
                self.pool.copy(block.pages, column[-1].pages)
            sequence.computed += tokens
        for block in kept:
            self.blocks.release(block)

    def _hold_published(self, table: BlockTable, group: int, index: int, found: Block) -> None:
        """Has a table hold the one that is found by the hash of its block's content; a duplicate is given back."""
        block = table.blocks[group][index]
        if found is not block:
            self.blocks.retain(found)
            self.blocks.release(block)
            table.put(group, index, found)

    def _count_served(self, sequence: Sequence, start: int, end: int) -> None:
        """Of the prompt of a request, and once: what a preempted one finds again was computed or served before."""
        if sequence.limit == sequence.prompt_length:
            return  # a system prompt on its way to be pinned
        start, end = max(start, sequence.known), min(end, sequence.prompt_length)
        served = max(0, end - start)
        sequence.cached_tokens = (sequence.cached_tokens or 0) + served
        self.cached_tokens_served += served

    def _pages_to_finish(self, sequence: Sequence, blocks: list[list[Block | None]]) -> int:
        """Pages that the sequence takes at most beside these blocks, until it has one block to decode into."""
        length = min(sequence.length + sequence.space.block_tokens, sequence.limit)
        pages = sequence.space.most_pages(length, self._chunk_tokens)
        return max(0, pages - sum(block.group.pages_per_block for block in present(blocks)))

    def _keep_promise(self, table: BlockTable, pages: int) -> None:
        kept = min(pages, table.promised)
        table.promised -= kept
        self.promised_pages -= kept

    def _drop_below_windows(self, table: BlockTable, position: int) -> None:
        """Lets go of the blocks that neither the token at `position` nor any later one sees."""
        for number, group in enumerate(table.space.groups):
            seen = min(first_seen_block(group.window, position, table.block_tokens), len(table.blocks[number]))
            for index in range(table.first[number], seen):
                self.blocks.release(table.blocks[number][index])
                table.put(number, index, None)
                self.window_blocks_freed += 1
            table.first[number] = max(seen, table.first[number])

    def _release_table(self, table: BlockTable) -> None:
        self._keep_promise(table, table.promised)
        for bundle in zip(*(reversed(column) for column in table.blocks), strict=True):
            for block in bundle:
                if block is not None:
                    self.blocks.release(block)


def present(blocks: list[list[Block | None]]) -> list[Block]:
    return [block for column in blocks for block in column if block is not None]


def pages_at_rest(blocks: list[list[Block | None]]) -> int:
    """Pages of those that nobody holds now."""
    return sum(block.group.pages_per_block for block in present(blocks) if block.references == 0)


def pages_of(tables: Iterable[BlockTable]) -> int:
    """Pages of the distinct blocks."""
    return sum(block.group.pages_per_block for block in {block for table in tables for block in table.held()})


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(otherwise)


def check_table(table: BlockTable) -> None:
    for pages, column, first in zip(table.pages, table.blocks, table.first, strict=True):
        require(len(column) * table.block_tokens == table.capacity, "a table's groups differ in length")
        require(all((block is None) == (i < first) for i, block in enumerate(column)), "a table has a hole")
        for index, block in enumerate(column):
            expected = -1 if block is None else block.pages
            require(bool(np.all(pages[index] == expected)), "a page table differs from the blocks")
        require(bool(np.all(pages[len(column) :] == -1)), "a page table is longer than its blocks")
