"""The engine as a whole, over fake checkpoints whose answers show every wrong page; see `fake_runner`."""

import gc
import random
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.core import Engine, ModelSpec
from engine.errors import (
    BadRequest,
    CheckpointError,
    ContextTooLong,
    EngineDead,
    InvalidParameter,
    ModelAsleep,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
)
from engine.kv.geometry import KVGeometry
from engine.request import Terms
from engine.sequence import SamplingParams
from kernels.spec import StepBatch
from tests.engine.fake_runner import FULL, HYBRID, SLIDING, TOKENIZER, TWO_WINDOWS, FakeRunner, group
from tests.engine.rig import Rig
from tests.waiting import until

GEOMETRIES = {"full": FULL, "hybrid": HYBRID, "sliding": SLIDING, "two windows": TWO_WINDOWS}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
SYSTEM_PROMPT = "You answer in one short sentence, and you never say what you are. " * 2


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, 300, count).tolist()


def rig_of(geometry=FULL, names="a", **options) -> Rig:
    """Models a, b ... over checkpoints a, b ..., all of one geometry."""
    rig = Rig({name: FakeRunner(geometry, name) for name in names}, **options)
    for name in names:
        rig.put(name)
    return rig


# Right answers


@every_geometry
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 100])
def test_a_prompt_of_any_length_is_answered_as_without_pages(geometry, length):
    answer = rig_of(geometry, max_batch_tokens=32).generate("a", words(length), max_tokens=40)
    assert answer.token_ids == answer.expected()
    assert answer.reason == "length"


@every_geometry
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_sharing_and_page_order_change_nothing(geometry, sharing, seed):
    rig = rig_of(geometry, names="ab", seed=seed, enable_prefix_cache=sharing, max_batch_tokens=48)
    asked = [(name, words(60)[:length]) for length in (5, 16, 40, 60) for name in "ab" for _ in range(2)]
    answers = [rig.ask(name, prompt, 20, temperature) for name, prompt in asked for temperature in (0, 0.8)]
    rig.drain()
    assert [a.token_ids for a in answers] == [a.expected() for a in answers]
    assert (rig.engine.kv()["cached_tokens_served"] > 0) == sharing


@pytest.mark.parametrize("pages", [18, 22, 30])
@every_geometry
def test_preempted_sequences_say_what_they_would_have_said(geometry, pages):
    rig = rig_of(geometry, pages=pages, max_batch_tokens=16, prefill_tokens_beside_decodes=16)
    longest = min(rig.memory.longest(rig.engine._models["a"].checkpoint.space, 90), 90)
    answers = [rig.ask("a", words(12, seed), longest - 12, temperature=seed % 2) for seed in range(5)]
    rig.drain()
    assert [a.token_ids for a in answers] == [a.expected() for a in answers]


@pytest.mark.parametrize("at", range(1, 41))
def test_preemption_after_any_number_of_tokens_loses_and_repeats_nothing(at):
    rig = rig_of(HYBRID)
    first, second = rig.ask("a", words(20, 1), 45), rig.ask("a", words(20, 2), 45, temperature=1.0)
    rig.until(lambda: len(second.token_ids) == at)
    rig.scheduler._preempt(rig.scheduler.running[-1])
    rig.drain()
    assert (first.token_ids, second.token_ids) == (first.expected(), second.expected())
    assert second.last.cached_tokens == 0, "what it found again after the preemption is not a saving"


@every_geometry
def test_a_prompt_of_whole_blocks_sent_twice(geometry):
    rig = rig_of(geometry)
    for length in (16, 32, 64):
        once, twice = (rig.generate("a", words(length, seed=length)) for _ in range(2))
        assert once.token_ids == twice.token_ids == once.expected()
        assert (once.last.cached_tokens, twice.last.cached_tokens) == (0, length - 16)


@every_geometry
def test_a_second_turn_finds_the_first_with_its_answer(geometry):
    rig = rig_of(geometry)
    first = rig.generate("a", words(50), max_tokens=30)
    second = rig.generate("a", [*words(50), *first.token_ids, *words(20, seed=1)])
    assert second.last.cached_tokens == 64  # 79 tokens have KV: four whole blocks
    assert second.token_ids == second.expected()


@every_geometry
def test_only_requests_with_the_same_salt_find_each_others_blocks(geometry):
    rig, prompt, hits = rig_of(geometry), words(80), []
    for salt in ("", "one", "two", "one", ""):
        asked = rig.ask("a", prompt, 20, n=2, terms=Terms(cache_salt=salt))
        rig.drain()
        assert sorted(asked.token_ids) == sorted(2 * asked.expected())
        hits.append(max(event.cached_tokens for event in asked.events))
    assert hits == [0, 0, 0, 64, 64]


def test_two_of_one_prompt_in_one_step_and_one_aborted_midway():
    rig = rig_of(HYBRID, max_batch_tokens=32)
    first, second = rig.ask("a", words(90), 20), rig.ask("a", words(90), 20)
    for _ in range(2):
        rig.engine.step()
    rig.engine.abort(first.id)
    rig.drain()
    assert (first.reason, second.reason) == ("abort", "length")
    assert second.token_ids == second.expected()


def test_a_request_that_comes_while_its_prefix_is_being_computed_uses_only_what_is_done():
    rig = rig_of(HYBRID, max_batch_tokens=24)
    first = rig.ask("a", words(90), 20)
    rig.engine.step()
    rig.engine.step()
    second = rig.ask("a", words(90), 20)
    rig.drain()
    assert 0 < second.last.cached_tokens <= 80
    assert first.token_ids == second.token_ids == first.expected()


