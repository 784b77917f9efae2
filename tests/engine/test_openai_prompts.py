"""Several prompts in one request, what of them is read, how a chat is left open, what of an answer is text: over
loopback, as OpenAI's own client and vLLM's users ask for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest

from engine.delivery import Delivery
from engine.errors import QueueFull
from engine.schema import MOST_PROMPTS, CompletionRequest
from engine.server import EngineServer
from tests.engine.fake_runner import FULL, FakeRunner
from tests.engine.rig import Rig
from tests.engine.server_fixture import SPOKEN
from tests.engine.test_openai_api import is_idle
from tests.engine.tiny import BOS, IM_END, tiny_tokenizer
from tests.waiting import until

TOKENIZER = tiny_tokenizer(adds_bos=False)
TEXTS = ["the quick brown fox", "a page of memory holds", "naïve 🦊"]
GREEDY = {"temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
ASK = [{"role": "user", "content": "what is the capital of france?"}]
BEGUN = [*ASK, {"role": "assistant", "content": "the capital of"}]


@pytest.fixture(scope="module")
def client(engine):
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def tokens_of(engine, **body) -> list[int]:
    answer = httpx.post(engine.url + "/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


# Several prompts


@pytest.mark.parametrize("prompts", [TEXTS, [ids_of(text) for text in TEXTS]], ids=["texts", "tokens"])
@pytest.mark.parametrize("n", [1, 2])
def test_each_of_several_prompts_is_answered_as_if_it_were_alone(client, prompts, n):
    asked = {"model": "llama", "n": n, "seed": 3, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    alone = [client.completions.create(prompt=prompt, **asked) for prompt in prompts]
    together = client.completions.create(prompt=prompts, **asked)
    assert [choice.index for choice in together.choices] == list(range(n * len(prompts)))
    assert [choice.text for choice in together.choices] == [choice.text for each in alone for choice in each.choices]
    assert together.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    assert together.usage.completion_tokens == 6 * n * len(prompts)


def test_streamed_answers_to_several_prompts_are_told_apart_by_index(client):
    whole = client.completions.create(model="llama", prompt=TEXTS, n=2, seed=3, max_tokens=6)
    texts, ends, usage = [""] * 6, [0] * 6, []
    for chunk in client.completions.create(
        model="llama", prompt=TEXTS, n=2, seed=3, max_tokens=6, stream=True, stream_options={"include_usage": True}
    ):
        usage.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [1] * 6
    assert usage[-1].total_tokens == whole.usage.total_tokens


def test_echo_and_log_probabilities_are_those_of_each_prompt(client):
    together = client.completions.create(model="llama", prompt=TEXTS, echo=True, logprobs=1, **GREEDY)
    for text, choice in zip(TEXTS, together.choices, strict=True):
        alone = client.completions.create(model="llama", prompt=text, echo=True, logprobs=1, **GREEDY).choices[0]
        assert choice.text.startswith(text)
        assert (choice.text, choice.logprobs.tokens) == (alone.text, alone.logprobs.tokens)
        assert choice.logprobs.text_offset == alone.logprobs.text_offset
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(alone.logprobs.token_logprobs[1:], abs=1e-4)


def test_beams_of_several_prompts_are_found_apart(client):
    beams = {"use_beam_search": True, "ignore_eos": True}
    found = client.completions.create(
        model="llama", prompt=[TEXTS[0], TEXTS[0]], n=2, max_tokens=6, temperature=0, extra_body=beams
    )
    first, second, *again = (choice.text for choice in found.choices)
    assert first != second and again == [first, second]


def test_every_prompt_counts_in_the_metrics(client, engine):
    def prompts() -> float:
        name = 'paged_arena:request_prompt_tokens_count{model_name="llama"} '
        text = httpx.get(engine.url + "/metrics").text
        return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))

    client.completions.create(model="llama", prompt=TEXTS, n=2, max_tokens=1)
    before = prompts()
    client.completions.create(model="llama", prompt=TEXTS, n=2, max_tokens=1)
    assert prompts() == before + 3


def test_one_prompt_that_is_too_long_refuses_all(client, engine):
    with pytest.raises(openai.BadRequestError, match="2,048"):
        client.completions.create(model="llama", prompt=["the", "the " * 3000])
    until(lambda: is_idle(engine), seconds=60)


def test_too_many_prompts_are_refused_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError, match="1,025 in one request, at most 1,024"):
        client.completions.create(model="llama", prompt=["the"] * (MOST_PROMPTS + 1))


def test_more_answers_than_one_request_may_have_are_refused_with_all_numbers(client):
    with pytest.raises(
        openai.BadRequestError, match="n is 128: 8,320 answers to 65 prompts in one request, at most 8,192"
    ):
        client.completions.create(model="llama", prompt=["the"] * 65, n=128, max_tokens=1)


def test_prompts_that_were_taken_are_given_up_where_the_queue_is_full_for_the_rest():
    rig = Rig({"a": FakeRunner(FULL, "a")})
    rig.put("x", "a")
    server, submit, abort = EngineServer(rig.engine, rig.config), rig.engine.submit, rig.engine.abort
    taken, aborted = [], []

    def submit_one(*asked) -> str:
        if taken:
            raise QueueFull("as many requests wait as the config allows")
        taken.append(submit(*asked))
        return taken[0]

    async def ask() -> None:
        server.delivery, rig.engine.submit = Delivery(asyncio.get_running_loop()), submit_one
        rig.engine.abort = lambda request_id: (aborted.append(request_id), abort(request_id))
        body = CompletionRequest(model="x", prompt=["fox", "dog"])
        generation = await server.complete(body, SimpleNamespace(state=SimpleNamespace(request_id="1")))
        with pytest.raises(QueueFull):
            await generation({}, None, None)
        rig.drain()

    asyncio.run(asyncio.wait_for(ask(), 10))
    assert aborted == taken != []
    assert rig.engine.load()["running"] == rig.engine.load()["waiting"] == 0


# What is read


@pytest.mark.parametrize(("side", "read"), [(None, [-4, None]), ("left", [-4, None]), ("right", [None, 4])])
@pytest.mark.parametrize("as_text", [True, False])
def test_of_a_long_prompt_so_many_tokens_are_read(client, side, read, as_text):
    tokens = ids_of(TEXTS[0])
    cut = {"truncate_prompt_tokens": 4} | ({"truncation_side": side} if side else {})
    answer = client.completions.create(
        model="llama", prompt=TEXTS[0] if as_text else tokens, echo=True, max_tokens=0, extra_body=cut
    )
    assert answer.usage.prompt_tokens == 4 < len(tokens)
    assert answer.choices[0].text == TOKENIZER.decode(tokens[slice(*read)])


def test_of_a_chat_so_many_tokens_are_read(client):
    answer = client.chat.completions.create(
        model="llama", messages=ASK, max_tokens=1, extra_body={"truncate_prompt_tokens": 5}
    )
    assert answer.usage.prompt_tokens == 5


def test_the_first_token_of_a_checkpoint_may_be_left_out(client, engine):
    plain = tokens_of(engine, model="gemma", prompt="the fox", add_special_tokens=False)
    assert tokens_of(engine, model="gemma", prompt="the fox") == [BOS, *plain]
    answer = client.completions.create(
        model="gemma", prompt="the fox", max_tokens=1, extra_body={"add_special_tokens": False}
    )
    assert answer.usage.prompt_tokens == len(plain)


def test_the_last_message_is_gone_on_with(client, engine):
    opened = {"continue_final_message": True, "add_generation_prompt": False}
    tokens = tokens_of(engine, model="llama", messages=BEGUN, **opened)
    text = f"<|im_start|>user\n{ASK[0]['content']}<|im_end|>\n<|im_start|>assistant\nthe capital of"
    assert tokens == tokens_of(engine, model="llama", prompt=text)
    answer = client.chat.completions.create(
        model="llama", messages=BEGUN, temperature=0, max_tokens=6, extra_body={**opened, "ignore_eos": True}
    )
    assert (
        answer.choices[0].message.content
        == client.completions.create(model="llama", prompt=text, **GREEDY).choices[0].text
    )


def test_no_turn_is_opened_where_none_is_wanted(engine):
    opened = tokens_of(engine, model="llama", messages=ASK)
    closed = tokens_of(engine, model="llama", messages=ASK, add_generation_prompt=False)
    assert opened[: len(closed)] == closed
    assert TOKENIZER.decode(opened[len(closed) :], skip_special_tokens=False) == "<|im_start|>assistant\n"


def test_tokens_come_as_the_vocabulary_writes_them(engine):
    body = {"model": "llama", "prompt": " fox<|im_end|>"}
    assert httpx.post(engine.url + "/tokenize", json=body).json()["token_strs"] is None
    answer = httpx.post(engine.url + "/tokenize", json={**body, "return_token_strs": True}).json()
    assert answer["token_strs"] == [TOKENIZER.id_to_token(token) for token in answer["tokens"]]
    assert answer["token_strs"][-1] == "<|im_end|>"


# What is text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "end"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"include_stop_str_in_output": True}, ""),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "<|im_end|>"),
    ],
    ids=["neither", "special", "stop", "both"],
)
def test_the_token_that_ends_an_answer_is_text_only_if_both_are_asked_for(client, asked, end, stream):
    answer = client.chat.completions.create(
        model="speaker", messages=ASK, logprobs=True, stream=stream, extra_body=asked
    )
    choices = [choice for each in answer for choice in each.choices] if stream else answer.choices
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    scores = [score for choice in choices if choice.logprobs for score in choice.logprobs.content]
    assert text == SPOKEN + end
    assert b"".join(bytes(score.bytes or ()) for score in scores).decode() == text


def test_special_tokens_within_an_answer_are_text_if_asked_for(client):
    forced = {"model": "llama", "prompt": "the", "max_tokens": 3, "logit_bias": {str(BOS): 100}}
    assert client.completions.create(**forced).choices[0].text == ""
    seen = client.completions.create(**forced, logprobs=0, extra_body={"skip_special_tokens": False}).choices[0]
    assert (seen.text, seen.logprobs.tokens) == ("<bos>" * 3, ["<bos>"] * 3)
    assert seen.logprobs.text_offset == [0, 5, 10]


@pytest.mark.parametrize(("asked", "text"), [({}, "🙈"), ({"include_stop_str_in_output": True}, "🙈ñ")])
def test_the_stop_string_is_text_only_if_asked_for(client, asked, text):
    answer = client.chat.completions.create(
        model="speaker", messages=ASK, stop=["ñ"], logprobs=True, extra_body=asked
    ).choices[0]
    assert (answer.message.content, answer.finish_reason) == (text, "stop")
    assert b"".join(bytes(score.bytes) for score in answer.logprobs.content).decode() == text


def test_tokens_are_called_by_their_ids_if_asked_for(client):
    asked = {"model": "speaker", "logprobs": True, "extra_body": {"return_tokens_as_token_ids": True}}
    choice = client.chat.completions.create(messages=ASK, **asked).choices[0]
    ids = [int(score.token.removeprefix("token_id:")) for score in choice.logprobs.content]
    assert TOKENIZER.decode(ids) == choice.message.content == SPOKEN


def test_the_token_itself_comes_first_among_the_likeliest(client):
    asked = {"model": "llama", "prompt": TEXTS[2], "logprobs": 3, "echo": True, "max_tokens": 0}
    scores = client.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert scores.tokens == [f"token_id:{token}" for token in ids_of(TEXTS[2])]
    assert scores.tokens[1:] == [next(iter(likeliest)) for likeliest in scores.top_logprobs[1:]]


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("v1/completions", {"prompt": ["a", [1]]}, "prompt", "prompt"),
        ("v1/completions", {"prompt": [[1], "a"]}, "prompt", "prompt"),
        ("v1/completions", {"prompt": ["a", ""]}, "prompt", "nothing to answer"),
        ("v1/completions", {"prompt": [[1], []]}, "prompt", "nothing to answer"),
        ("v1/completions", {"prompt": [1, 384, 999]}, "prompt", "384, 999 out of vocabulary"),
        ("v1/completions", {"prompt": [1], "add_special_tokens": True}, "add_special_tokens", "goes with a text"),
        ("v1/completions", {"prompt": "a", "truncation_side": "left"}, "truncation_side", "truncate_prompt_tokens"),
        ("v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "greater"),
        ("v1/completions", {"prompt": "a", "logit_bias": {"x": 1, "5": 1, "y": 1}}, "logit_bias", "'x', 'y'"),
        (
            "v1/chat/completions",
            {"messages": BEGUN, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "contradict",
        ),
        ("tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "messages only"),
        ("v1/completions", {"model": None, "prompt": "a"}, "model", "model is required"),
        ("tokenize", {"model": None, "prompt": "a"}, "model", "model is required"),
    ],
)
def test_what_cannot_be_is_refused_by_name(engine, path, body, param, said):
    answer = httpx.post(f"{engine.url}/{path}", json={"model": "llama", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert said in error["message"]


def test_end_of_text_tokens_of_a_prompt_do_not_end_its_answer(client):
    answer = client.completions.create(
        model="llama", prompt=[IM_END] * 5, max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)


def test_a_cache_salt_keeps_the_prefixes_of_a_tenant_to_itself(engine):
    def cached(**salt) -> int:
        body = {"model": "llama", "prompt": [*range(300, 60, -3)], "max_tokens": 2, **salt}
        answer = httpx.post(engine.url + "/v1/completions", json=body).raise_for_status().json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached(cache_salt="one"), cached(cache_salt="two"), cached(cache_salt="one")] == [0, 0, 0, 64]
