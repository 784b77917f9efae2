"""Nobody waits for the crowd of another: bounded waits in steps, equal service, priorities, deadlines, the watchdog."""

import logging

import pytest

from engine.request import Terms
from engine.scheduler import Scheduler
from tests.engine.fake_runner import FULL, HYBRID
from tests.engine.rig import Answer, Rig
from tests.engine.test_core import rig_of, words

TIGHT = {"max_sequences": 8, "max_batch_tokens": 64, "prefill_tokens_beside_decodes": 64, "check_integrity": False}


def steps_until(rig: Rig, answer: Answer) -> int:
    """Steps until its first token."""
    steps = 0
    while not answer.token_ids:
        rig.engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("pages", [400, 90])
@pytest.mark.parametrize("who", [("a", "late"), ("twin", "crowd")], ids=["user", "model"])
def test_two_hundred_requests_of_one_do_not_delay_the_first_token_of_another(who, pages):
    rig = rig_of(FULL, pages=pages, **TIGHT)
    rig.put("twin", "a")
    crowd = [rig.ask("a", words(100, seed), 60, terms=Terms("crowd")) for seed in range(200)]
    for _ in range(30):
        rig.engine.step()
    model, user = who
    late = rig.ask(model, words(100, seed=999), 20, terms=Terms(user))
    assert steps_until(rig, late) <= 4  # two chunks of its own prompt, one of another's, one turn
    rig.until(lambda: late.reason)
    assert late.token_ids == late.expected()
    for answer in crowd:
        rig.engine.abort(answer.id)
    rig.drain()


def test_two_users_are_served_alike_however_many_requests_each_has():
    rig = rig_of(FULL, **TIGHT)
    many = [rig.ask("a", words(40, seed), 40, terms=Terms("many")) for seed in range(60)]
    few = [rig.ask("a", words(40, 100 + seed), 40, terms=Terms("few")) for seed in range(12)]
    while not all(answer.reason for answer in few):
        rig.engine.step()
    served = [sum(len(answer.token_ids) for answer in answers) for answers in (many, few)]
    assert served[1] == 12 * 40
    assert served[0] < 2 * served[1]
    rig.drain()


def test_a_model_with_many_users_gets_no_more_than_a_model_with_one():
    rig = rig_of(FULL, **TIGHT)
    rig.put("twin", "a")
    crowd = [rig.ask("a", words(40, seed), 40, terms=Terms(str(seed))) for seed in range(60)]
    lone = [rig.ask("twin", words(40, 100 + seed), 40, terms=Terms("one")) for seed in range(12)]
    while not all(answer.reason for answer in lone):
        rig.engine.step()
    assert sum(len(answer.token_ids) for answer in crowd) < 2 * 12 * 40
    rig.drain()


def test_who_was_idle_has_no_claim_on_what_others_were_served_meanwhile():
    rig = rig_of(FULL, **TIGHT)
    rig.generate("a", words(20), max_tokens=4, terms=Terms("idle"))
    busy = [rig.ask("a", words(40, seed), 40, terms=Terms("busy")) for seed in range(40)]
    for _ in range(150):
        rig.engine.step()
    before = sum(len(answer.token_ids) for answer in busy)
    back = [rig.ask("a", words(40, 100 + seed), 40, terms=Terms("idle")) for seed in range(20)]
    while not all(answer.reason for answer in back[:12]):
        rig.engine.step()
    gone_on = sum(len(answer.token_ids) for answer in busy) - before
    assert gone_on > 12 * 40 / 3
    rig.drain()


def test_what_one_was_served_alone_is_not_owed_to_who_comes():
    rig = rig_of(FULL)
    rig.put("twin", "a")
    rig.ask("a", words(20), 100, terms=Terms("first"))
    for _ in range(50):
        rig.engine.step()
    rig.ask("a", words(20, 1), 100, terms=Terms("second"))
    rig.ask("twin", words(20, 2), 100)
    rig.engine._run_commands()
    line = rig.scheduler.waiting
    (running,), (newcomer, of_twin) = rig.scheduler.running, line
    assert line.rank(running) == line.rank(newcomer)
    assert line.rank(running)[1] == line.rank(of_twin)[1], "of one model and of the other"
    rig.drain()


def test_within_one_client_who_came_first_is_first():
    rig = rig_of(FULL, max_sequences=1)
    answers = [rig.ask("a", words(10, seed), 5) for seed in range(6)]
    ended = []
    while rig.engine.step():
        ended += [n for n, answer in enumerate(answers) if answer.reason and n not in ended]
    assert ended == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("pages", [18, 24])
def test_clients_that_fight_for_the_last_pages_all_get_there(pages):
    rig = rig_of(HYBRID, names="ab", pages=pages, max_batch_tokens=16, prefill_tokens_beside_decodes=16)
    rig.put("twin", "a")
    answers = [
        rig.ask(("a", "twin", "b")[n % 3], words(12, n), 30, terms=Terms(str(n % 2), priority=n % 5 == 4))
        for n in range(12)
    ]
    rig.drain()
    assert [answer.token_ids for answer in answers] == [answer.expected() for answer in answers]


# Priorities