@every_geometry
def test_of_prompts_that_come_at_once_the_later_ones_use_what_the_first_computed(geometry):
    rig = rig_of(geometry, max_batch_tokens=48)
    answers = [rig.ask("a", [*words(90), tail], 6) for tail in range(10, 18)]
    rig.drain()
    assert rig.engine.load()["computed_tokens"] < 8 * (91 + 5) / 2
    assert all(0 <= answer.last.cached_tokens <= 90 for answer in answers)
    assert rig.engine.kv()["cached_tokens_served"] == sum(answer.last.cached_tokens for answer in answers)
    assert [a.token_ids for a in answers] == [a.expected() for a in answers]


def test_five_hundred_aborts_at_random_times_leave_nothing_behind():
    rig, choose = rig_of(HYBRID, names="ab", pages=120, check_integrity=False), random.Random(0)
    answers = [rig.ask(choose.choice("ab"), words(choose.randint(1, 70), i % 5), 30) for i in range(500)]
    for answer in choose.sample(answers, len(answers)):
        rig.engine.abort(answer.id)
        if choose.random() < 0.3:
            rig.engine.step()
            rig.memory.check_integrity()
    rig.drain()
    assert {answer.reason for answer in answers} <= {"abort", "length"}
    assert rig.engine.load()["waiting"] == rig.engine.load()["running"] == 0


# Batches


def numbers_of(batch: StepBatch) -> list:
    columns = batch.tokens, batch.positions, batch.query_starts, batch.context_lens, batch.logit_rows
    return [column.tolist() for column in (*columns, *batch.page_tables)]


@every_geometry
def test_a_batch_that_is_kept_from_the_step_before_is_what_it_would_be_made_anew(geometry):
    rig, kept = rig_of(geometry, names="ab", pages=60, max_batch_tokens=32), 0
    build = rig.engine._batches.build

    def compared(step, adapters):
        nonlocal kept
        before, batch = rig.engine._batches._lone, build(step, adapters)
        kept += batch is before
        assert numbers_of(batch) == numbers_of(build_batch(step, adapters))
        return batch

    rig.engine._batches.build = compared
    rig.generate("a", words(20), max_tokens=40)
    answers = [rig.ask("a", words(30, seed), 20 + 30 * seed) for seed in range(2)]
    rig.until(lambda: answers[0].reason)
    rig.ask("b", words(50), 20)
    rig.drain()
    rig.generate("a", words(20), max_tokens=40)  # finds the blocks of the first
    assert kept > 80


# What ends an answer


def test_an_end_token_ends_the_answer_and_has_no_text():
    rig = rig_of()
    expected = rig.generate("a", words(20), max_tokens=20).token_ids
    end = next(token for token in expected[3:] if TOKENIZER.decode([token]).strip().isalnum())  # it would have text
    rig.checkpoints["a"].eos_token_ids = frozenset({end})
    answer = rig.generate("a", words(20), max_tokens=20)
    count = expected.index(end) + 1
    assert (answer.token_ids, answer.reason, answer.last.completion_tokens) == (expected[:count], "stop", count)
    assert answer.text == TOKENIZER.decode(expected[: count - 1], skip_special_tokens=True).rstrip("\ufffd")


def test_end_tokens_are_ignored_on_request():
    rig = rig_of()
    rig.checkpoints["a"].eos_token_ids = frozenset(range(384))
    assert rig.generate("a", words(20), max_tokens=9).last.completion_tokens == 1
    assert rig.generate("a", words(20), max_tokens=9, ignore_eos=True).last.completion_tokens == 9


def test_a_stop_token_ends_the_answer_too():
    rig = rig_of()
    expected = rig.generate("a", words(20)).token_ids
    answer = rig.generate("a", words(20), stop_token_ids=(expected[3],))
    assert (answer.reason, answer.token_ids) == ("stop", expected[: expected.index(expected[3]) + 1])


def test_none_of_several_end_tokens_comes_before_min_tokens():
    rig = rig_of()
    rig.checkpoints["a"].eos_token_ids = ends = frozenset(range(0, 384, 2))
    answer = rig.generate("a", words(20), max_tokens=60, min_tokens=10)
    assert answer.reason == "stop"
    assert not ends & set(answer.token_ids[:10])
    assert answer.token_ids == answer.expected()


def test_a_stop_string_ends_the_answer_and_is_not_in_its_text():
    rig = rig_of()
    text = rig.generate("a", words(20), max_tokens=40).text
    stop = text[7:11]
    answer = rig.generate("a", words(20), max_tokens=40, stop=(stop,))
    assert (answer.reason, answer.text) == ("stop", text[: text.index(stop)])


def test_max_tokens_of_nothing_and_of_one():
    rig = rig_of()
    none, one = rig.generate("a", words(20), max_tokens=0), rig.generate("a", words(20), max_tokens=1)
    assert (none.reason, none.token_ids, none.last.prompt_tokens) == ("length", [], 20)
    assert (one.reason, one.token_ids) == ("length", one.expected())


