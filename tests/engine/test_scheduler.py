"""Order, budget, turns and preemption, without weights: a step here computes nothing and draws token 1."""

import pytest

from engine.kv.manager import KVManager
from engine.kv.pool import PagePool
from engine.scheduler import Scheduler, Step
from engine.sequence import Sequence, State
from tests.engine.fake_runner import FULL, HYBRID, PAGE_BYTES


class Run:
    def __init__(self, pages: int = 1000, sequences: int = 64, tokens: int = 64, beside_decodes: int = 64) -> None:
        self.kv = KVManager(PagePool(pages, PAGE_BYTES), chunk_tokens=tokens)
        self.scheduler = Scheduler(
            self.kv,
            max_sequences=sequences,
            max_batch_tokens=tokens,
            prefill_tokens_beside_decodes=beside_decodes,
        )
        self.spaces = {name: self.kv.add_checkpoint(name, FULL) for name in "ab"}
        self.made = 0

    def add(self, prompt: int, answer: int, space: str = "a") -> Sequence:
        self.made += 1
        first = 1000 * self.made  # no two share a prefix
        sequence = Sequence(self.spaces[space], range(first, first + prompt), answer)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            self.kv.commit(sequence, count)
            if sequence.uncomputed == 0:
                sequence.append(1)
                if sequence.length == sequence.limit:
                    self.scheduler.remove(sequence)
        self.kv.check_integrity()
        return step

    def finish(self, steps: int = 5000) -> None:
        while not self.scheduler.idle:
            self.step()
            steps -= 1
            assert steps, "no end"
        assert self.kv.used_pages() == self.kv.promised_pages == 0


def test_prefill_and_decode_share_one_step():
    run = Run()
    first = run.add(10, 5)
    run.step()
    second = run.add(30, 5)
    step = run.step()
    assert (step.sequences, step.counts) == ([first, second], [1, 30])


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget():
    run = Run(tokens=64)
    run.add(150, 2)
    assert [run.step().counts for _ in range(3)] == [[64], [64], [22]]


def test_prompts_share_the_budget_in_order_of_arrival():
    run = Run(tokens=64)
    run.add(40, 2), run.add(40, 2), run.add(40, 2)
    assert run.step().counts == [40, 24]
    assert run.step().counts == [1, 16, 40]


def test_while_one_streams_the_prompts_of_others_are_taken_in_smaller_bites():
    run = Run(tokens=64, beside_decodes=16)
    run.add(5, 50)
    run.step()
    run.add(60, 2, "b")
    assert [run.step().counts for _ in range(4)] == [[16], [1], [16], [1]]


def test_a_step_never_computes_more_than_its_budget():
    run = Run(tokens=16)
    for prompt in (1, 1, 1, 1, 1, 1, 90, 90):
        run.add(prompt, 30)
    while not run.scheduler.idle:
        assert sum(run.step().counts) <= 16


def test_no_more_sequences_run_than_allowed():
    run = Run(sequences=2)
    for _ in range(5):
        run.add(5, 5)
    assert len(run.step().sequences) == 2
    assert len(run.scheduler.waiting) == 3
    run.finish()


def test_checkpoints_take_turns_one_step_each():
    run = Run()
    run.add(5, 20, "a"), run.add(5, 20, "a"), run.add(5, 20, "b")
    turns = [run.step() for _ in range(8)]
    names = ["a" if step.space is run.spaces["a"] else "b" for step in turns]
    assert names in (list("abababab"), list("babababa"))
    assert {len(step.sequences) for step in turns if step.space is run.spaces["a"]} == {2}


def test_requests_end_in_order_of_arrival_when_pages_are_short():
    run = Run(pages=24)
    sequences = [run.add(40, 20) for _ in range(8)]
    ended = []
    while not run.scheduler.idle:
        run.step()
        ended += [s for s in sequences if s.state is State.FINISHED and s not in ended]
    assert ended == sequences