def test_the_smaller_priority_goes_first_and_takes_the_place_of_a_larger():
    rig = rig_of(FULL, max_sequences=2)
    later = [rig.ask("a", words(10, seed), 30, terms=Terms(priority=5)) for seed in range(3)]
    for _ in range(4):
        rig.engine.step()
    urgent = rig.ask("a", words(10, 9), 10, terms=Terms(priority=-1))
    assert steps_until(rig, urgent) == 1
    usual = rig.ask("a", words(10, 8), 10)
    while not urgent.reason:
        rig.engine.step()
    assert not any(answer.reason for answer in later) and not usual.reason
    rig.drain()
    assert [each.token_ids for each in later] == [each.expected() for each in later]


def test_a_place_taken_for_one_that_waits_is_not_given_back_though_an_urgent_one_of_its_model_runs():
    rig = rig_of(FULL, **TIGHT | {"max_sequences": 3})
    rig.put("twin", "a")
    urgent = rig.ask("twin", words(100, seed=0), 60, terms=Terms("urgent", priority=-1))
    crowd = [rig.ask("a", words(10, seed), 60, terms=Terms("crowd")) for seed in (1, 2)]
    for _ in range(10):  # the model of the urgent one has been served most
        rig.engine.step()
    late = rig.ask("twin", words(30, seed=3), 5, terms=Terms("late"))
    assert steps_until(rig, late) <= 4
    rig.until(lambda: all(answer.reason for answer in (urgent, late, *crowd)))
    rig.drain()


def test_of_two_that_wait_the_urgent_one_runs_first():
    rig = rig_of(FULL, max_sequences=1)
    first, last, urgent = (rig.ask("a", words(9, n), 5, terms=Terms(priority=p)) for n, p in enumerate((0, 0, -3)))
    while not urgent.reason:
        rig.engine.step()
    assert last.reason is None and first.reason is None
    rig.drain()


# Deadlines and the watchdog


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_request_ends_at_its_deadline_in_whatever_state(state):
    rig = rig_of(HYBRID, max_sequences=1)
    other = rig.ask("a", words(20), 100) if state == "waiting" else None
    answer = rig.ask("a", words(20, 1), 100, n=2, terms=Terms(deadline_seconds=5))
    for _ in range(3):
        rig.engine.step()
    rig.now = 4.9
    rig.engine.step()
    assert answer.reason is None
    rig.now = 5.0
    rig.engine.step()
    assert [event.finish_reason for event in answer.events if event.finish_reason] == ["deadline"] * 2
    assert "5 seconds" in answer.last.error
    rig.drain()
    assert other is None or other.token_ids == other.expected()


def test_a_deadline_that_is_kept_changes_nothing():
    rig = rig_of()
    answer = rig.ask("a", words(20), 10, terms=Terms(deadline_seconds=5))
    rig.drain()
    rig.now = 9.0
    later = rig.generate("a", words(20))
    assert (answer.reason, later.reason) == ("length", "length")


def test_a_request_that_makes_no_progress_is_failed_with_a_dump(monkeypatch, caplog):
    rig = rig_of(stall_seconds=100)
    stuck = rig.ask("a", words(20), 500)
    rig.engine.step()
    share_out = Scheduler._share_out

    def starved(self, space):
        """As a broken scheduler would: forgets one that runs."""
        whole, self.running = self.running, self.running[1:]
        try:
            return share_out(self, space)
        finally:
            self.running = whole

    monkeypatch.setattr(Scheduler, "_share_out", starved)
    other = rig.ask("a", words(20, 1), 900)
    with caplog.at_level(logging.ERROR, logger="engine.core"):
        for second in range(0, 140, 5):
            rig.now = float(second)
            rig.engine.step()
    assert stuck.reason == "error" and "100 seconds" in stuck.last.error
    assert other.reason is None
    assert f"RUNNING {stuck.id}: computed 20 of 21 tokens" in caplog.text
    assert "pages: 400 in all" in caplog.text


def test_prompts_that_run_and_wait_for_those_before_them_are_not_stuck():
    rig = rig_of(pages=2000, max_batch_tokens=16, prefill_tokens_beside_decodes=16, stall_seconds=10)
    asked = [rig.ask("a", words(64, seed), 2) for seed in range(20)]
    while rig.engine.step():
        rig.now += 1.0
    assert [each.reason for each in asked] == ["length"] * 20


def test_a_prompt_that_makes_no_progress_while_nothing_does_is_stuck(monkeypatch):
    rig = rig_of(max_batch_tokens=16, stall_seconds=10)
    asked = rig.ask("a", words(64), 2)
    rig.engine.step()
    monkeypatch.setattr(Scheduler, "_share_out", lambda self, space: ([], []))
    for _ in range(20):
        rig.engine.step()
        rig.now += 1.0
    assert asked.reason == "error"


def test_one_that_waits_its_turn_for_long_is_not_stuck():
    rig = rig_of(max_sequences=1, stall_seconds=10)
    first, second = rig.ask("a", words(20), 200), rig.ask("a", words(20, 1), 20)
    while rig.engine.step():
        rig.now += 1.0
    assert (first.reason, second.reason) == ("length", "length")