def test_without_a_seed_two_answers_differ_and_with_one_they_do_not():
    rig = rig_of()
    unseeded = [rig.generate("a", words(9), temperature=1.0, seed=None).token_ids for _ in range(2)]
    seeded = [rig.generate("a", words(9), temperature=1.0, seed=5).token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    assert seeded[0] == seeded[1]


# Faults


def test_a_row_of_nan_fails_its_own_request_only():
    rig = rig_of(HYBRID)
    rig.checkpoints["a"].nan_token = 7
    good, bad = rig.ask("a", words(40), 20), rig.ask("a", [*words(40, seed=1), 7], 20)
    rig.drain()
    assert (good.token_ids, good.reason) == (good.expected(), "length")
    assert (bad.reason, bad.token_ids) == ("error", [])
    rig.checkpoints["a"].nan_token = None
    again = rig.generate("a", [*words(40, seed=1), 7])
    assert again.last.cached_tokens == 0, "what a failed request wrote is not found"


def test_what_several_answers_of_a_failed_request_wrote_together_is_not_found_again():
    rig = rig_of(FULL)
    bad, forward = rig.ask("a", words(40), 20, n=3, temperature=1.0), rig.checkpoints["a"].forward
    for _ in range(4):
        rig.engine.step()
    assert rig.memory.blocks.shared
    rig.checkpoints["a"].forward = None
    rig.engine.step()
    rig.checkpoints["a"].forward = forward
    assert [event.finish_reason for event in bad.events if event.finish_reason] == ["error"] * 3
    assert rig.generate("a", words(40)).last.cached_tokens == 0


def test_a_failing_forward_fails_its_own_requests_and_the_engine_goes_on():
    rig = rig_of(HYBRID, names="ab")
    rig.checkpoints["a"].crash_token = 7
    bad, other = rig.ask("a", [*words(40), 7], 20), rig.ask("b", words(40), 20)
    rig.drain()
    assert (bad.reason, other.reason) == ("error", "length")
    assert "crash token" in bad.last.error
    assert rig.generate("a", words(40)).reason == "length"


def test_a_consumer_that_raises_harms_nobody_else():
    rig = rig_of()

    def broken(event):
        raise OSError("gone")

    rig.engine.submit("a", words(20), SamplingParams(20), broken)
    good = rig.generate("a", words(20, seed=1))
    assert good.token_ids == good.expected()
    assert rig.engine.load()["generated_tokens"] == 1 + len(good.token_ids), "nothing is computed for nobody"


# Refusals


def test_refusals_name_the_numbers():
    rig = rig_of(pages=40)  # 320 tokens
    rig.checkpoints["c"] = FakeRunner(FULL, "c", context_length=100)
    rig.put("c")
    for ask, error, said in (
        (lambda: rig.ask("c", words(90), 20), ContextTooLong, "90.*20.*100"),
        (lambda: rig.ask("c", words(101), 1), ContextTooLong, "101.*100"),
        (lambda: rig.ask("a", words(300), 21), ContextTooLong, "300.*21.*320"),
        (lambda: rig.ask("a", [], 1), InvalidParameter, "empty"),
        (lambda: rig.ask("a", [5, 384], 1), InvalidParameter, "383"),
        (lambda: rig.ask("a", [-1], 1), InvalidParameter, "383"),
        (lambda: rig.ask("nobody", [5], 1), ModelNotFound, "nobody"),
    ):
        with pytest.raises(error, match=said):
            ask()
    assert rig.scheduler.idle


def test_what_no_longer_fits_beside_a_later_system_prompt_is_refused_with_both_numbers():
    rig = rig_of(pages=40)
    rig.put("b", "a", system_prompt=SYSTEM_PROMPT)
    left = (40 - rig.memory.pinned_pages) * 8
    assert rig.engine.runner_of("a")[1].context_length == left < 320
    with pytest.raises(ContextTooLong, match=f"{left - 9}.*10.*{left}"):
        rig.ask("a", words(left - 9), 10)
    rig.engine.delete_model("b")
    rig.engine.step()
    assert rig.generate("a", words(310), max_tokens=10).reason == "length"


BRIEF = "You answer in one short sentence. "


@pytest.mark.parametrize("geometry", [FULL, HYBRID, TWO_WINDOWS], ids=["full", "hybrid", "two windows"])
def test_a_chat_can_become_as_long_as_its_model_says_beside_all_system_prompts(geometry):
    rig = Rig({name: FakeRunner(geometry, name) for name in "ab"}, pages=48, max_batch_tokens=16)
    for name in "ab":
        rig.put(name, system_prompt=f"{name}. {BRIEF}")
        for known in [status.name for status in rig.engine.models()]:
            model, (_, spec) = rig.engine._models[known], rig.engine.runner_of(known)
            assert len(model.prefix_ids) % 16, "a begun block is pinned too, and nobody shares it"
            prompt = [*model.prefix_ids, 5]
            room = spec.context_length - len(prompt)
            with pytest.raises(ContextTooLong):
                rig.ask(known, prompt, room + 1)
            answer = rig.generate(known, prompt, max_tokens=room)
            assert (answer.reason, answer.token_ids) == ("length", answer.expected())


def test_a_chat_reaches_its_length_though_it_leaves_pinned_blocks_behind_its_window():
    rig = Rig({"a": FakeRunner(KVGeometry((group(None, 1), group(100, 3))), "a")}, pages=56, max_batch_tokens=16)
    rig.put("a", system_prompt=BRIEF * 3)
    prompt = [*rig.engine._models["a"].prefix_ids, 5]
    room = rig.engine.runner_of("a")[1].context_length - len(prompt)
    assert len(prompt) > 48 and room > 100
    assert rig.generate("a", prompt, max_tokens=room).reason == "length"


@pytest.mark.parametrize("why", ["own system message", "too short", "salted", "scored"])
def test_what_cannot_share_the_system_prompt_is_refused_at_once_where_only_sharing_would_make_it_fit(why):
    rig = Rig({"a": FakeRunner(FULL, "a")}, pages=40)
    rig.put("a", system_prompt=BRIEF)
    prefix = rig.engine._models["a"].prefix_ids
    prompt = {"own system message": words(40), "too short": prefix[:16]}.get(why, [*prefix, 5])
    terms, params = Terms(cache_salt="one" if why == "salted" else ""), {}
    if why == "scored":
        params = {"logprobs": 0, "prompt_logprobs": True}
    longest = (40 - rig.memory.pinned_pages) * 8
    assert longest < rig.engine.runner_of("a")[1].context_length
    with pytest.raises(BadRequest, match=f"allows {longest}"):
        rig.ask("a", prompt, longest - len(prompt) + 1, terms=terms, **params)
    answer = rig.ask("a", prompt, longest - len(prompt), terms=terms, **params)
    rig.drain()
    assert answer.reason == "length"


def test_a_full_queue_says_so():
    rig = rig_of(max_waiting=3)
    answers = [rig.ask("a", words(5)) for _ in range(3)]
    with pytest.raises(QueueFull, match="3"):
        rig.ask("a", words(5))
    rig.drain()
    assert {answer.reason for answer in answers} == {"length"}


# Models and checkpoints


def test_models_of_one_checkpoint_run_in_the_same_forward():
    rig = rig_of()
    rig.put("twin", "a", system_prompt="x")
    rig.checkpoints["a"].batch_sizes.clear()
    answers = [rig.ask(name, words(10), 20) for name in ("a", "twin")]
    rig.drain()
    assert set(rig.checkpoints["a"].batch_sizes) == {2}
    assert answers[0].token_ids == answers[1].token_ids


def test_two_checkpoints_advance_together():
    rig = rig_of(names="ab")
    left, right = rig.ask("a", words(30), 40), rig.ask("b", words(30), 40)
    while rig.engine.step():
        assert abs(len(left.token_ids) - len(right.token_ids)) <= 1


@every_geometry
def test_a_system_prompt_is_computed_once_and_found_by_every_chat(geometry):
    rig = Rig({"a": FakeRunner(geometry, "a")}, pages=120, max_batch_tokens=32)
    rig.put("a", system_prompt=SYSTEM_PROMPT)
    (status,) = rig.engine.models()
    pinned = rig.engine.kv()["pages"]["pinned"]
    assert status.system_prompt_tokens >= 48 and status.system_prompt_tokens % 16 and pinned > 0
    for seed in range(30):  # enough others to evict all that can be
        rig.generate("a", words(100, seed), max_tokens=20)
    assert rig.engine.kv()["evicted_blocks"] > 0
    chat = rig.checkpoints["a"].chat.encode(
        [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "What is a page?"}]
    )
    answer = rig.generate("a", chat, max_tokens=20)
    assert answer.last.cached_tokens == status.system_prompt_tokens, "its last block is begun, and was copied"
    assert answer.token_ids == answer.expected()
    rig.engine.delete_model("a")
    rig.drain()
    assert rig.engine.kv()["pages"] == {"total": 120, "free": 120, "cached": 0, "used": 0, "pinned": 0}


