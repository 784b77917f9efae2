"""Contiguous reservation: the rules, the buddy allocator, the books, and an engine that uses it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import FIELDS
from engine.errors import CheckpointError
from engine.kv.blocks import IntegrityError
from engine.kv.buddy import Buddy
from engine.kv.pool import PagePool
from engine.kv.reserved import POLICIES, ReservedKV, kv_manager
from engine.sequence import Sequence
from tests.engine.fake_runner import FULL, HYBRID, PAGE_BYTES, FakeRunner
from tests.engine.rig import Rig

CONTEXT = 128


def manager(policy: str, pages: int = 64, geometry=FULL) -> tuple[ReservedKV, object]:
    kv = kv_manager(policy, PagePool(pages, PAGE_BYTES), chunk_tokens=512)
    return kv, kv.add_checkpoint("a", geometry, CONTEXT)


def reserved(policy: str, prompt: int, answer: int) -> int:
    kv, space = manager(policy)
    return kv.reserved_tokens(Sequence(space, range(prompt), answer))


def test_the_config_offers_the_policies_there_are():
    assert FIELDS["policy"].metadata["choices"] == POLICIES


@pytest.mark.parametrize(("policy", "tokens"), [("max", 128), ("pow2", 40 + 32), ("oracle", 40 + 25)])
def test_each_rule_reserves_what_the_paper_says(policy, tokens):
    """The paper's example: for an answer of 25 tokens, 32 positions."""
    assert reserved(policy, prompt=40, answer=25) == tokens


def test_no_rule_reserves_more_than_the_model_allows():
    assert reserved("pow2", prompt=60, answer=65) == 128  # not 60 + 128


def test_a_buddy_of_no_power_of_two_holds_as_many_of_the_longest_as_the_paper_counts():
    buddy = Buddy(15_728)  # the slots that OPT-13B leaves of 40 GB
    firsts = [buddy.take(2048) for _ in range(8)]
    assert firsts.count(None) == 1
    assert buddy.take(1024) is not None


def test_a_run_given_back_joins_its_buddy():
    buddy = Buddy(64)
    firsts = [buddy.take(5) for _ in range(8)]  # 8 units each
    assert buddy.take(1) is None
    for first in firsts:
        buddy.give(first, 5)
    assert buddy.take(64) == 0


@settings(max_examples=60)
@given(total=st.integers(1, 90), asks=st.lists(st.integers(0, 40), max_size=60))
def test_runs_never_overlap_and_all_comes_back(total, asks):
    buddy, held = Buddy(total), []
    for ask in asks:
        if ask == 0 and held:
            buddy.give(*held.pop(len(held) // 2))
        elif ask and (first := buddy.take(ask)) is not None:
            held.append((first, ask))
        taken = [unit for first, units in held for unit in range(first, first + units)]
        assert len(set(taken)) == len(taken)
        assert all(unit < total for unit in taken)
    for run in held:
        buddy.give(*run)
    assert buddy.free == Buddy(total).free


@pytest.mark.parametrize("geometry", [FULL, HYBRID])
def test_a_reservation_is_one_run_of_pages_and_is_given_back_whole(geometry):
    kv, space = manager("oracle", geometry=geometry)
    sequences = [Sequence(space, range(20), 30) for _ in range(2)]
    for sequence in sequences:
        assert kv.admit(sequence, alone=False)
        assert kv.grow(sequence, 50)  # all it may ever compute
        kv.commit(sequence, 20)
        kv.check_integrity()
    pages = np.sort(np.concatenate([table.reshape(-1) for table in sequences[1].table.pages]))
    assert np.array_equal(np.diff(pages), np.ones(len(pages) - 1))
    for sequence in sequences:
        kv.release(sequence)
    kv.check_integrity(idle=True)
    assert kv.pool.free == kv.pool.total


def test_what_the_buddy_rounds_up_is_nobodys():
    kv, space = manager("oracle", pages=32)  # 16 blocks of 2 pages
    first, second, third = (Sequence(space, range(20), 60) for _ in range(3))  # 5 blocks each, in runs of 8
    assert kv.admit(first, alone=True) and kv.admit(second, alone=False)
    assert not kv.admit(third, alone=False)
    assert kv.used_pages() == 2 * 5 * 2
    kv.check_integrity()


def test_the_longest_run_bounds_the_context():
    kv, space = manager("oracle", pages=30)  # 15 blocks: the longest run is 8
    assert kv.longest(space, 4096) == 128


def test_contiguous_sequences_share_nothing():
    kv, space = manager("oracle")
    pair = [Sequence(space, range(32), 16) for _ in range(2)]
    for sequence in pair:
        kv.admit(sequence, alone=False)
        kv.commit(sequence, 32)
    kv.rematch(pair[1])
    kv.check_integrity()
    assert kv.blocks.shared == 0 and kv.used_pages() == 2 * 3 * 2


def test_a_checkpoint_with_blocks_of_another_size_is_refused_until_the_first_has_left():
    kv, space = manager("max")
    with pytest.raises(CheckpointError, match=r"4 pages.* 2 pages.*paged"):
        kv.add_checkpoint("b", HYBRID)
    kv.remove_checkpoint(space)
    kv.add_checkpoint("b", HYBRID)
    kv.check_integrity(idle=True)


FAULTS = {
    "lost run": lambda kv: kv.runs.popitem(),
    "run of another": lambda kv: kv.runs.update({table: (4, 3) for table in kv.runs}),
    "free and taken": lambda kv: kv._buddy.free[2].add(0),
    "lost unit": lambda kv: kv._buddy.free[4].clear(),
    "lost page": lambda kv: kv.pool.take(1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_integrity_check_covers_the_reservations(fault):
    kv, space = manager("oracle")
    kv.admit(Sequence(space, range(20), 20), alone=True)
    kv.check_integrity()
    FAULTS[fault](kv)
    with pytest.raises(IntegrityError):
        kv.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
def test_every_policy_gives_the_same_tokens(policy, geometry):
    """Shuffled, poisoned pages; more requests than fit at once; the system prompt is not shared where nothing is."""
    rig = Rig({"m": FakeRunner(geometry=geometry, context_length=96)}, pages=100, policy=policy)
    rig.put("m", system_prompt="be kind")
    answers = [rig.ask("m", list(range(1, 10 + 3 * i)), max_tokens=5 + 4 * i) for i in range(9)]
    rig.drain()
    assert [answer.token_ids for answer in answers] == [answer.expected() for answer in answers]
    assert rig.memory.used_pages() == rig.memory.pinned_pages


def test_the_longer_the_reservation_the_fewer_run_at_once():
    most = {}
    for policy in POLICIES:
        rig = Rig({"m": FakeRunner(context_length=128)}, pages=64, policy=policy)
        rig.put("m")
        for _ in range(12):
            rig.ask("m", list(range(1, 21)), max_tokens=20)
        most[policy] = 0
        while rig.engine.step():
            most[policy] = max(most[policy], len(rig.scheduler.running))
    assert most == {"paged": 12, "max": 4, "pow2": 8, "oracle": 8}


def test_pages_that_are_in_use_cannot_be_taken_as_a_run():
    pool = PagePool(20, PAGE_BYTES, order=np.random.default_rng(0).permutation(20))
    assert np.array_equal(pool.take_run(4, 8), np.arange(4, 12))
    with pytest.raises(IndexError, match="4 pages from 10"):
        pool.take_run(10, 4)
    assert sorted(pool.take(12)) == [*range(4), *range(12, 20)]