def test_the_newest_is_preempted_and_the_oldest_never():
    run = Run(pages=24)
    sequences = [run.add(16, 100) for _ in range(4)]
    assert len(run.step().sequences) == 4
    longest = 0
    while not run.scheduler.idle:
        oldest = next(s for s in sequences if s.state is not State.FINISHED)
        assert oldest in run.step().sequences
        alive = [s for s in sequences if s.state is not State.FINISHED]
        assert run.scheduler.running + list(run.scheduler.waiting) == alive, "order of arrival is kept"
        longest = max(longest, len(run.scheduler.waiting))
    assert run.scheduler.preemptions >= 2
    assert longest >= 2


def test_a_preempted_sequence_starts_again_from_what_is_still_cached():
    run = Run(pages=20)
    run.add(16, 90)
    second = run.add(64, 40)
    while run.scheduler.preemptions == 0:
        run.step()
    assert (second.state, second.computed, second.table) == (State.WAITING, 0, None)
    assert run.spaces["a"].cache.match(second) > 0
    run.finish()


def test_five_long_prompts_where_four_fit_all_end():
    run = Run(pages=4 * 2 * 5 + 3)
    sequences = [run.add(64, 30) for _ in range(5)]
    run.finish()
    assert all(s.length == s.limit for s in sequences)


@pytest.mark.parametrize("pages", [14, 15, 17, 20, 27])
def test_the_tightest_pools_come_to_an_end(pages):
    run = Run(pages=pages, tokens=16)
    sequences = [run.add(10 + 7 * i, 40, "ab"[i % 2]) for i in range(7)]
    run.finish()
    assert all(s.length == s.limit for s in sequences)


def test_what_can_never_fit_is_given_up_and_others_go_on():
    run = Run(pages=10)
    giant, small = run.add(200, 5), run.add(10, 5)
    step = run.step()
    assert step.unservable == [giant]
    assert step.sequences == [small]


def test_one_that_outgrows_the_pool_alone_is_given_up():
    run = Run(pages=10)
    growing = run.add(60, 100)
    given_up = []
    while not run.scheduler.idle:
        given_up += run.step().unservable
    assert given_up == [growing]
    assert run.kv.used_pages() == 0


@pytest.mark.parametrize("steps", range(6))
def test_removing_a_sequence_in_any_state_frees_what_it_holds(steps):
    run = Run(pages=30, tokens=16)
    sequences = [run.add(30, 10) for _ in range(6)]
    for _ in range(steps):
        run.step()
    for sequence in sequences:
        run.scheduler.remove(sequence)
        run.scheduler.remove(sequence)  # and again: nothing
        run.kv.check_integrity()
    assert run.scheduler.idle
    assert run.kv.used_pages() == run.kv.promised_pages == 0


def test_windows_let_more_sequences_run():
    run = Run(pages=120, tokens=16)
    run.spaces["a"] = run.kv.add_checkpoint("hybrid", HYBRID)  # 4 pages for 16 tokens, 3 of them with a window of 20
    for _ in range(4):
        run.add(150, 20)
    most = 0
    while not run.scheduler.idle:
        run.step()
        most = max(most, len(run.scheduler.running))
    assert most == 4  # 4 * 11 * 4 pages would not have fitted


def test_where_all_that_run_wait_for_others_the_newest_gives_its_place_and_rests():
    run = Run(pages=8)
    first, second = run.add(20, 5), run.add(20, 5)
    first.joint, second.joint = object(), object()
    while first.uncomputed or second.uncomputed:
        step = run.scheduler.schedule()
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            run.kv.commit(sequence, count)
    third = run.add(20, 5)
    assert run.scheduler.schedule().sequences == [third]
    assert (run.scheduler.running, len(run.scheduler.waiting)) == ([first, third], 0)
    assert second.state is State.RESTING and second.table is None
    run.scheduler.go_on(second)
    assert (second.state, list(run.scheduler.waiting)) == (State.WAITING, [second])
    for sequence in (first, second, third):
        run.scheduler.remove(sequence)
    run.finish()


def test_one_that_rests_can_be_ended():
    run = Run(pages=8)
    first = run.add(20, 5)
    first.joint = object()
    run.scheduler.schedule()
    run.kv.commit(first, 20)
    run.add(90, 5)
    run.scheduler.schedule()
    assert first.state is State.RESTING
    run.scheduler.remove(first)
    assert first.state is State.FINISHED