def test_models_with_one_system_prompt_pin_it_once():
    rig = rig_of()
    rig.put("one", "a", system_prompt=SYSTEM_PROMPT)
    pinned = rig.memory.pinned_pages
    rig.put("two", "a", system_prompt=SYSTEM_PROMPT)
    assert rig.memory.pinned_pages == pinned
    assert rig.memory.cached_tokens_served == 0, "nobody asked anything yet"
    rig.engine.delete_model("one")
    rig.drain()
    assert rig.memory.pinned_pages == pinned


def test_a_model_deleted_while_its_system_prompt_is_computed_leaves_nothing():
    rig = Rig({"a": FakeRunner(HYBRID, "a")}, max_batch_tokens=16)
    rig.put("a", system_prompt=SYSTEM_PROMPT, wait=False)
    rig.engine.step()
    rig.engine.step()
    assert rig.memory.used_pages() > 0 and rig.status("a") == "loading"
    rig.engine.delete_model("a")
    rig.drain()
    assert rig.engine.kv()["pages"]["free"] == rig.engine.kv()["pages"]["total"]


def test_a_system_prompt_too_long_for_the_pool_or_the_context_fails_its_model_only():
    rig = rig_of(pages=16)
    rig.put("greedy", "a", system_prompt=SYSTEM_PROMPT)
    rig.put("short", "a", system_prompt=SYSTEM_PROMPT, context_length=20)
    reasons = {status.name: status.reason for status in rig.engine.models()}
    assert "kv_memory_bytes" in reasons["greedy"]
    assert "allows 20" in reasons["short"]
    with pytest.raises(ModelNotReady, match="allows 20"):
        rig.ask("short", [5])
    assert rig.generate("a", words(20)).reason == "length"


def test_a_context_longer_than_the_checkpoints_is_refused_with_both_numbers():
    rig = Rig({"a": FakeRunner(FULL, "a", context_length=100)})
    rig.put("early", "a", context_length=5000)
    assert rig.engine.models()[0].reason == "context_length is 5,000 tokens; a allows 100"
    with pytest.raises(CheckpointError, match="is 101 tokens; a allows 100"):
        rig.put("late", "a", context_length=101)
    assert [status.name for status in rig.engine.models()] == ["early"]
    rig.put("right", "a", context_length=100)
    assert rig.engine.models()[1].checkpoint_context_length == 100


