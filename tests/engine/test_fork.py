"""Sequences that go on from one prompt: full blocks shared, the begun one copied, each ended on its own."""

import numpy as np
import pytest
import torch

from engine.kv.manager import KVManager
from engine.kv.pool import PagePool
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from tests.engine.fake_runner import FULL, HYBRID, PAGE_BYTES, SLIDING, TWO_WINDOWS, FakeRunner
from tests.engine.rig import Rig
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
    kv.pool.memory.copy_(torch.randint(0, 256, kv.pool.memory.shape, generator=torch.Generator().manual_seed(0)))
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


# Requests for several answers


def rig(geometry=HYBRID, **options) -> Rig:
    rig = Rig({"a": FakeRunner(geometry, "a")}, **options)
    rig.put("a")
    return rig


def answers(rig: Rig, prompt: list[int], n: int, **params) -> list[list[int]]:
    """The tokens of each choice, in order; the last event of each came, and came once."""
    asked = rig.ask("a", prompt, n=n, **params)
    rig.drain()
    assert sorted(event.index for event in asked.events if event.finish_reason) == list(range(n))
    return [[t for event in asked.events if event.index == index for t in event.token_ids] for index in range(n)]


@every_geometry
@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_each_of_several_answers_is_what_it_would_be_alone(geometry, length):
    alone = [
        rig(geometry).generate("a", LONG[:length], max_tokens=30, temperature=1.0, seed=7 + i).token_ids
        for i in range(4)
    ]
    assert answers(rig(geometry), LONG[:length], 4, max_tokens=30, temperature=1.0, seed=7) == alone


@pytest.mark.parametrize("options", [{"pages": 30}, {"pages": 60, "max_sequences": 2}, {"max_batch_tokens": 16}])
@pytest.mark.parametrize("sharing", [True, False])
def test_several_answers_survive_any_shortage(options, sharing):
    plenty = answers(rig(pages=400), LONG[:40], 5, max_tokens=40, temperature=1.0, seed=3)
    scarce = rig(enable_prefix_cache=sharing, **options)
    neighbour = scarce.ask("a", LONG[50:90], 20)
    assert answers(scarce, LONG[:40], 5, max_tokens=40, temperature=1.0, seed=3) == plenty
    assert neighbour.token_ids == neighbour.expected()


def test_the_prompt_is_computed_and_held_once_for_all_answers():
    one = rig(FULL)
    asked = one.ask("a", LONG[:80], 8, n=6, temperature=1.0)
    one.until(lambda: len(asked.events) >= 6)
    assert one.engine.load()["computed_tokens"] == 80
    one.engine.step()
    assert one.memory.used_pages() == 2 * (5 + 6)  # five blocks of all, one block of each
    one.drain()
    assert asked.last.cached_tokens == 0 and asked.last.prompt_tokens == 80


def test_an_abort_ends_every_answer_whether_it_has_begun_or_not():
    for steps in (0, 1, 3, 8):
        one = rig(max_batch_tokens=32)
        asked = one.ask("a", LONG[:90], 50, n=4, temperature=1.0)
        for _ in range(steps):
            one.engine.step()
        one.engine.abort(asked.id)
        one.drain()
        assert sorted((e.index, e.finish_reason) for e in asked.events if e.finish_reason) == [
            (index, "abort") for index in range(4)
        ]


def test_a_row_of_nan_fails_all_answers_of_its_request_and_no_other():
    one = rig()
    one.checkpoints["a"].nan_token = 7
    bad, good = one.ask("a", [*LONG[:20], 7], 20, n=3), one.ask("a", LONG[:20], 20)
    one.drain()
    assert [event.finish_reason for event in bad.events] == ["error"] * 3
    assert good.token_ids == good.expected()


def test_answers_that_end_early_leave_the_others_alone():
    one = rig()
    free = answers(one, LONG[:40], 4, max_tokens=30, temperature=1.0, seed=3)
    end = free[1][4]
    ended = answers(one, LONG[:40], 4, max_tokens=30, temperature=1.0, seed=3, stop_token_ids=(end,))
    assert ended == [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in free]
    assert len(ended[1]) == 5
