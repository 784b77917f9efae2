"""What a model may count on is there when it asks, whoever floods the pool, and lent while it does not."""

from __future__ import annotations

import random

import pytest

from engine.errors import InvalidParameter
from engine.request import Terms
from engine.sequence import Sequence
from tests.engine.fake_runner import FULL, HYBRID, FakeRunner
from tests.engine.rig import Rig
from tests.engine.test_core import words


def rig_of(geometry=FULL, pages: int = 80, max_batch_tokens: int = 512, **shares) -> Rig:
    """Models over a checkpoint each."""
    rig = Rig({name: FakeRunner(geometry, name) for name in shares}, pages, max_batch_tokens=max_batch_tokens)
    for name, share in shares.items():
        rig.put(name, kv_share=share)
    return rig


def running(rig: Rig, model: str) -> list[Sequence]:
    return [each for each in rig.scheduler.running if each.client[0] == model]


def flood(rig: Rig, model: str, count: int = 20, **options) -> list:
    return [rig.ask(model, words(60, seed), 60, **options) for seed in range(count)]


@pytest.mark.parametrize(("share", "at_once"), [(0.5, 4), (0.0, 1)])
def test_what_a_model_counts_on_is_taken_back_from_who_floods(share, at_once):
    rig = rig_of(a=share, b=0.0)
    others = flood(rig, "b")
    for _ in range(5):
        rig.engine.step()
    assert len(running(rig, "b")) > 6, "what nobody uses is lent"
    own = [rig.ask("a", words(60, 50 + seed), 10) for seed in range(4)]
    rig.engine.step()
    assert len(running(rig, "a")) == at_once
    rig.drain()
    assert [each.token_ids for each in own + others] == [each.expected() for each in own + others]


def test_cached_blocks_go_before_anybody_has_to():
    rig = rig_of(a=0.5, b=0.0)
    for seed in range(5):
        rig.generate("b", words(100, seed), max_tokens=4)
    assert rig.memory.blocks.cached_pages > 50
    other = rig.ask("b", words(60, 9), 20)
    rig.engine.step()
    own = [rig.ask("a", words(60, 50 + seed), 20) for seed in range(4)]
    rig.engine.step()
    assert (len(running(rig, "a")), running(rig, "b")[0].owner.request.id) == (4, other.id)
    assert rig.scheduler.preemptions == 0
    rig.drain()
    assert all(each.reason == "length" for each in own)


def test_the_model_that_is_furthest_over_its_share_gives_first_and_its_newest():
    rig = rig_of(a=0.4, b=0.2, c=0.2)
    within, (*old, newest) = rig.ask("b", words(60, 1), 60), flood(rig, "c", 8)
    for _ in range(3):
        rig.engine.step()
    rig.ask("a", words(60, 90), 4)
    rig.engine.step()
    waiting = [each.owner.request.id for each in rig.scheduler.waiting]
    assert len(running(rig, "a")) == 1 and waiting == [each.id for each in (*old, newest)][-len(waiting) :]
    assert running(rig, "b")[0].owner.request.id == within.id
    rig.drain()


def test_who_borrowed_less_keeps_it_even_where_it_came_last():
    rig = rig_of(a=0.5, b=0.1, c=0.1)
    most = flood(rig, "c", 5)
    rig.engine.step()
    less = flood(rig, "b", 2)
    rig.engine.step()
    over = rig.scheduler.shares.over(rig.scheduler.running)
    assert over["c"] > over["b"] > 0
    for seed in range(2):
        rig.ask("a", words(60, 90 + seed), 4)
    rig.engine.step()
    assert rig.scheduler.preemptions and len(running(rig, "b")) == len(less)
    assert len(running(rig, "a")) == 2 and len(running(rig, "c")) < len(most)
    rig.drain()


@pytest.mark.parametrize("geometry", [FULL, HYBRID])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_within_its_share_waits_for_pages_that_another_borrowed_nor_makes_way_for_it(geometry, seed):
    random_ = random.Random(seed)
    rig = rig_of(geometry, 90, a=0.4, b=0.3, c=0.0)
    shares, asked, waits = rig.scheduler.shares, [], {}

    def watched(choose):
        def chosen(sequence: Sequence, *others) -> Sequence | None:
            victim = choose(sequence, *others)
            if victim and victim.client[0] != sequence.client[0]:
                assert not shares.protects(victim.client[0], shares.over(rig.scheduler.running))
            return victim

        return chosen

    for owner, name in ((rig.scheduler, "_who_yields"), (shares, "makes_room")):
        setattr(owner, name, watched(getattr(owner, name)))
    for _ in range(200):
        if random_.random() < 0.3:
            model, user = random_.choice("abccc"), Terms(random_.choice("xy"))
            prompt = words(random_.randrange(1, 90), random_.randrange(6))
            asked.append(rig.ask(model, prompt, random_.randrange(1, 60), terms=user))
        rig.engine.step()
        heads, runs = rig.scheduler.waiting.heads(), rig.scheduler.running
        owed = [each for each in shares.owed(heads, runs) if shares.debtors(each, runs)]
        waits = {each: waits.get(each, 0) + 1 for each in owed}
        assert max(waits.values(), default=0) <= 2
    rig.drain()
    assert [each.token_ids for each in asked] == [each.expected() for each in asked]


def test_nobody_is_preempted_for_one_that_would_not_fit_all_the_same():
    rig = rig_of(pages=40, max_batch_tokens=16, a=0.5, b=0.5, c=0.0)
    rig.ask("b", words(200), 8)  # holds little yet, and was promised more than its share while nobody asked
    small = rig.ask("c", words(10, 1), 20)
    for _ in range(3):
        rig.engine.step()
    owed = rig.ask("a", words(110, 2), 8)
    rig.engine.step()
    assert rig.scheduler.shares.owed(rig.scheduler.waiting.heads(), rig.scheduler.running)
    assert rig.scheduler.preemptions == 0 and running(rig, "c")
    rig.drain()
    assert (small.token_ids, owed.token_ids) == (small.expected(), owed.expected())


def test_models_cannot_count_on_more_than_there_is():
    rig = rig_of(a=0.7, b=0.3)
    with pytest.raises(InvalidParameter, match=r"other models count on 0.7 of the pool, so at most 0.3 is left"):
        rig.put("b", kv_share=0.4)
    rig.put("a", kv_share=0.5)
    rig.engine.sleep_model("a")
    with pytest.raises(InvalidParameter):
        rig.put("b", kv_share=0.6)  # it would not be there when the other wakes
    rig.put("b", kv_share=0.5)
    rig.engine.wake_model("a")
    rig.until(lambda: rig.status("a") == "ready")
    assert [rig.scheduler.shares.pages(name) for name in "ab"] == [40, 40]
    rig.engine.delete_model("a")
    rig.drain()
    assert rig.scheduler.shares.pages("a") == 0


def test_a_model_that_is_put_again_keeps_its_share_though_the_old_one_goes_after_it_is_ready():
    """As where the checkpoint arrives, for another model too, just before the old one is retired."""
    rig = Rig({"a": FakeRunner(FULL, "a")})
    rig.put("x", "a", wait=False, kv_share=0.5)
    rig.engine.delete_model("x")
    rig.put("x", "a", wait=False, kv_share=0.5)
    rig.engine.step()
    assert rig.status("x") == "ready" and rig.scheduler.shares.pages("x") == 200
    rig.engine.sleep_model("x")
    rig.engine.step()
    assert rig.scheduler.shares.pages("x") == 0