def test_default_stop_tokens_that_the_checkpoint_does_not_have_fail_the_model_with_both_numbers():
    rig = Rig({"a": FakeRunner(FULL, "a")})
    said = r"stop_token_ids: 384, -1 out of vocabulary; a has 384 tokens"
    rig.put("early", "a", sampling={"stop_token_ids": [5, 384, -1]})
    assert rig.status("early") == "failed" and re.search(said, rig.engine.models()[0].reason)
    rig.put("right", "a", sampling={"stop_token_ids": [5, 383]})
    assert rig.status("right") == "ready"
    with pytest.raises(CheckpointError, match=said):
        rig.put("late", "a", sampling={"stop_token_ids": [384, -1]})


def test_a_checkpoint_whose_block_is_larger_than_the_pool_fails_with_the_remedy():
    rig = Rig({"a": FakeRunner(HYBRID, "a")}, pages=3)
    rig.put("a")
    assert "kv_memory_bytes" in rig.engine.models()[0].reason
    assert rig.engine.kv()["pages"]["free"] == 3


def test_a_chat_format_that_breaks_fails_its_model_only():
    rig = rig_of()
    rig.checkpoints["b"] = FakeRunner(FULL, "b", chat=None)
    rig.put("b")
    assert "AttributeError" in rig.engine.models()[1].reason
    assert rig.generate("a", words(20)).reason == "length"


def test_system_prompts_never_take_more_than_half_of_the_pool():
    rig = Rig({"a": FakeRunner(FULL, "a")}, pages=60)
    for number in range(5):  # all at once: each alone has room
        rig.put(f"m{number}", "a", system_prompt=f"{number}. {SYSTEM_PROMPT}", wait=False)
    rig.drain()
    assert [status.status for status in rig.engine.models()] == ["ready"] * 2 + ["failed"] * 3
    assert rig.memory.pinned_pages <= 30
    assert rig.generate("m0", words(100)).reason == "length"


def test_the_same_spec_again_changes_nothing():
    rig = rig_of()
    answer = rig.ask("a", words(20), 20)
    rig.engine.step()
    before = rig.engine._models["a"]
    rig.put("a")
    assert rig.engine._models["a"] is before
    rig.drain()
    assert answer.token_ids == answer.expected()


def test_another_system_prompt_replaces_the_model_and_its_requests_go_on():
    rig = rig_of()
    rig.put("a", system_prompt=SYSTEM_PROMPT)
    answer = rig.ask("a", words(20), 30)
    rig.engine.step()
    rig.put("a", system_prompt=SYSTEM_PROMPT + "Be brief. " * 6)
    assert len(rig.memory.pins) == 1
    rig.drain()
    assert (answer.token_ids, answer.reason) == (answer.expected(), "length")
    assert len(rig.engine.models()) == 1


def test_requests_of_a_replaced_model_are_those_of_its_successor():
    rig = rig_of()
    answer = rig.ask("a", words(20), 30)
    rig.engine.step()
    rig.put("a", context_length=100)
    assert rig.engine.kv()["models"]["a"]["running"] == 1
    rig.engine.delete_model("a")
    rig.drain()
    assert answer.reason == "error"


def test_another_checkpoint_under_the_same_name_ends_its_requests():
    rig = rig_of(names="ab")
    rig.put("x", "a")
    answer = rig.ask("x", words(20), 30)
    rig.engine.step()
    rig.put("x", "b")
    rig.drain()
    assert (answer.reason, answer.last.error) == ("error", "the model x was removed")


def test_deleting_a_model_ends_its_requests_in_every_state_and_returns_its_pages():
    rig = rig_of(names="ab", max_sequences=2)
    doomed = [rig.ask("a", words(40, seed), 30) for seed in range(3)]
    for _ in range(3):
        rig.engine.step()
    late = rig.ask("a", words(10))
    rig.engine.delete_model("a")
    other = rig.generate("b", words(20))
    assert [answer.reason for answer in (*doomed, late)] == ["error"] * 4
    assert other.token_ids == other.expected()
    assert list(rig.engine.kv()["checkpoints"]) == ["b"]
    with pytest.raises(ModelNotFound):
        rig.engine.delete_model("a")


def test_a_prompt_read_for_a_model_that_was_replaced_meanwhile_is_refused():
    rig = rig_of(names="ab")
    rig.put("x", "a")
    runner, _ = rig.engine.runner_of("x")
    rig.put("x", "a", system_prompt=SYSTEM_PROMPT)  # of the same checkpoint: the same tokens
    ask = partial(rig.engine.submit, "x", words(20), SamplingParams(3), [].append, runner=runner)
    ask()
    rig.put("x", "b")
    with pytest.raises(ModelNotReady, match="was replaced"):
        ask()
    rig.drain()


def test_a_request_on_its_way_while_its_model_is_replaced_is_its_successors():
    rig = rig_of()
    ready = rig.engine._ready("a")
    rig.put("a", system_prompt=SYSTEM_PROMPT)
    rig.engine._ready = lambda name: ready  # as if asked just before
    answer = rig.ask("a", words(10))
    rig.drain()
    assert (answer.token_ids, answer.reason) == (answer.expected(), "length")


