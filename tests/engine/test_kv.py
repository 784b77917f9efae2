"""Pages, blocks, prefixes and tables, without an engine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.blocks import Block, IntegrityError
from engine.kv.geometry import first_seen_block
from engine.kv.manager import KVManager
from engine.kv.pool import PagePool
from engine.kv.prefix_cache import root_hash, salted
from engine.sequence import Sequence
from kernels.spec import BLOCK_TOKENS
from tests.engine.fake_runner import FULL, HYBRID, PAGE_BYTES, SLIDING, TWO_WINDOWS

LONG = list(range(100, 200))


def manager(pages: int, chunk_tokens: int = 512, **options) -> KVManager:
    return KVManager(PagePool(pages, PAGE_BYTES), chunk_tokens=chunk_tokens, **options)


def compute(kv: KVManager, space, prompt, max_tokens: int = 0) -> Sequence:
    """A sequence whose prompt has its KV."""
    sequence = Sequence(space, prompt, max_tokens)
    assert kv.admit(sequence, alone=True)
    assert kv.grow(sequence, sequence.uncomputed)
    kv.commit(sequence, sequence.uncomputed)
    kv.check_integrity()
    return sequence


def hit(kv: KVManager, space, prompt) -> int:
    return space.cache.match(Sequence(space, prompt, 20))


def test_released_blocks_are_found_again_until_their_pages_are_needed():
    kv = manager(pages=20)
    space = kv.add_checkpoint("a", FULL)
    kv.release(compute(kv, space, LONG[:64]))
    assert hit(kv, space, LONG[:65]) == 4
    kv.release(compute(kv, space, list(range(160))))  # 20 pages: all there are
    assert hit(kv, space, LONG[:65]) == 0


def test_the_oldest_cached_block_of_any_checkpoint_goes_first():
    kv = manager(pages=12)
    first, second = kv.add_checkpoint("a", FULL), kv.add_checkpoint("b", FULL)
    kv.release(compute(kv, first, LONG[:32]))
    kv.release(compute(kv, second, LONG[:32]))
    compute(kv, second, [1] * 64)  # 8 of 12 pages
    assert (hit(kv, first, LONG[:33]), hit(kv, second, LONG[:33])) == (0, 2)


def test_the_tail_of_a_sequence_goes_before_its_head():
    kv = manager(pages=10)
    space = kv.add_checkpoint("a", FULL)
    kv.release(compute(kv, space, LONG[:80]))
    compute(kv, space, [1] * 16)
    assert hit(kv, space, LONG[:81]) == 4


def test_a_hit_makes_a_prefix_young_again():
    kv = manager(pages=12)
    space = kv.add_checkpoint("a", FULL)
    kv.release(compute(kv, space, LONG[:32]))
    kv.release(compute(kv, space, [1] * 32))
    kv.release(compute(kv, space, [*LONG[:32], 7]))
    kv.release(compute(kv, space, [2] * 64))
    assert (hit(kv, space, LONG[:33]), hit(kv, space, [1] * 33)) == (2, 0)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_prompt_of_whole_blocks_leaves_its_last_token_to_compute(blocks):
    kv = manager(pages=40)
    space = kv.add_checkpoint("a", FULL)
    prompt = LONG[: blocks * BLOCK_TOKENS]
    kv.release(compute(kv, space, prompt))
    again = Sequence(space, prompt, 20)
    assert kv.admit(again, alone=True)
    assert again.computed == (blocks - 1) * BLOCK_TOKENS


def test_a_hit_is_not_evicted_to_make_room_for_the_rest_of_its_prompt():
    kv = manager(pages=12)
    space = kv.add_checkpoint("a", FULL)
    kv.release(compute(kv, space, LONG[:48]))  # 6 pages, the oldest
    kv.release(compute(kv, space, [1] * 48))  # 6 pages: none is free
    longer = Sequence(space, [*LONG[:48], *range(40)], 1)  # 6 pages it finds, 6 it must take
    assert kv.admit(longer, alone=True)
    assert longer.computed == 48
    assert kv.grow(longer, longer.uncomputed)
    kv.commit(longer, longer.uncomputed)
    kv.check_integrity()
    assert (hit(kv, space, LONG[:49]), hit(kv, space, [1] * 49)) == (3, 0)


def test_pages_that_a_prompt_would_take_from_its_own_hit_are_not_counted_as_free():
    kv = manager(pages=12)
    space = kv.add_checkpoint("a", FULL)
    kv.release(compute(kv, space, LONG[:48]))
    too_long = Sequence(space, [*LONG[:48], *range(60)], 1)
    assert not kv.admit(too_long, alone=True)
    kv.check_integrity()
    assert hit(kv, space, LONG[:49]) == 3


def test_checkpoints_never_find_each_others_prefixes():
    kv = manager(pages=40)
    first, second = kv.add_checkpoint("a", FULL), kv.add_checkpoint("b", FULL)
    kv.release(compute(kv, first, LONG[:64]))
    assert hit(kv, second, LONG[:65]) == 0


def test_the_root_of_all_hashes_stands_for_weights_windows_and_tenant():
    roots = [("a", FULL, ""), ("b", FULL, ""), ("a", HYBRID, ""), ("a", FULL, "tenant"), ("a", FULL, "\ud800")]
    assert len({salted(root_hash(digest, geometry), salt) for digest, geometry, salt in roots}) == len(roots)


def test_content_computed_twice_at_once_ends_up_in_one_block():
    kv = manager(pages=40)
    space = kv.add_checkpoint("a", HYBRID)
    pair = [Sequence(space, LONG[:40], 20) for _ in range(2)]
    for sequence in pair:
        assert kv.admit(sequence, alone=False)
        assert kv.grow(sequence, 40)
    before = kv.used_pages()
    for sequence in pair:
        kv.commit(sequence, 40)
    kv.check_integrity()
    assert before - kv.used_pages() == 2 * space.pages_per_bundle
    assert kv.blocks.shared == 4


def test_nothing_is_found_before_it_is_computed():
    kv = manager(pages=40)
    space = kv.add_checkpoint("a", FULL)
    sequence = Sequence(space, LONG[:64], 20)
    kv.admit(sequence, alone=True)
    kv.grow(sequence, 64)
    assert hit(kv, space, LONG[:64]) == 0
    kv.commit(sequence, 40)
    assert hit(kv, space, LONG[:64]) == 2


def test_what_a_failed_sequence_wrote_alone_is_not_found_and_what_it_shared_is():
    kv = manager(pages=60)
    space = kv.add_checkpoint("a", FULL)
    good = compute(kv, space, LONG[:32])
    bad = compute(kv, space, LONG[:64])
    kv.release(bad, in_doubt=True)
    kv.check_integrity()
    assert hit(kv, space, LONG[:65]) == 2
    kv.release(good)


@pytest.mark.parametrize("geometry", [HYBRID, SLIDING, TWO_WINDOWS])
def test_a_long_sequence_holds_no_more_than_its_windows(geometry):
    kv = manager(pages=400, chunk_tokens=16)
    space = kv.add_checkpoint("a", geometry)
    sequence = Sequence(space, [5], max_tokens=300)
    assert kv.admit(sequence, alone=True)
    for token in range(300):
        assert kv.grow(sequence, 1)
        kv.commit(sequence, 1)
        sequence.append(token)
        kv.check_integrity()
        assert kv.used_pages() <= space.most_pages(sequence.length, 16)
    assert kv.window_blocks_freed > 10


def test_a_block_that_leaves_the_window_of_one_sharer_stays_for_the_other():
    kv = manager(pages=100)
    space = kv.add_checkpoint("a", SLIDING)
    short, long = compute(kv, space, LONG[:33]), compute(kv, space, LONG[:33], max_tokens=100)
    for token in range(60):
        long.append(token)
        assert kv.grow(long, 1)
        kv.commit(long, 1)
        kv.check_integrity()
    assert short.table.blocks[0][0].references == 1
    kv.release(short)
    kv.release(long)
    kv.check_integrity()
    assert kv.used_pages() == 0


@given(data=st.data(), geometry=st.sampled_from([FULL, HYBRID, SLIDING, TWO_WINDOWS]))
def test_a_hit_is_the_longest_prefix_whose_visible_blocks_are_all_there(data, geometry):
    kv = manager(pages=200)
    space = kv.add_checkpoint("a", geometry)
    sequence = compute(kv, space, LONG)
    kv.release(sequence)
    for group in space.groups:
        there = list(group.published.values())
        for block in data.draw(st.lists(st.sampled_from(there), unique_by=id, max_size=len(there))):
            kv.blocks.evict(block)
    hashes = sequence.block_hashes

    def served(blocks: int) -> bool:
        firsts = [first_seen_block(group.window, blocks * BLOCK_TOKENS) for group in space.groups]
        return all(
            hashes[index] in group.published
            for group, first in zip(space.groups, firsts, strict=True)
            for index in range(first, blocks)
        )

    assert hit(kv, space, LONG) == max(blocks for blocks in range(7) if served(blocks))
    again = compute(kv, space, LONG)
    kv.release(again)


def test_a_hit_that_one_window_shortens_is_tried_again_on_the_others():
    kv = manager(pages=200)
    space = kv.add_checkpoint("a", TWO_WINDOWS)
    sequence = compute(kv, space, LONG)
    kv.release(sequence)
    _, narrow, wide = space.groups  # the narrow one sees one block before the next token, the wide one three
    for group, index in ((wide, 5), (narrow, 4)):
        kv.blocks.evict(group.published[sequence.block_hashes[index]])
    assert hit(kv, space, LONG) == 4


@pytest.mark.parametrize("geometry", [FULL, HYBRID, SLIDING, TWO_WINDOWS])
@pytest.mark.parametrize("chunk", [16, 48, 96])
def test_a_pinned_prefix_survives_any_pressure_and_is_hit_whole(geometry, chunk):
    kv = manager(pages=80, chunk_tokens=chunk)
    space = kv.add_checkpoint("a", geometry)
    prefix = Sequence(space, LONG[:96], 0)
    assert kv.admit(prefix, alone=True)
    while prefix.uncomputed:
        count = min(chunk, prefix.uncomputed)
        assert kv.grow(prefix, count)
        kv.commit(prefix, count)
    pin = kv.pin(prefix)
    kv.check_integrity()
    for start in range(20):
        kv.release(compute(kv, space, [start] * 64))
    assert kv.blocks.evictions > 0
    assert hit(kv, space, [*LONG[:96], 1]) == 6
    kv.unpin(pin)
    kv.check_integrity()
    assert kv.used_pages() == kv.pinned_pages == 0


@pytest.mark.parametrize("geometry", [FULL, HYBRID, SLIDING, TWO_WINDOWS])
@pytest.mark.parametrize("begun", [1, 9, 15])
def test_a_begun_block_that_is_pinned_is_copied_by_who_goes_on_from_it(geometry, begun):
    kv = manager(pages=200)
    space = kv.add_checkpoint("a", geometry)
    pin = kv.pin(compute(kv, space, LONG[: 64 + begun]))
    for number, column in enumerate(pin.blocks, 1):
        kv.pool.memory[column[4].pages] = number
    first, second = (compute(kv, space, [*LONG[: 64 + begun], *other], 1) for other in ([1, 2, 3], [4] * 20))
    for sequence in (first, second):
        assert sequence.cached_tokens == 64 + begun
        for column, kept in zip(sequence.table.blocks, pin.blocks, strict=True):
            assert column[3] is kept[3] and column[4] is not kept[4]
            assert np.array_equal(kv.pool.memory[column[4].pages], kv.pool.memory[kept[4].pages]), "not its content"
    for sequence in (first, second):
        kv.release(sequence)
    kv.unpin(pin)
    kv.check_integrity()
    assert kv.used_pages() == 0


def test_a_begun_block_is_copied_only_behind_the_same_tokens_and_for_the_same_tenant():
    kv = manager(pages=200)
    space = kv.add_checkpoint("a", FULL)
    kv.pin(compute(kv, space, LONG[:40]))
    other, within, salted_one = (Sequence(space, each, 5) for each in ([*LONG[:39], 0, 1], LONG[:40], LONG[:50]))
    salted_one.salt = "one"
    for sequence, found in ((other, 32), (within, 32), (salted_one, 0)):
        assert kv.admit(sequence, alone=True)
        assert sequence.cached_tokens == found


def test_the_longest_of_several_begun_blocks_is_copied():
    kv = manager(pages=200)
    space = kv.add_checkpoint("a", FULL)
    for length in (35, 44, 38):
        kv.pin(compute(kv, space, LONG[:length]))
    assert compute(kv, space, [*LONG[:44], 1], 1).cached_tokens == 44
    assert compute(kv, space, [*LONG[:43], 1], 1).cached_tokens == 38


def test_a_begun_block_is_not_evicted_for_its_own_copy():
    kv = manager(pages=10)
    space = kv.add_checkpoint("a", FULL)
    kv.unpin(kv.pin(compute(kv, space, LONG[:24])))  # two cached blocks, of two pages each
    compute(kv, space, [1] * 48)  # takes all the others
    sequence = compute(kv, space, LONG[:30], 1)
    assert sequence.cached_tokens == 16
    assert kv.pool.free == kv.blocks.cached_pages == 0


def test_a_request_can_become_as_long_as_the_pool_and_the_full_blocks_of_its_prefix_allow():
    kv = manager(pages=20)
    space = kv.add_checkpoint("a", FULL)
    pin = kv.pin(compute(kv, space, LONG[:40]))  # six pages, of which it shares four
    assert kv.longest(space, 4096, pin) == 144
    assert kv.longest(space, 4096) == 112


def test_blocks_of_a_prefix_that_a_window_leaves_behind_are_not_counted_on():
    kv = manager(pages=60)
    space = kv.add_checkpoint("a", HYBRID)
    pin = kv.pin(compute(kv, space, LONG[:64]))
    assert kv.pinned_pages == 4 + 2 * 3
    assert kv.longest(space, 4096, pin) == 208, "13 blocks of 4 pages, of which it shares 4 pages"


def test_a_prompt_that_loses_what_it_found_and_finds_it_again_counts_it_once():
    kv = manager(pages=40)
    space = kv.add_checkpoint("a", FULL)
    sequence = Sequence(space, LONG[:80], 5)
    for _ in range(2):
        assert kv.admit(sequence, alone=True) and sequence.computed == 0
        kv.release(compute(kv, space, LONG[:64]))
        kv.rematch(sequence)
        assert sequence.computed == sequence.cached_tokens == kv.cached_tokens_served == 64
        kv.release(sequence)  # preempted, and then all evicted
        kv.release(compute(kv, space, [1] * 320))


def test_removing_a_checkpoint_gives_back_all_its_pages():
    kv = manager(pages=60)
    first, second = kv.add_checkpoint("a", HYBRID), kv.add_checkpoint("b", FULL)
    kv.release(compute(kv, first, LONG[:64]))
    kv.release(compute(kv, second, LONG[:64]))
    kv.remove_checkpoint(first)
    kv.check_integrity()
    assert kv.pool.free == 60 - 8
    assert hit(kv, second, LONG[:65]) == 4


def test_admission_leaves_to_others_what_they_were_promised():
    kv = manager(pages=20)
    space = kv.add_checkpoint("a", FULL)
    first, second = Sequence(space, LONG[:96], 20), Sequence(space, [1] * 60, 20)
    assert kv.admit(first, alone=True)  # needs 14 pages, has taken none
    assert not kv.admit(second, alone=False)  # needs 10
    kv.release(first)
    assert kv.admit(second, alone=True)


def test_a_sequence_can_become_as_long_as_the_pool_is_large():
    kv = manager(pages=20)
    space = kv.add_checkpoint("a", FULL)
    assert kv.longest(space, 4096) == 160
    assert kv.longest(space, 50) == 50


def test_without_sharing_nothing_is_cached():
    kv = manager(pages=40, share_prefixes=False)
    space = kv.add_checkpoint("a", HYBRID)
    kv.release(compute(kv, space, LONG[:64]))
    assert kv.pool.free == 40


def test_allocation_costs_the_same_beside_many_cached_blocks():
    """Counts the Python calls of an eviction and an allocation: time would tell of the machine."""
    import sys

    def calls(cached_blocks: int) -> int:
        kv = manager(pages=2 * cached_blocks)
        space = kv.add_checkpoint("a", FULL)
        kv.release(compute(kv, space, np.arange(cached_blocks * BLOCK_TOKENS)))
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += 1

        sequence = Sequence(space, [1] * 40, 20)
        sys.setprofile(profile)
        kv.admit(sequence, alone=True)
        kv.grow(sequence, 40)
        kv.commit(sequence, 40)
        sys.setprofile(None)
        return count

    assert calls(20_000) < 1.2 * calls(200)


def with_two_sequences() -> KVManager:
    kv = manager(pages=60)
    space = kv.add_checkpoint("a", HYBRID)
    compute(kv, space, LONG[:40])
    compute(kv, space, [*LONG[:32], 1, 2])
    kv.release(compute(kv, space, [3] * 20))
    return kv


def first_block(kv: KVManager) -> Block:
    return next(iter(kv.tables.values())).blocks[0][0]


FAULTS = {
    "lost": lambda kv: kv.pool.take(1),
    "two owners": lambda kv: kv.pool.give(first_block(kv).pages),
    "references": lambda kv: setattr(first_block(kv), "references", 1),
    "cached block": lambda kv: kv.blocks.cached.update({first_block(kv): None}),
    "stale hash": lambda kv: setattr(first_block(kv), "hash", b"other"),
    "freed block": lambda kv: first_block(kv).group.published.update({b"x": first_block(kv)}),
    "page table differs": lambda kv: next(iter(kv.tables.values())).pages[0].fill(0),
    "shared": lambda kv: setattr(kv.blocks, "shared", 9),
    "cached pages": lambda kv: setattr(kv.blocks, "cached_pages", 9),
    "promises": lambda kv: setattr(kv, "promised_pages", 99),
    "hole": lambda kv: next(iter(kv.tables.values())).put(1, 1, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_integrity_check_finds_a_fault_in_the_books(fault):
    kv = with_two_sequences()
    kv.check_integrity()
    FAULTS[fault](kv)
    with pytest.raises(IntegrityError):
        kv.check_integrity()


def test_a_block_released_too_often_is_noticed_at_once():
    kv = manager(pages=10)
    block = kv.blocks.allocate(kv.add_checkpoint("a", FULL).groups[0])
    kv.blocks.release(block)
    with pytest.raises(IntegrityError):
        kv.blocks.release(block)
