"""Beam search finds what transformers finds, whatever else runs and however short pages are."""

from __future__ import annotations

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import kernels
from engine.architectures import load_checkpoint
from engine.beam import BeamParams
from engine.config import EngineConfig
from engine.core import Engine, ModelSpec
from engine.errors import InvalidParameter
from engine.kv.pool import PagePool
from engine.request import Terms
from engine.sequence import SamplingParams, Sequence, State
from tests.engine.fake_runner import FULL, HYBRID, FakeRunner
from tests.engine.rig import Rig
from tests.engine.server_fixture import tiny_folder
from tests.engine.test_core import rig_of, words
from tests.engine.test_scheduler import Run
from tests.engine.tiny import tiny_tokenizer

PROMPT = [50, 60, 70, 80, 90, 100, 110]
ENDS = [30, 31, 32, 33, 34, 35, 36, 37, 38, 39]


@pytest.fixture(scope="module")
def transformer():
    return AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tiny():
    """A rig over a real tiny llama."""
    runner = load_checkpoint(
        tiny_folder("llama"), dtype=torch.float32, backend=kernels.load("reference"), progress=lambda *_: None
    )
    engine = Engine(EngineConfig(dtype="float32", check_integrity=True), None, lambda *_: runner, PagePool(400, 16384))
    engine.put_model(ModelSpec("llama", "x"))
    while engine.models()[0].status != "ready":
        engine.step()
    return engine


def search(engine, beam: BeamParams, n: int, ends: list[int], max_tokens: int, **params) -> list[list[int]]:
    events = []
    asked = SamplingParams(max_tokens, n=n, ignore_eos=True, stop_token_ids=tuple(ends), **params)
    engine.submit("llama", PROMPT, asked, events.append, Terms(beam=beam))
    while engine.step():
        pass
    assert sorted(event.index for event in events) == list(range(n))
    assert all((event.finish_reason == "stop") == (event.token_ids[-1] in ends) for event in events)
    return [list(event.token_ids) for event in sorted(events, key=lambda event: event.index)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0, 2.5])
@pytest.mark.parametrize(("width", "n"), [(2, 1), (3, 3), (5, 2)])
def test_the_answers_are_those_of_transformers(tiny, transformer, width, n, length_penalty, early_stopping):
    found = search(tiny, BeamParams(width, length_penalty, early_stopping), n, ENDS, 24)
    expected = transformer.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=n,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=24,
        eos_token_id=ENDS,
        pad_token_id=5,
        do_sample=False,
    )
    padded = [tokens + [5] * (expected.shape[1] - len(PROMPT) - len(tokens)) for tokens in found]
    assert padded == expected[:, len(PROMPT) :].tolist()


def test_no_answer_ends_before_min_tokens(tiny, transformer):
    found = search(tiny, BeamParams(4), 4, ENDS, 16, min_tokens=9)
    assert all(len(tokens) >= 9 for tokens in found)


def fake(geometry=HYBRID, **options) -> Rig:
    rig = Rig({"a": FakeRunner(geometry, "a", eos_token_ids=frozenset(range(0, 384, 40)))}, **options)
    rig.put("a")
    return rig


def beams(rig: Rig, width: int = 4, **others) -> list[tuple[int, ...]]:
    asked = rig.ask("a", words(40), 30, n=width, terms=Terms(beam=BeamParams(width)), **others)
    rig.drain()
    return [event.token_ids for event in sorted(asked.events, key=lambda event: event.index)]


@pytest.mark.parametrize(
    "options",
    [{"pages": 60}, {"pages": 74}, {"max_sequences": 4}, {"enable_prefix_cache": False}, {"max_batch_tokens": 16}],
)
def test_shortage_and_neighbours_change_nothing(options):
    plenty = beams(fake(pages=1000))
    scarce = fake(**options)
    neighbours = [scarce.ask("a", words(30, seed), 25) for seed in range(3)]
    assert beams(scarce) == plenty
    assert [each.token_ids for each in neighbours] == [each.expected() for each in neighbours]


@pytest.mark.parametrize("sharing", [True, False])
def test_a_search_ends_where_only_one_of_its_beams_fits(sharing):
    rig = fake(pages=30, enable_prefix_cache=sharing)
    other = rig.ask("a", words(20), 10)
    assert beams(rig, 6) == beams(fake(pages=1000), 6)
    assert other.token_ids == other.expected()


@pytest.mark.parametrize(
    "options", [{"max_sequences": 4}, {"max_sequences": 6}, {"pages": 30}, {"pages": 60}, {"pages": 74}], ids=str
)
@pytest.mark.parametrize("users", [3, 1])
def test_searches_do_not_keep_each_other_from_their_end(options, users):
    def answers(rig: Rig) -> list:
        asked = []
        for n in range(3):
            asked.append(rig.ask("a", words(30, n), 30, n=4, terms=Terms(f"{n % users}", beam=BeamParams(4))))
            asked.append(rig.ask("a", words(20, 9 + n), 20, terms=Terms("another")))
            for _ in range(4):
                rig.engine.step()
        rig.drain()
        found = [sorted((event.index, event.token_ids) for event in each.events) for each in asked[::2]]
        return found + [each.token_ids for each in asked[1::2]]

    assert answers(fake(**options)) == answers(fake(pages=1000))


