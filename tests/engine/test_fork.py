"""Sequences that go on from one prompt: full blocks shared, the begun one copied, each preempted and ended on its own."""

import numpy as np
import pytest

from engine.kv.manager import KVManager
from engine.kv.pool import PagePool
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from tests.engine.fake_runner import FULL, HYBRID, PAGE_BYTES, SLIDING, TWO_WINDOWS
from tests.engine.test_kv import LONG, compute

every_geometry = pytest.mark.parametrize("geometry", [FULL, HYBRID, SLIDING, TWO_WINDOWS])


def manager(pages: int = 200, **options) -> KVManager:
    return KVManager(PagePool(pages, PAGE_BYTES), chunk_tokens=512, **options)


def forked(kv: KVManager, parent: Sequence) -> Sequence:
    child = parent.fork(owner=None)
    assert kv.fork(parent, child)
    kv.check_integrity()
    return child


@every_geometry
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 70])
def test_full_blocks_are_shared_and_the_begun_one_is_copied(geometry, sharing, length):
    kv = manager(share_prefixes=sharing)
    space = kv.add_checkpoint("a", geometry)
    parent = compute(kv, space, LONG[:length], max_tokens=9)
    used = kv.used_pages()
    kv.pool.memory[:] = np.random.default_rng(0).integers(0, 256, size=1)[0]
    child = forked(kv, parent)
    assert kv.used_pages() - used == (space.pages_per_bundle if length % 16 else 0)
    assert (child.computed, child.length, child.limit) == (parent.computed, parent.length, parent.limit)
    for old, new in zip(parent.table.blocks, child.table.blocks, strict=True):
        full = length // 16
        assert old[:full] == new[:full]
        for one, other in zip(old[full:], new[full:], strict=True):
            assert set(one.pages).isdisjoint(other.pages)
            assert np.array_equal(kv.pool.memory[one.pages], kv.pool.memory[other.pages])


def test_forks_end_one_by_one_and_leave_nothing():
    kv = manager()
    parent = compute(kv, kv.add_checkpoint("a", HYBRID), LONG[:40], max_tokens=9)
    children = [forked(kv, parent) for _ in range(5)]
    for sequence in [children[2], parent, *children[:2], *children[3:]]:
        kv.release(sequence)
        kv.check_integrity()
    assert kv.used_pages() == 0


def test_a_fork_of_a_fork_after_each_has_grown():
    kv = manager()
    parent = compute(kv, kv.add_checkpoint("a", HYBRID), LONG[:40], max_tokens=50)
    child = forked(kv, parent)
    for sequence in (parent, child):
        for token in range(30):
            sequence.append(token)
            assert kv.grow(sequence, 1)
            kv.commit(sequence, 1)
    grandchild = forked(kv, child)
    assert list(grandchild.tokens[:70]) == list(child.tokens[:70])
    assert grandchild.prompt_length == 40


def test_without_pages_for_the_copy_nothing_is_taken():
    kv = manager(pages=6)
    parent = compute(kv, kv.add_checkpoint("a", FULL), LONG[:40], max_tokens=8)
    child = parent.fork(owner=None)
    assert not kv.fork(parent, child)
    kv.check_integrity()
    assert (child.table, child.computed) == (None, 0)


def scheduler(kv: KVManager, sequences: int = 64) -> Scheduler:
    return Scheduler(kv, max_sequences=sequences, max_batch_tokens=64, prefill_tokens_beside_decodes=64)


def prefilled(scheduler: Scheduler, space, prompt: list[int]) -> Sequence:
    sequence = Sequence(space, prompt, -len(prompt) % 16)  # to the end of its last block
    scheduler.add(sequence)
    step = scheduler.schedule()
    for each, count in zip(step.sequences, step.counts, strict=True):
        scheduler.kv.commit(each, count)
    return sequence


def test_a_fork_runs_next_after_the_one_it_comes_from():
    kv = manager()
    line = scheduler(kv)
    space = kv.add_checkpoint("a", FULL)
    first, second = prefilled(line, space, LONG[:20]), prefilled(line, space, LONG[20:40])
    child = first.fork(owner=None)
    line.fork(first, child)
    assert line.running == [first, child, second]


def test_a_fork_takes_the_place_and_the_pages_of_newer_ones():
    for kv, most in ((manager(pages=8), 64), (manager(), 2)):
        line, space = scheduler(kv, most), kv.add_checkpoint("a", FULL)
        first, second = prefilled(line, space, LONG[:20]), prefilled(line, space, LONG[20:50])
        child = first.fork(owner=None)
        line.fork(first, child)
        assert (line.running, list(line.waiting)) == ([first, child], [second])
        assert second.state is State.WAITING
        kv.check_integrity()


def test_a_fork_without_room_waits_in_front_and_never_harms_its_parent():
    kv = manager(pages=5)
    line, space = scheduler(kv), kv.add_checkpoint("a", FULL)
    parent = prefilled(line, space, LONG[:20])
    later = Sequence(space, LONG[:20], 5)
    line.add(later)
    child = parent.fork(owner=None)
    line.fork(parent, child)
    assert line.running == [parent]
    assert list(line.waiting) == [child, later]
