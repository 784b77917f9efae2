"""The measurements on the real engine, tried with a checkpoint without weights: what is held, counted and fitted."""

import argparse
import itertools
import types

import numpy as np
import pytest

from engine.__main__ import main
from engine.config import EngineConfig
from engine.kv.reserved import POLICIES
from engine.simulate import growth
from engine.simulate.command import draw
from engine.simulate.growth import PARTS, ROOM, Stepper
from engine.simulate.real import CLOCKS, Contestant, begun, fit, measure, predict
from engine.simulate.traces import Trace
from tests.engine.fake_runner import FULL, HYBRID, FakeRunner


def contestant(policy: str, pairs=None) -> Contestant:
    runner = FakeRunner(context_length=2048, vocab_size=50_000)
    runner.backend = None
    config = EngineConfig(dtype="float32", policy=policy, kv_memory_bytes=2**20, page_bytes=4096, check_integrity=True)
    return Contestant(config, runner, pairs or itertools.repeat((100, 60)), CLOCKS["wall"])


def test_the_policies_differ_in_how_many_they_hold_and_in_how_full_their_slots_are():
    """A pool of 4,096 slots: 25 prompts of 100 tokens, 2 contexts of 2,048."""
    engines = {policy: contestant(policy) for policy in POLICIES}
    measure(engines.values(), warm_up=12, steps=4)
    held = {policy: each.measured.sequences for policy, each in engines.items()}
    filled = {policy: each.measured.filled_percent for policy, each in engines.items()}
    assert held["max"] == 2 and held["max"] < held["pow2"] <= held["oracle"] < held["paged"]
    assert filled["max"] < filled["pow2"] <= filled["oracle"] < filled["paged"]
    assert all(len(each.measured.steps) == 4 for each in engines.values())


def test_every_token_of_a_step_is_counted_as_generated_or_as_prompt():
    one = contestant("max", iter([(100, 60)] * 60))
    measure([one], warm_up=0, steps=3)
    _, generated, context, prompts = zip(*one.measured.steps, strict=True)
    assert prompts == (198, 0, 0)  # the last token of a prompt generates one, as one that decodes does
    assert generated == (2, 2, 2)
    assert context == (200, 202, 204)


def test_requests_that_have_begun_keep_their_length():
    pairs = [(10, 40)] * 50
    made = list(begun(iter(pairs), seed=1))
    assert {prompt + answer for prompt, answer in made} == {50}
    assert made[-1] == (10, 40) and len(set(made)) > 10
    assert min(answer for _, answer in made) >= 1


def test_the_curve_of_step_times_is_found_again():
    source, truth = np.random.default_rng(0), np.array([4e-3, 3e-4, 1e-6, 2e-4])
    causes = np.column_stack(
        [np.ones(300), source.integers(1, 40, 300), source.integers(0, 9000, 300), source.integers(0, 99, 300)]
    )
    steps = [(float(row @ truth), *map(int, row[1:])) for row in causes]
    steps[7] = (9.0, *steps[7][1:])  # a step in which the machine did something else
    curve = fit(steps)
    assert curve == pytest.approx(truth, rel=1e-3)
    seconds = 4e-3 + 10 * 3e-4 + 5000 * 1e-6 + 5 * 2e-4
    assert predict(curve, 10, 5000, Trace(50, 100)) == pytest.approx(10 / seconds, rel=1e-3)


@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize(
    "options", [{}, {"scattered": True}, {"policy": "oracle"}, {"models": 2}, {"cached_blocks": 9}]
)
def test_a_stepper_holds_what_was_asked_for_and_generates_a_token_for_each(geometry, options):
    stepper = Stepper(FakeRunner(geometry=geometry), sequences=4, context=50, **options)
    running = stepper.scheduler.running
    assert [(each.computed, each.uncomputed) for each in running] == [(50, 1)] * 4
    seconds, python, tokens = stepper.step()
    assert 0 < python < seconds
    assert tokens == 4 // options.get("models", 1)
    assert stepper.kv.blocks.cached_pages == options.get("cached_blocks", 0) * stepper.spaces[0].pages_per_bundle
    stepper.kv.check_integrity()


def test_many_sequences_are_brought_to_their_context_together():
    stepper = Stepper(FakeRunner(), sequences=80, context=60)
    assert {(each.computed, each.uncomputed) for each in stepper.scheduler.running} == {(60, 1)}
    assert len(stepper.scheduler.running) == 80


def test_a_step_is_measured_for_as_long_as_there_is_room():
    milliseconds, python, rate = Stepper(FakeRunner(), sequences=2, context=20).measure(steps=5)
    assert 0 < python < milliseconds and rate > 0
    assert all(case["context"] + ROOM <= 8192 for cases in PARTS.values() for case in cases)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_growth_can_be_drawn(monkeypatch, part):
    small = [{**case, "sequences": 2, "context": 20 + number} for number, case in enumerate(PARTS[part][:2])]
    monkeypatch.setitem(PARTS, part, small)
    runner = FakeRunner()
    runner.backend = types.SimpleNamespace(name="none")
    monkeypatch.setattr(growth, "load_runner", lambda *_: runner)
    table = growth.measure(EngineConfig(), argparse.Namespace(part=part, clock="wall"))
    assert draw(table).startswith("<svg")


def test_processor_time_of_several_threads_is_refused(capsys):
    assert main(["simulate", "real", "--clock", "processor"]) == 2
    assert "--threads 1" in capsys.readouterr().err