def test_a_search_goes_on_at_whatever_places_others_leave_it():
    rig = fake(max_sequences=4)
    searched = rig.ask("a", words(40), 30, n=4, terms=Terms("one", beam=BeamParams(4)))
    rig.engine.step()
    for n in range(60):  # there is always somebody else
        rig.ask("a", words(20, n), 8, terms=Terms(f"user {n % 5}"))
    rig.until(lambda: searched.reason is not None)
    assert rig.scheduler.waiting, "it did not wait until all others were done"
    assert [event.token_ids for event in sorted(searched.events, key=lambda event: event.index)] == beams(fake())
    rig.drain()


def test_a_beam_that_has_looked_ahead_gives_its_place_to_the_next_of_its_search():
    rig = fake(max_sequences=2)
    long = rig.ask("a", words(20), 60, ignore_eos=True)
    searched = rig.ask("a", words(40), 10, n=2, terms=Terms(beam=BeamParams(2)))
    rig.until(lambda: searched.reason is not None)
    assert len(long.token_ids) < 60
    rig.drain()


def beam(run: Run, search: object, user: str, prompt: int = 10) -> Sequence:
    """A sequence of `user`, of a search unless that is None, and in the line."""
    sequence = Sequence(run.spaces["a"], range(1000 * run.made, 1000 * run.made + prompt), 20)
    run.made += 1
    sequence.client, sequence.joint = ("a", user), search
    run.scheduler.add(sequence)
    return sequence


def look_ahead(run: Run) -> None:
    """A step after which beams wait for each other, and all else has a token more."""
    step = run.scheduler.schedule()
    for sequence, count in zip(step.sequences, step.counts, strict=True):
        run.kv.commit(sequence, count)
        if sequence.joint is None:
            sequence.append(1)


def test_a_place_is_taken_from_a_beam_that_waits_before_one_that_goes_on():
    run = Run(sequences=4)
    crowd = [beam(run, None, "crowd", 5) for _ in range(2)]
    waits, prefills = (beam(run, "search", "one", prompt) for prompt in (5, 200))
    look_ahead(run)
    assert waits.waits_for_others and not prefills.waits_for_others
    another = beam(run, None, "two")
    run.scheduler.schedule()
    assert set(run.scheduler.running) == {*crowd, prefills, another} and waits.state is State.RESTING


@pytest.mark.parametrize(("options", "most"), [({"max_sequences": 3}, 3), ({"max_batch_tokens": 16}, 16)])
def test_more_beams_than_ever_run_at_once_are_refused(options, most):
    rig = fake(**options)
    with pytest.raises(InvalidParameter, match=f"at most {most} sequences") as refused:
        rig.ask("a", words(20), 5, n=most + 1, terms=Terms(beam=BeamParams(most + 1)))
    assert refused.value.param == "beam_width"
    assert len(beams(rig, most)) == most


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 12])
def test_an_abort_ends_all_beams(steps):
    rig = rig_of(FULL)
    asked = rig.ask("a", words(40), 60, n=2, terms=Terms(beam=BeamParams(5)))
    for _ in range(steps):
        rig.engine.step()
    rig.engine.abort(asked.id)
    rig.drain()
    assert [event.finish_reason for event in asked.events] == ["abort"] * 2


def test_a_row_of_nan_fails_the_search():
    rig = rig_of(FULL)
    rig.checkpoints["a"].nan_token = 7
    asked = rig.ask("a", [*words(20), 7], 20, n=2, terms=Terms(beam=BeamParams(3)))
    rig.drain()
    assert [event.finish_reason for event in asked.events] == ["error"] * 2


# Over HTTP


def test_completions_answer_with_the_best_of_the_beams(engine, transformer):
    body = {"model": "llama", "prompt": PROMPT, "max_tokens": 10, "use_beam_search": True, "n": 2, "beam_width": 4}
    answer = httpx.post(engine.url + "/v1/completions", json={**body, "ignore_eos": True}).json()
    expected = transformer.generate(
        torch.tensor([PROMPT]),
        num_beams=4,
        num_return_sequences=2,
        max_new_tokens=10,
        eos_token_id=None,
        do_sample=False,
    )
    best = tiny_tokenizer(adds_bos=False).decode(expected[0, len(PROMPT) :].tolist(), skip_special_tokens=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"].rstrip("\ufffd") == best.rstrip("\ufffd")
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "n"),
        ({"use_beam_search": True, "beam_width": 100}, "beam_width"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_name(engine, body, param):
    answer = httpx.post(engine.url + "/v1/completions", json={"model": "llama", "prompt": "x", **body})
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, param), answer.text
