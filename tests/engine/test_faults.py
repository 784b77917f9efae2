"""Kinds of faults that other engines had, each at the place where it would show."""

from __future__ import annotations

import httpx
import openai
import pytest

from engine.request import Terms
from tests.engine.fake_runner import FULL, HYBRID, TOKENIZER, FakeRunner
from tests.engine.rig import Rig
from tests.engine.server_fixture import SPOKEN
from tests.engine.test_core import every_geometry, rig_of, words
from tests.engine.tiny import IM_END

ASK = [{"role": "user", "content": "what is the capital of france?"}]


@pytest.fixture(scope="module")
def client(engine):
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_prompt_of_exactly_sixteen_thousand_tokens_sent_twice_leaves_its_last_block_to_compute():
    rig = Rig(
        {"a": FakeRunner(FULL, "a", context_length=20_000)}, pages=2200, max_batch_tokens=2048, check_integrity=False
    )
    rig.put("a")
    rig.checkpoints["a"].forward = only_the_last(rig.checkpoints["a"])
    prompt = words(16_000)
    first, second = rig.generate("a", prompt, max_tokens=2), rig.generate("a", prompt, max_tokens=2)
    assert (first.last.cached_tokens, second.last.cached_tokens) == (0, 16_000 - 16)
    assert (first.reason, second.reason) == ("length", "length")
    rig.memory.check_integrity(idle=True)


def only_the_last(runner: FakeRunner):
    """A forward that computes nothing but shapes: what is looked at here is which tokens it is asked for."""

    def forward(pool, batch):
        assert batch.positions.shape == batch.tokens.shape
        return runner.logits(batch.logit_rows.numpy().astype("uint64"))

    return forward


@every_geometry
def test_a_hit_on_a_block_that_its_own_allocation_would_evict(geometry):
    rig = rig_of(geometry, pages=40)
    longest = rig.memory.longest(rig.engine._models["a"].checkpoint.space, 200)
    prompt = words(min(longest - 30, 90))
    once = rig.generate("a", prompt, max_tokens=8)
    for seed in range(3):  # fills the pool, so that what is found again is the oldest there is
        rig.generate("a", words(40, seed + 5), max_tokens=4)
    again = rig.generate("a", prompt + words(10, 77), max_tokens=15)
    assert once.token_ids == once.expected() and again.token_ids == again.expected()


def test_several_answers_after_a_hit_of_whole_blocks_and_of_one_token_less():
    rig = rig_of(HYBRID)
    for length in (31, 32, 33):
        rig.generate("a", words(length), max_tokens=3)
        asked = rig.ask("a", words(length), 20, n=3, temperature=1.0, seed=4)
        rig.drain()
        for index in range(3):
            tokens = [t for event in asked.events if event.index == index for t in event.token_ids]
            assert tokens == rig.generate("a", words(length), max_tokens=20, temperature=1.0, seed=4 + index).token_ids


def test_a_preempted_prompt_that_is_scored_counts_each_token_once():
    rig = rig_of(FULL, max_batch_tokens=32)
    plain = rig.ask("a", words(50), 2, logprobs=1, prompt_logprobs=True)
    rig.drain()
    asked = rig.ask("a", words(50), 2, logprobs=1, prompt_logprobs=True)
    for _ in range(3):
        rig.engine.step()
    rig.scheduler._preempt(rig.scheduler.running[-1])
    rig.drain()
    assert asked.events[0].prompt_scores == plain.events[0].prompt_scores
    assert None not in asked.events[0].prompt_scores[1:] and len(asked.events[0].prompt_scores) == 50


@pytest.mark.parametrize("settings", [{"max_tokens": 1}, {"max_tokens": 0, "echo": True}], ids=str)
def test_the_smallest_answers_over_http(client, settings):
    echo = {"echo": settings.pop("echo")} if "echo" in settings else {}
    answer = client.completions.create(model="llama", prompt="the fox", temperature=0, **settings, **echo)
    assert answer.usage.completion_tokens == settings["max_tokens"]
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0, 1e-9, 2])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 384, 100_000])
def test_the_edges_of_sampling_answer_like_any_other(client, temperature, top_k):
    greedy = client.completions.create(model="llama", prompt="the fox", temperature=0, max_tokens=6)
    answer = client.completions.create(
        model="llama", prompt="the fox", temperature=temperature, top_p=1e-9, max_tokens=6, extra_body={"top_k": top_k}
    )
    assert answer.choices[0].text == greedy.choices[0].text


def test_an_answer_cut_by_its_limit_inside_a_character_has_no_half_of_it(client):
    tokens = len(TOKENIZER.encode(SPOKEN).ids)
    for limit in range(1, tokens):
        answer = client.completions.create(model="speaker", prompt="x", temperature=0, max_tokens=limit)
        assert SPOKEN.startswith(answer.choices[0].text) and answer.choices[0].finish_reason == "length"


def test_a_stop_string_that_is_complete_exactly_at_max_tokens_is_a_stop(client):
    answer = client.completions.create(model="speaker", prompt="x", temperature=0, max_tokens=40).choices[0].text
    for limit in range(1, len(TOKENIZER.encode(SPOKEN).ids) + 1):
        said = client.completions.create(model="speaker", prompt="x", temperature=0, max_tokens=limit).choices[0].text
        if len(said) > 1:
            cut = client.completions.create(
                model="speaker", prompt="x", temperature=0, max_tokens=limit, stop=[said[-1]]
            ).choices[0]
            assert (cut.text, cut.finish_reason) == (answer.partition(said[-1])[0], "stop")


def test_turns_that_do_not_alternate_are_refused_in_the_templates_words(client):
    with pytest.raises(openai.BadRequestError, match="alternate"):
        client.chat.completions.create(model="gemma", messages=[*ASK, *ASK], max_tokens=2)


def test_a_template_without_a_system_role_gets_the_system_text_with_the_first_question(client):
    system = [{"role": "system", "content": "be brief"}]
    folded = client.chat.completions.create(model="gemma", messages=system + ASK, max_tokens=4, temperature=0)
    by_hand = [{"role": "user", "content": "be brief\n\n" + ASK[0]["content"]}]
    plain = client.chat.completions.create(model="gemma", messages=by_hand, max_tokens=4, temperature=0)
    assert folded.choices[0].message.content == plain.choices[0].message.content


def test_special_tokens_that_a_user_writes_are_text_also_where_they_are_echoed_or_biased(client, engine):
    said = [{"role": "user", "content": "<|im_end|><bos>"}]
    tokens = httpx.post(engine.url + "/tokenize", json={"model": "llama", "messages": said}).json()["tokens"]
    assert tokens.count(IM_END) == 1


def test_hundreds_of_answers_aborted_at_any_time_leave_nothing():
    rig = rig_of(HYBRID, pages=90, max_sequences=6, check_integrity=False)
    asked = [
        rig.ask("a", words(1 + n % 50, n % 7), 20, n=1 + n % 5, temperature=1.0, terms=Terms(str(n % 3)))
        for n in range(120)
    ]
    for n, each in enumerate(asked):
        rig.engine.abort(each.id)
        if n % 3 == 0:
            rig.engine.step()
            rig.memory.check_integrity()
    rig.drain()
    assert all(len([e for e in each.events if e.finish_reason]) == 1 + n % 5 for n, each in enumerate(asked))
