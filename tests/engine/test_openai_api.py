"""OpenAI's API as its own client sees it, against a real engine over loopback."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from engine.schema import CHAT_OFF, NO_EFFECT
from tests.engine.server_fixture import SPOKEN, TinyModel
from tests.engine.tiny import BOS
from tests.waiting import until

ASK = [{"role": "user", "content": "what is the capital of france?"}]
GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
ASKED_FOR = {
    "audio": {"voice": "alloy", "format": "mp3"},
    "best_of": 2,
    "echo": True,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "service_tier": "flex",
    "store": True,
    "suffix": "end",
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "verbosity": "low",
    "web_search_options": {},
}
WRONG = [
    ("temperature", 2.5),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 5e-324),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("ignore_eos", "yes"),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stop_token_ids", [100_000]),
    ("stop_token_ids", [-1]),
    ("stream_options", {"include_usage": True}),
    ("messages", []),
]


@pytest.fixture(scope="module")
def client(engine):
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def streamed(stream) -> tuple[str, str, list]:
    """Text, finish reason and all chunks of a stream."""
    chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    return text, choices[-1].finish_reason, chunks


def is_idle(engine) -> bool:
    """Nobody is served or waits, and no page is in use but those that are pinned."""
    pages, load = engine.kv()["pages"], load_of(engine)
    return pages["used"] == pages["pinned"] and load["running"] == load["waiting"] == 0


def load_of(engine) -> dict:
    return httpx.get(engine.url + "/load", timeout=30).json()


def test_answer_has_the_shape_and_the_counts_of_openai(client):
    answer = client.chat.completions.create(model="llama", messages=ASK, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "llama"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_stream_and_whole_answer_say_the_same(client, model):
    whole = client.chat.completions.create(model=model, messages=ASK, **GREEDY)
    text, finish_reason, chunks = streamed(
        client.chat.completions.create(
            model=model, messages=ASK, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert text == whole.choices[0].message.content
    assert finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_stream_counts_tokens_only_when_asked(client):
    chunks = list(client.chat.completions.create(model="llama", messages=ASK, stream=True, **GREEDY))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("model", ["llama", "speaker"])
def test_who_speaks_is_said_first_and_alone_before_any_token_counts(client, model):
    asked = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    first, second, *_ = client.chat.completions.create(model=model, messages=ASK, logprobs=True, n=1, **asked, **GREEDY)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", None)
    assert (first.choices[0].logprobs, first.usage.completion_tokens) == (None, 0)
    assert second.choices[0].delta.role is None and second.usage.completion_tokens > 0


def test_events_are_closed_by_done_and_a_token_costs_one_event(engine):
    body = {"model": "llama", "messages": ASK, "stream": True, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(engine.url + "/v1/chat/completions", json=body)
    events = answer.text.split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "chatcmpl-" + answer.headers["x-request-id"] == json.loads(events[0].removeprefix("data: "))["id"]
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) <= 8 + 4


def test_system_prompt_of_the_model_is_served_from_the_cache(client):
    answer = client.chat.completions.create(model="briefed", messages=ASK)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 32
    assert answer.usage.completion_tokens <= 12  # the model's own default


def test_own_system_message_replaces_that_of_the_model(client):
    mine = [{"role": "system", "content": "hi"}, *ASK]
    assert (
        client.chat.completions.create(model="briefed", messages=mine).usage.prompt_tokens
        == client.chat.completions.create(model="llama", messages=mine, max_tokens=4).usage.prompt_tokens
    )


def test_developer_is_the_new_word_for_system(client):
    def count(role):
        return client.chat.completions.create(
            model="llama", messages=[{"role": role, "content": "a page"}, *ASK], max_tokens=1
        ).usage.prompt_tokens

    assert count("developer") == count("system")


def test_content_may_come_in_parts_of_text(client):
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "what is the "}, {"type": "text", "text": "capital"}]}
    ]
    joined = [{"role": "user", "content": "what is the capital"}]
    answers = [client.chat.completions.create(model="llama", messages=m, **GREEDY) for m in (parts, joined)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_seed_repeats_an_answer_and_another_seed_changes_it(client):
    def text(seed):
        answer = client.chat.completions.create(model="llama", messages=ASK, seed=seed, temperature=1.5, max_tokens=40)
        return answer.choices[0].message.content

    assert text(7) == text(7) != text(8)


def test_stop_string_ends_the_answer_and_is_not_part_of_it(client):
    whole = client.chat.completions.create(model="llama", messages=ASK, **GREEDY).choices[0].message.content
    stop = whole[10:13]
    answer = client.chat.completions.create(model="llama", messages=ASK, stop=[stop], **GREEDY).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


def test_stop_token_ends_the_answer(client, engine):
    whole = client.chat.completions.create(model="llama", messages=ASK, **GREEDY).choices[0].message.content
    tokens = httpx.post(engine.url + "/tokenize", json={"model": "llama", "prompt": whole}).json()["tokens"]
    extra = {"ignore_eos": True, "stop_token_ids": tokens}
    answer = client.chat.completions.create(
        model="llama", messages=ASK, temperature=0, max_tokens=24, extra_body=extra
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert len(answer.message.content) < len(whole)


def test_min_tokens_holds_the_end_back(client):
    extra = {"min_tokens": 20}
    answer = client.chat.completions.create(model="speaker", messages=ASK, max_tokens=30, extra_body=extra)
    assert answer.usage.completion_tokens >= 20


def test_max_completion_tokens_is_max_tokens(client):
    answer = client.chat.completions.create(
        model="llama", messages=ASK, max_completion_tokens=5, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_narrowest_choice_is_the_likeliest_token(client, extra):
    greedy = client.chat.completions.create(model="llama", messages=ASK, **GREEDY)
    body = {"ignore_eos": True, **extra}
    narrow = client.chat.completions.create(model="llama", messages=ASK, max_tokens=24, temperature=1, extra_body=body)
    assert narrow.choices[0].message.content == greedy.choices[0].message.content


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_change_what_is_said(client, name):
    plain = client.chat.completions.create(model="gemma", messages=ASK, temperature=0, max_tokens=120)
    body = {"ignore_eos": True, name: 2.0}
    penalised = client.chat.completions.create(
        model="gemma", messages=ASK, temperature=0, max_tokens=120, extra_body=body
    )
    assert penalised.choices[0].message.content != plain.choices[0].message.content


@pytest.mark.parametrize("name", ASKED_FOR)
def test_what_is_not_supported_is_refused_by_name(client, name):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="llama", messages=ASK, extra_body={name: ASKED_FOR[name]})
    assert refusal.value.param == name
    assert name in refusal.value.body["message"]
    assert (refusal.value.type, refusal.value.code) == ("invalid_request_error", "unsupported_parameter")


def test_what_asks_for_nothing_is_accepted(client):
    assert CHAT_OFF.keys() == ASKED_FOR.keys()
    nothing = {name: values[-1] for name, values in CHAT_OFF.items()} | dict.fromkeys(NO_EFFECT)
    answer = client.chat.completions.create(model="llama", messages=ASK, max_tokens=2, extra_body=nothing)
    assert answer.choices[0].message.content is not None


def test_null_means_the_default(client):
    body = dict.fromkeys(("temperature", "top_p", "max_tokens", "stop", "seed", "stream", "stream_options"))
    answer = client.chat.completions.create(model="briefed", messages=ASK, extra_body=body)
    assert answer.usage.completion_tokens <= 12


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_value_out_of_range_is_refused_by_name(client, name, value):
    body = {"model": "llama", "messages": ASK, "max_tokens": 4, name: value}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/chat/completions", body=body, cast_to=dict)
    assert refusal.value.param.partition("[")[0] == name
    assert name in refusal.value.body["message"]


def test_unknown_parameter_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError, match="unknown parameter: temprature"):
        client.chat.completions.create(model="llama", messages=ASK, extra_body={"temprature": 1})


def test_image_is_refused_in_words(client):
    picture = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    with pytest.raises(openai.BadRequestError, match=r"image_url.*only 'text'"):
        client.chat.completions.create(model="llama", messages=[{"role": "user", "content": picture}])


def test_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="no model named 'nobody'"):
        client.chat.completions.create(model="nobody", messages=ASK)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": NaN}', b"\xff\xfe", b'{"a":' * 2000])
def test_body_that_is_no_request_is_refused(engine, body):
    headers = {"content-type": "application/json"}
    answer = httpx.post(engine.url + "/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_lone_surrogate_is_refused(engine):
    body = b'{"model": "llama", "messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = httpx.post(engine.url + "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_prompt_over_the_context_is_refused_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError, match=r"prompt is \d,\d{3} tokens; llama allows 2,048") as refusal:
        client.chat.completions.create(model="llama", messages=[{"role": "user", "content": "fox " * 3000}])
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match=r"prompt is \d,\d{3} tokens; llama allows 2,048") as refusal:
        client.completions.create(model="llama", prompt="fox " * 3000)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "prompt")


def test_max_tokens_over_the_room_left_is_refused_with_all_numbers(client):
    with pytest.raises(openai.BadRequestError, match=r"tokens and max_tokens is 2,040; llama allows 2,048"):
        client.chat.completions.create(model="llama", messages=ASK, max_tokens=2040)


def test_default_limit_over_the_room_left_is_cut_to_it(client, engine):
    engine.put(TinyModel("talkative", sampling={"max_tokens": 5000, "ignore_eos": True}, context_length=64))
    answer = client.chat.completions.create(model="talkative", messages=ASK)
    assert answer.usage.total_tokens == 64
    httpx.delete(engine.url + "/models/talkative")


def test_a_megabyte_is_refused_within_a_second_while_others_stream(client):
    stream = client.chat.completions.create(
        model="llama", messages=ASK, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(stream)

    def seconds() -> float:
        began = time.monotonic()
        with pytest.raises(openai.BadRequestError, match="llama allows 2,048"):
            client.chat.completions.create(model="llama", messages=[{"role": "user", "content": "a page " * 150_000}])
        return time.monotonic() - began

    assert any(seconds() < 5 for _ in range(3))  # half a second on an idle machine
    assert streamed(stream)[1] == "length"


def test_characters_cut_over_tokens_arrive_whole(client):
    whole = client.chat.completions.create(model="speaker", messages=ASK, temperature=0)
    assert whole.choices[0].message.content == SPOKEN
    text, finish_reason, chunks = streamed(
        client.chat.completions.create(model="speaker", messages=ASK, temperature=0, stream=True)
    )
    assert (text, finish_reason) == (SPOKEN, "stop")
    assert not any("\ufffd" in chunk.model_dump_json() for chunk in chunks)


def test_many_at_once_say_what_each_says_alone(client):
    def ask(number):
        messages = [{"role": "user", "content": f"{number} the quick brown fox " * (1 + number % 5)}]
        model = ("llama", "briefed", "gemma")[number % 3]
        answer = client.chat.completions.create(model=model, messages=messages, **GREEDY)
        return answer.choices[0].message.content

    alone = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, [*range(12), *range(12)]))
    assert together == alone + alone


def test_completion_continues_a_text_or_its_tokens(client, engine):
    prompt = "the quick brown fox jumps over"
    tokens = httpx.post(engine.url + "/tokenize", json={"model": "llama", "prompt": prompt}).json()["tokens"]
    by_text = client.completions.create(model="llama", prompt=prompt, **GREEDY)
    by_tokens = client.completions.create(model="llama", prompt=tokens, **GREEDY)
    assert by_text.object == "text_completion"
    assert by_text.usage.prompt_tokens == len(tokens)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    pieces = client.completions.create(model="llama", prompt=[prompt], stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == by_text.choices[0].text


@pytest.mark.parametrize("prompt", ["the fox", "<bos>the fox"])
def test_text_begins_with_one_first_token_where_the_checkpoint_has_one(engine, prompt):
    def tokens(model, text):
        return httpx.post(engine.url + "/tokenize", json={"model": model, "prompt": text}).json()["tokens"]

    plain = tokens("llama", "the fox")
    assert tokens("gemma", prompt) == [BOS, *plain]


def test_completion_is_sixteen_tokens_by_default(client):
    answer = client.completions.create(model="llama", prompt="the", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["", [], [10_000], [""], [[]]])
def test_completion_of_nothing_or_of_no_token_is_refused(client, prompt):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="llama", prompt=prompt)
    assert refusal.value.param == "prompt"


def test_ready_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["llama", "briefed", "gemma", "speaker"]
    assert client.models.retrieve("gemma").owned_by == "paged-arena"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_client_that_leaves_a_stream_frees_its_pages(client, engine):
    before = load_of(engine)["generated_tokens"]
    stream = client.chat.completions.create(
        model="llama", messages=ASK, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    next(stream)
    assert engine.kv()["pages"]["used"] > engine.kv()["pages"]["pinned"]
    stream.close()
    until(lambda: is_idle(engine), seconds=60)
    assert load_of(engine)["generated_tokens"] - before < 1500


def test_client_that_leaves_a_whole_answer_frees_its_pages(engine):
    before = load_of(engine)["generated_tokens"]
    body = {"model": "llama", "messages": ASK, "max_tokens": 1800, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(engine.url + "/v1/chat/completions", json=body, timeout=httpx.Timeout(30, read=0.3))
    until(lambda: is_idle(engine), seconds=60)
    assert load_of(engine)["generated_tokens"] - before < 1800


def test_clients_that_leave_while_queued_or_prefilling_leave_nothing_behind(engine):
    before = load_of(engine)["generated_tokens"]
    body = {"messages": [{"role": "user", "content": "fox " * 800}], "max_tokens": 300, "ignore_eos": True}

    def leaves(number) -> bool:
        request = {**body, "model": ("llama", "gemma")[number % 2], "stream": number % 4 < 2}
        try:
            httpx.post(engine.url + "/v1/chat/completions", json=request, timeout=httpx.Timeout(30, read=0.25))
        except httpx.ReadTimeout:
            return True
        return False

    with ThreadPoolExecutor(40) as pool:
        left = sum(pool.map(leaves, range(40)))
    until(lambda: is_idle(engine), seconds=60)
    assert left > 20 and load_of(engine)["generated_tokens"] - before < 300 * 40
    load = {name: model["running"] + model["waiting"] for name, model in engine.kv()["models"].items()}
    assert set(load.values()) == {0}