def test_models_share_weights_and_prefixes_only_in_one_precision():
    loads = []

    def load(source, precision, adapter, progress):
        loads.append((source, precision))
        return FakeRunner(FULL, f"{source} {precision}")

    engine = engine_with(load)
    for name, precision in (("a", None), ("b", "int8"), ("c", "int8"), ("d", None)):
        engine.put_model(ModelSpec(name, "one", precision=precision))
    until(lambda: all(status.status == "ready" for status in engine.models()))
    assert sorted(loads, key=str) == [("one", "int8"), ("one", None)]
    assert set(engine.kv()["checkpoints"]) == {"one", "one as int8"}
    assert [engine.kv()["models"][name]["checkpoint"] for name in "ab"] == ["one", "one as int8"]
    assert engine.runner_of("b")[0] is engine.runner_of("c")[0] is not engine.runner_of("a")[0]
    engine.delete_model("b")
    engine.delete_model("c")
    assert list(engine.kv()["checkpoints"]) == ["one"]
    engine.close()


def test_a_request_for_a_model_deleted_before_it_arrived_is_told():
    rig = rig_of(names="ab")
    ready = rig.engine._ready("a")
    rig.engine.delete_model("a")
    rig.engine._ready = lambda name: ready  # as if asked just before the deletion
    answer = rig.ask("a", words(10))
    rig.drain()
    assert answer.reason == "error"


# Sleep


def test_a_sleeping_model_holds_no_page_and_no_weights_and_wakes_as_it_was():
    rig, loads = rig_of(), []
    rig.engine._load_checkpoint = lambda source, *_: loads.append(source) or FakeRunner(FULL, source)
    rig.put("s", "x", SYSTEM_PROMPT)
    pinned, before = rig.memory.pinned_pages, rig.generate("s", words(40), max_tokens=20)
    weights = weakref.ref(rig.engine.runner_of("s")[0])
    del before.runner
    assert rig.engine.sleep_model("s").status == "sleeping"
    rig.drain()
    gc.collect()
    assert (rig.memory.used_pages(), rig.memory.blocks.cached_pages, weights()) == (0, 0, None)
    assert rig.engine.kv()["models"]["s"]["status"] == "sleeping" and "x" not in rig.engine.kv()["checkpoints"]
    with pytest.raises(ModelAsleep, match="POST /models/s/wake"):
        rig.ask("s", words(40))
    rig.engine.wake_model("s")
    rig.until(lambda: rig.status("s") == "ready")
    assert rig.memory.pinned_pages == pinned and loads == ["x", "x"]
    assert rig.generate("s", words(40), max_tokens=20).token_ids == before.token_ids


def test_shared_weights_stay_until_the_last_model_that_is_awake_sleeps():
    rig = rig_of()
    rig.put("twin", "a", SYSTEM_PROMPT)
    rig.engine.sleep_model("twin")
    assert rig.generate("a", words(20)).reason == "length"
    assert rig.memory.pinned_pages == 0 and "a" in rig.engine.kv()["checkpoints"]
    rig.engine.sleep_model("a")
    rig.drain()
    assert rig.engine.kv()["checkpoints"] == {}


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_requests_of_a_model_that_is_put_to_sleep_end_and_say_why(steps):
    rig = rig_of(names="ab", max_sequences=2)
    answers = [rig.ask("a", words(40, seed), 30) for seed in range(3)]
    for _ in range(steps):
        rig.engine.step()
    rig.engine.sleep_model("a")
    other = rig.generate("b", words(20))
    assert [(answer.reason, answer.last.error) for answer in answers] == [("error", "the model a was put to sleep")] * 3
    assert other.token_ids == other.expected()


def test_a_model_can_sleep_while_it_loads_and_be_removed_while_it_sleeps():
    rig = rig_of()
    rig.checkpoints["x"] = FakeRunner(FULL, "x")
    rig.engine.put_model(ModelSpec("s", "x", SYSTEM_PROMPT))
    rig.engine.sleep_model("s")
    rig.put("a")
    rig.drain()
    assert (rig.status("s"), rig.memory.pinned_pages, list(rig.engine.kv()["checkpoints"])) == ("sleeping", 0, ["a"])
    rig.engine.delete_model("s")
    rig.drain()
    assert [status.name for status in rig.engine.models()] == ["a"]


def test_the_same_spec_again_wakes_nobody_and_another_one_does():
    rig = rig_of()
    rig.engine.sleep_model("a")
    rig.put("a")
    assert rig.status("a") == "sleeping"
    rig.put("a", system_prompt=SYSTEM_PROMPT)
    assert rig.status("a") == "ready"


def test_pages_of_an_unloaded_checkpoint_serve_another():
    rig = rig_of(names="a", pages=40)
    rig.generate("a", words(200), max_tokens=20)
    rig.engine.delete_model("a")
    rig.checkpoints["b"] = FakeRunner(HYBRID, "b")
    rig.put("b")
    answer = rig.generate("b", words(100), max_tokens=20)
    assert answer.token_ids == answer.expected()


def test_other_weights_under_the_same_name_find_nothing_of_the_old():
    rig = rig_of()
    rig.generate("a", words(64))
    rig.engine.delete_model("a")
    rig.drain()
    rig.checkpoints["a"] = FakeRunner(FULL, "retrained")
    rig.put("a")
    answer = rig.generate("a", words(64))
    assert (answer.last.cached_tokens, answer.token_ids) == (0, answer.expected())


