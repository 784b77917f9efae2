"""Guessed tokens change how fast an answer comes and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine import core
from engine.beam import BeamParams
from engine.drafts import Drafter, lookup
from engine.request import Terms
from engine.sequence import Sequence
from tests.engine.fake_runner import FULL, HYBRID, SLIDING, FakeRunner
from tests.engine.rig import Rig
from tests.engine.test_core import words
from tests.engine.test_scheduler import Run


@pytest.mark.parametrize(
    ("text", "size", "most", "found"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 3, 2, [4, 5]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 1, 2, 3], 3, 2, [5, 6]),  # the latest place
        ([7, 1, 2, 8, 9, 6, 5, 1, 2, 1, 2], 2, 4, [8, 9, 6, 5]),  # that so many follow
        ([4, 4, 4, 4], 2, 3, [4, 4]),  # or the first one
        ([1, 2, 3, 4], 2, 3, []),
        ([2, 1, 2], 2, 3, []),
        ([1], 2, 3, []),
        ([], 3, 3, []),
    ],
)
def test_the_guess_is_what_followed_the_same_words_before(text, size, most, found):
    assert lookup(np.array(text, np.int32), size, most).tolist() == found


def test_who_is_seldom_right_guesses_less_and_then_rests_longer_each_time():
    text, drafter, lengths = np.tile(np.arange(9, dtype=np.int32), 400), Drafter(4), []
    for length in range(30, 3600):
        if guessed := len(drafter.guess(text[:length], 4)):
            lengths.append(length)
            drafter.learn(guessed, 0, length)
    gaps = np.diff(lengths)
    assert len(lengths) < 30 and max(gaps) >= 1024 and sorted(gaps[gaps > 1]) == gaps[gaps > 1].tolist()
    assert Drafter(4).guess(text[:50], 4).tolist() == [(50 + n) % 9 for n in range(4)]


class Oracle:
    """Knows what will be said, and guesses wrong now and then."""

    def __init__(self, answers: list, chance: float) -> None:
        self.most, self._answers, self._chance, self._random = 5, answers, chance, random.Random(0)

    def guess(self, tokens: np.ndarray, most: int) -> np.ndarray:
        text = tokens.tolist()
        for answer in self._answers:
            whole = [*answer.prompt_ids, *answer.expected()]
            if whole[: len(text)] == text:
                right = whole[len(text) : len(text) + min(most, self.most)]
                return np.array([t if self._random.random() < self._chance else 11 for t in right], np.int32)
        return tokens[:0]

    def learn(self, guessed: int, right: int, length: int) -> None:
        assert 0 <= right <= guessed


def guessing(
    monkeypatch, geometry=HYBRID, chance: float = 0.7, eos_token_ids=frozenset(), **options
) -> tuple[Rig, list]:
    answers: list = []
    monkeypatch.setattr(core, "Drafter", lambda most: Oracle(answers, chance))
    runner = FakeRunner(geometry, "a", eos_token_ids=eos_token_ids)
    rig = Rig({"a": runner}, speculative_tokens=5, speculative_sequences=8, **options)
    rig.put("a")
    return rig, answers


@pytest.mark.parametrize("geometry", [FULL, HYBRID, SLIDING])
@pytest.mark.parametrize("chance", [0.6, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 9},
    ],
    ids=["greedy", "drawn", "penalised"],
)
def test_an_answer_is_what_it_is_without_guesses(monkeypatch, geometry, chance, params):
    rig, answers = guessing(monkeypatch, geometry, chance)
    answers += [rig.ask("a", words(30 + n, n), 40, **params) for n in range(2)]
    rig.drain()
    assert [each.token_ids for each in answers] == [each.expected() for each in answers]
    load = rig.engine.load()
    assert load["accepted_tokens"] > 30 and load["steps"] < (40 if chance == 1 else 80)


@pytest.mark.parametrize("options", [{"pages": 20}, {"pages": 34}, {"max_sequences": 2}, {"max_batch_tokens": 16}])
def test_guesses_survive_any_shortage_and_cause_none(monkeypatch, options):
    rig, answers = guessing(monkeypatch, FULL, **options)
    answers += [rig.ask("a", words(30, n), 50, temperature=n % 2) for n in range(6)]
    rig.drain()
    assert [each.token_ids for each in answers] == [each.expected() for each in answers]
    assert rig.engine.load()["accepted_tokens"] > 0


def test_right_guesses_take_fewer_steps_and_wrong_ones_leave_no_block_behind(monkeypatch):
    steps = {}
    for chance in (0.0, 1.0):
        rig, answers = guessing(monkeypatch, FULL, chance)
        answers.append(rig.ask("a", words(30), 60))
        most = 0
        while rig.engine.step():
            for sequence in rig.scheduler.running:
                most = max(most, sequence.table.capacity - sequence.computed)
        steps[chance] = rig.engine.load()["steps"]
        assert most < 16, "no block more than the next token needs"
    assert steps[1.0] <= 12 and steps[0.0] == 60


def test_an_end_among_the_guesses_ends_the_answer_there(monkeypatch):
    rig, answers = guessing(monkeypatch, FULL, 1.0)
    free = rig.generate("a", words(30), max_tokens=40).token_ids
    for end in range(7):
        answers[:] = [rig.ask("a", words(30), 40, stop_token_ids=(free[end],))]
        rig.drain()
        assert (answers[0].token_ids, answers[0].reason) == (free[: free.index(free[end]) + 1], "stop")


def test_no_guess_lets_an_answer_end_before_min_tokens(monkeypatch):
    rig, answers = guessing(monkeypatch, FULL, 1.0, eos_token_ids=frozenset(range(0, 384, 3)))
    answers += [rig.ask("a", words(30, n), 40, min_tokens=11) for n in range(6)]
    rig.drain()
    assert [each.token_ids for each in answers] == [each.expected() for each in answers]
    assert {len(each.token_ids) for each in answers} & {12, 13, 14}, "some end soon after they may"
    assert rig.engine.load()["accepted_tokens"] > 30


def test_no_more_is_guessed_than_the_answer_may_still_say():
    run = Run()
    sequence = run.add(10, 3)
    sequence.drafter = Always()
    assert [sequence.draft(most) for most in (1, 2, 3)] == [1, 2, 2]  # and the token that the last guess leads to
    run.scheduler.remove(sequence)


def test_scores_and_text_are_those_of_each_token(monkeypatch):
    def scored(chance: float) -> list:
        rig, answers = guessing(monkeypatch, FULL, chance)
        answers.append(rig.ask("a", words(30), 30, logprobs=3))
        rig.drain()
        return [answers[0].text, [score for event in answers[0].events for score in event.scores]]

    assert scored(1.0) == scored(0.0)


def test_each_of_several_answers_is_guessed_on_its_own():
    def answers(**options) -> list:
        rig = Rig({"a": FakeRunner(FULL, "a")}, **options)
        rig.put("a")
        asked = rig.ask("a", [*words(20)] * 3, 40, 1.0, n=3, seed=4)
        rig.drain()
        return sorted((event.index, event.token_ids) for event in asked.events)

    assert answers(speculative_tokens=4) == answers()


def test_searches_and_grammars_are_not_guessed(monkeypatch):
    rig, answers = guessing(monkeypatch, FULL, 1.0)
    answers.append(rig.ask("a", words(30), 20, terms=Terms(beam=BeamParams(2))))
    rig.drain()
    assert rig.engine.load()["drafted_tokens"] == 0


class Always:
    most = 3

    def guess(self, tokens: np.ndarray, most: int) -> np.ndarray:
        return np.full(min(most, self.most), 5, np.int32)


def test_nothing_is_guessed_beside_a_prompt_nor_in_a_large_step():
    run = Run(tokens=64)
    run.scheduler._speculative_tokens, run.scheduler._speculative_sequences = 3, 2

    def add(prompt: int) -> Sequence:
        sequence = run.add(prompt, 50)
        sequence.drafter = Always()
        return sequence

    first = add(10)
    assert run.scheduler.schedule().counts == [10]
    run.kv.commit(first, 10)
    first.append(1)
    assert run.scheduler.schedule().counts == [4] and first.drafted == 3
    second = add(10)
    assert run.scheduler.schedule().counts == [1, 10] and first.drafted == 0
    run.kv.commit(second, 10)
    second.append(1)
    assert run.scheduler.schedule().counts == [4, 4]
    third = add(1)
    assert run.scheduler.schedule().counts == [1, 1, 1]
    for sequence in (first, second, third):
        run.scheduler.remove(sequence)
    run.finish()


@pytest.mark.parametrize("budget", [16, 512])
def test_several_answers_to_a_prompt_that_repeats_itself_are_those_without_guessing(budget):
    """Of its 33 tokens the last is computed alone: within so small a budget, and where the rest is cached."""

    def answers(**options) -> list:
        rig = Rig({"a": FakeRunner(FULL, "a")}, max_batch_tokens=budget, **options)
        rig.put("a")
        said = []
        for _ in range(2):
            asked = rig.generate("a", [7, 8, 9] * 11, max_tokens=12, temperature=1.0, n=3)
            said.append(sorted((event.index, event.token_ids) for event in asked.events))
        return said

    assert answers(speculative_tokens=4) == answers()
