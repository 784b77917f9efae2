"""What a step costs the scheduler and the pool, in operations: time would tell of the machine."""

import sys

import numpy as np
import pytest

from engine.kv.pool import PagePool
from engine.kv.reserved import POLICIES, kv_manager
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.fake_runner import FULL, PAGE_BYTES

SEQUENCES = 64


def operations(policy: str = "paged", *, cached_blocks: int = 0, context: int = 40) -> int:
    """Calls, of Python and of C, that 16 steps of decoding make: each sequence takes one block in them."""
    pages = 2 * (cached_blocks + SEQUENCES * 64)
    kv = kv_manager(policy, PagePool(pages, PAGE_BYTES), chunk_tokens=8192)
    space = kv.add_checkpoint("a", FULL, context + 60)
    scheduler = Scheduler(kv, max_sequences=SEQUENCES, max_batch_tokens=8192, prefill_tokens_beside_decodes=8192)
    if cached_blocks:
        old = Sequence(space, np.arange(cached_blocks * 16), 0)
        kv.admit(old, alone=True)
        kv.grow(old, old.uncomputed)
        kv.commit(old, old.uncomputed)
        kv.release(old)
    for number in range(SEQUENCES):
        scheduler.add(Sequence(space, np.full(context, 100_000 + number), 60))
    step(kv, scheduler)
    while any(each.uncomputed > 1 for each in scheduler.running):
        step(kv, scheduler)
    assert len(scheduler.running) == SEQUENCES
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    for _ in range(16):
        step(kv, scheduler)
    sys.setprofile(None)
    return count


def step(kv, scheduler) -> None:
    scheduled = scheduler.schedule()
    for sequence, count in zip(scheduled.sequences, scheduled.counts, strict=True):
        kv.commit(sequence, count)
        if sequence.uncomputed == 0:
            sequence.append(1)


def test_a_step_costs_the_same_beside_many_cached_blocks():
    assert operations(cached_blocks=20_000) == pytest.approx(operations(cached_blocks=100), rel=0.02)


def test_a_step_costs_the_same_with_a_long_context():
    assert operations(context=400) == pytest.approx(operations(context=40), rel=0.02)


@pytest.mark.parametrize("policy", [each for each in POLICIES if each != "paged"])
def test_a_reservation_is_paid_for_at_admission_and_never_again(policy):
    assert operations(policy) < operations("paged")