def test_a_checkpoint_is_unloaded_with_its_last_model():
    rig = rig_of()
    rig.put("twin", "a")
    rig.engine.delete_model("a")
    rig.drain()
    assert rig.generate("twin", words(20)).reason == "length"
    rig.engine.delete_model("twin")
    rig.drain()
    assert rig.engine.kv()["checkpoints"] == {}
    assert not rig.engine._checkpoints and not rig.memory.spaces


def test_the_weights_of_an_unloaded_checkpoint_are_gone_at_once():
    rig = rig_of()
    rig.put("prompted", "a", system_prompt=SYSTEM_PROMPT)
    rig.generate("a", words(20))
    rig.ask("a", words(20), 30)
    rig.engine.step()
    weights = weakref.ref(rig.checkpoints.pop("a"))
    gc.disable()
    try:
        for name in ("a", "prompted"):
            rig.engine.delete_model(name)
        rig.drain()
        assert weights() is None
    finally:
        gc.enable()


class Loader:
    """A `load` that a test lets go on, or fail."""

    def __init__(self) -> None:
        self.go_on, self.problem, self.loads = threading.Event(), None, 0

    def __call__(self, source, precision, adapter, progress):
        self.loads += 1
        progress(1, 4, "bytes")
        while not self.go_on.wait(0.01):
            progress(2, 4, "bytes")
        progress(4, 4, "bytes")
        if self.problem:
            raise self.problem
        return FakeRunner(FULL, source)


def engine_with(load) -> Engine:
    config = EngineConfig(dtype="float32", page_bytes=512, kv_memory_bytes=2**20, check_integrity=True)
    engine = Engine(config, None, load)
    engine.start()
    return engine


def status_of(engine: Engine, name: str):
    return next(status for status in engine.models() if status.name == name)


@pytest.fixture
def loading():
    load = Loader()
    engine = engine_with(load)
    yield engine, load
    load.go_on.set()
    engine.close()


def test_loading_shows_how_far_it_is_and_two_models_share_it(loading):
    engine, load = loading
    for name in ("one", "two"):
        assert engine.put_model(ModelSpec(name, "a")).status == "loading"
    until(lambda: status_of(engine, "two").done == 2)
    assert (status_of(engine, "one").total, status_of(engine, "one").unit) == (4, "bytes")
    with pytest.raises(ModelNotReady, match="still loading"):
        engine.runner_of("one")
    load.go_on.set()
    until(lambda: status_of(engine, "one").status == status_of(engine, "two").status == "ready")
    assert load.loads == 1
    assert engine.runner_of("one")[0] is engine.runner_of("two")[0]
    assert engine.runner_of("one")[1].context_length == status_of(engine, "one").context_length


@pytest.mark.parametrize("problem", [CheckpointError("no such folder"), ZeroDivisionError("surprise")])
def test_a_failed_load_says_why_and_is_tried_again_on_request(loading, problem):
    engine, load = loading
    load.problem = problem
    load.go_on.set()
    engine.put_model(ModelSpec("one", "a"))
    until(lambda: status_of(engine, "one").status == "failed")
    assert str(problem) in status_of(engine, "one").reason
    load.problem = None
    assert engine.put_model(ModelSpec("one", "a")).status == "loading"
    until(lambda: status_of(engine, "one").status == "ready")


def test_a_model_deleted_while_loading_stops_the_load(loading):
    engine, load = loading
    engine.put_model(ModelSpec("one", "a"))
    until(lambda: load.loads == 1)
    engine.delete_model("one")
    until(lambda: not [t for t in threading.enumerate() if t.name == "load a"])
    assert engine.models() == []
    load.go_on.set()
    engine.put_model(ModelSpec("one", "a"))
    until(lambda: status_of(engine, "one").status == "ready")
    assert load.loads == 2


def test_a_checkpoint_that_arrives_when_nobody_wants_it_any_more_is_dropped():
    go_on = threading.Event()

    def load(source, precision, adapter, progress):
        go_on.wait(30)
        return FakeRunner(FULL, source)

    engine = engine_with(load)
    engine.put_model(ModelSpec("one", "a"))
    engine.delete_model("one")
    assert engine.kv()["checkpoints"] == {}
    go_on.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "load a"])
    assert engine.kv()["checkpoints"] == {} and not engine.memory.spaces
    engine.close()


# The thread


@pytest.fixture
def running():
    engine = engine_with(lambda source, precision, adapter, progress: FakeRunner(HYBRID, source))
    for name in "ab":
        engine.put_model(ModelSpec(name, name, SYSTEM_PROMPT))
    until(lambda: {status.status for status in engine.models()} == {"ready"})
    yield engine
    engine.close()


class Inbox:
    def __init__(self) -> None:
        self.events, self.ended = [], threading.Event()

    def __call__(self, event) -> None:
        self.events.append(event)
        if event.finish_reason:
            self.ended.set()


def test_many_threads_may_ask_abort_and_look_at_once(running):
    inboxes = [Inbox() for _ in range(60)]

    def ask(number: int) -> None:
        request_id = running.submit("ab"[number % 2], words(30, number % 4), SamplingParams(30), inboxes[number])
        assert running.kv()["pages"]["total"] == 2**20 // 512
        if number % 3 == 0:
            running.abort(request_id)

    with ThreadPoolExecutor(60) as pool:
        list(pool.map(ask, range(60)))
    for inbox in inboxes:
        assert inbox.ended.wait(30)
    pages = running.kv()["pages"]
    assert pages["used"] == pages["pinned"]
    assert running.alive and running.failure is None


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs the clock of a single thread")
def test_an_idle_engine_uses_no_processor(running):
    inbox, clock = Inbox(), time.pthread_getcpuclockid(running._thread.ident)
    running.submit("a", words(30), SamplingParams(3), inbox)
    assert inbox.ended.wait(30)
    time.sleep(0.1)
    before = time.clock_gettime(clock)
    time.sleep(1.5)  # long enough for the check at rest
    assert time.clock_gettime(clock) - before < 0.15


def test_events_of_a_step_are_sent_together_also_the_last_of_an_engine_that_ends(running):
    told, sent = [], []
    running._send = lambda: sent.append(len(told)) if told else None
    with_events = [partial(running.submit, "a", words(30, seed), SamplingParams(40), told.append) for seed in range(3)]
    running._ask(lambda: [submit() for submit in with_events])
    until(lambda: sent[-1:] == [120])
    assert sorted(set(sent)) == list(range(3, 121, 3))
    running.submit("a", words(30), SamplingParams(1000), told.append)
    until(lambda: len(told) > 120)
    running.close()
    assert (told[-1].finish_reason, sent[-1]) == ("abort", len(told))


def test_closing_ends_what_runs(running):
    inbox = Inbox()
    running.submit("a", words(30), SamplingParams(1000), inbox)
    until(lambda: inbox.events)
    running.close()
    assert inbox.events[-1].finish_reason == "abort"
    assert not running.alive and running.failure is None
    with pytest.raises(EngineDead):
        running.submit("a", words(30), SamplingParams(1), inbox)


def test_requests_and_questions_that_the_engine_no_longer_hears_are_told(running):
    inbox, hold, told = Inbox(), threading.Event(), []

    def ask() -> None:
        try:
            running.kv()
        except EngineDead as error:
            told.append(str(error))

    def fail() -> None:
        hold.wait(30)
        raise KeyError("a bug")

    running._post(fail)
    running.submit("a", words(30), SamplingParams(5), inbox)
    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: len(running._commands) == 2)
    hold.set()
    asking.join(10)
    assert "KeyError" in told[0]
    assert inbox.ended.wait(30)
    assert (inbox.events[0].finish_reason, inbox.events[0].error) == ("error", told[0])


def test_books_that_do_not_add_up_end_the_thread_visibly(running):
    inbox = Inbox()
    running.submit("a", words(30), SamplingParams(1000), inbox)
    until(lambda: inbox.events)
    running._ask(lambda: running.memory.pool.take(1))
    assert inbox.ended.wait(30)
    until(lambda: not running.alive)
    assert inbox.events[-1].finish_reason == "error"
    assert "IntegrityError" in running.failure
    for question in (running.kv, lambda: running.runner_of("a"), lambda: running.put_model(ModelSpec("c", "new"))):
        with pytest.raises(EngineDead, match="IntegrityError"):
            question()


def test_books_are_checked_at_rest_without_being_asked_to():
    config = EngineConfig(dtype="float32", page_bytes=512, kv_memory_bytes=2**20, check_integrity=False)
    engine = Engine(config, None, lambda source, precision, adapter, progress: FakeRunner(FULL, source))
    engine.start()
    engine._ask(lambda: engine.memory.pool.take(1))
    until(lambda: not engine.alive)
    assert "IntegrityError" in engine.failure


# Figures


def test_kv_counts_every_page_once_and_names_who_holds_it():
    rig = rig_of(HYBRID, names="ab", pages=200)
    rig.put("a", system_prompt=SYSTEM_PROMPT)
    answers = [rig.ask("a", words(40), 60), rig.ask("a", words(40), 60), rig.ask("b", words(20), 60)]
    for _ in range(20):
        rig.engine.step()
    kv = rig.engine.kv()
    pages = kv["pages"]
    assert pages["total"] == pages["free"] + pages["cached"] + pages["used"] == 200
    assert sum(each["pages_used"] for each in kv["checkpoints"].values()) == pages["used"]
    assert sum(each["pages_cached"] for each in kv["checkpoints"].values()) == pages["cached"]
    assert sum(each["pages_used"] for each in kv["models"].values()) == pages["used"]
    assert kv["models"]["a"]["pages_pinned"] == pages["pinned"] > 0
    assert (kv["models"]["a"]["running"], kv["models"]["b"]["running"]) == (2, 1)
    assert kv["shared_blocks"] > 0
    held = sum(answer.last.prompt_tokens + answer.last.completion_tokens - 1 for answer in answers)
    assert kv["models"]["a"]["tokens"] + kv["models"]["b"]["tokens"] == held
    assert 0.5 < kv["slot_utilisation"] < 1
    rig.drain()
    assert 0.9 < rig.engine.kv()["slot_utilisation"] < 1, "the last block of the system prompt is begun"
    assert rig.engine.kv()["window_blocks_freed"] > 0


def test_load_counts_what_was_computed_and_generated():
    rig = rig_of()
    rig.generate("a", words(40), max_tokens=10)
    load = rig.engine.load()
    assert (load["computed_tokens"], load["generated_tokens"]) == (49, 10)
    assert load["steps"] >= 10 and load["step_seconds"] > 0


@pytest.mark.parametrize(("dtype", "page_bytes"), [("bfloat16", 8192), ("float32", 16384)])
def test_the_pool_has_the_configured_size_in_pages_that_suit_the_type(dtype, page_bytes):
    engine = Engine(EngineConfig(dtype=dtype, kv_memory_bytes=2**20), None)
    assert engine.memory.pool.page_bytes == page_bytes
    assert engine.memory.pool.total == 2**20 // page_bytes
