"""Several answers, log-probabilities, echo, bias: what OpenAI's own client sees of them, over loopback."""

from __future__ import annotations

import math

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.vocabulary import Vocabulary
from tests.engine.server_fixture import SPOKEN, tiny_folder
from tests.engine.tiny import IM_END, tiny_tokenizer

ASK = [{"role": "user", "content": "what is the capital of france?"}]
PROMPT = "the quick brown 🦊 fox"
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
TOKENIZER = tiny_tokenizer(adds_bos=False)
(THE,) = TOKENIZER.encode("the").ids


@pytest.fixture(scope="module")
def client(engine):
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference():
    """Log-probabilities [position, token] of what follows each token, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)

    def logprobs(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)

    return logprobs


def text_of(content: list) -> str:
    return b"".join(bytes(entry.bytes) for entry in content if entry.bytes is not None).decode(errors="ignore")


def merged(chunks: list) -> dict[int, tuple[str, list]]:
    """Text and log-probabilities of each choice of a stream."""
    found: dict[int, tuple[str, list]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text, content = found.get(choice.index, ("", []))
        more = choice.logprobs.content if choice.logprobs else []
        found[choice.index] = (text + (choice.delta.content or ""), content + more)
    return found


# Log-probabilities


def test_log_probabilities_are_those_of_transformers(client, reference):
    tokens = TOKENIZER.encode(PROMPT).ids
    answer = client.completions.create(model="llama", prompt=tokens, logprobs=3, **GREEDY).choices[0]
    said = [TOKENIZER.encode(answer.text).ids, answer.logprobs]
    drawn = list(tokens)
    for logprob, likeliest in zip(said[1].token_logprobs, said[1].top_logprobs, strict=True):
        expected = reference(drawn)[-1]
        best = expected.topk(3)
        assert logprob == pytest.approx(best.values[0].item(), abs=1e-4)
        assert sorted(likeliest.values(), reverse=True) == pytest.approx(best.values.tolist(), abs=1e-4)
        drawn.append(best.indices[0].item())


def test_log_probabilities_are_those_before_temperature_and_penalties(client):
    ask = {"model": "llama", "messages": ASK, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    plain = client.chat.completions.create(**ask, temperature=0).choices[0].logprobs.content[0]
    bent = (
        client.chat.completions.create(**ask, temperature=1.7, seed=4, presence_penalty=2, logit_bias={str(THE): 100})
        .choices[0]
        .logprobs.content[0]
    )
    expected = [entry.logprob for entry in plain.top_logprobs]
    assert [entry.logprob for entry in bent.top_logprobs] == pytest.approx(expected, abs=1e-4)
    assert bent.token == "the" != plain.token
    assert bent.logprob < plain.logprob


@pytest.mark.parametrize("stream", [False, True])
def test_characters_split_over_tokens_have_the_right_bytes(client, stream):
    ask = {"model": "speaker", "messages": ASK, "temperature": 0, "logprobs": True, "top_logprobs": 0}
    if stream:
        chunks = list(client.chat.completions.create(**ask, stream=True))
        (text, content) = merged(chunks)[0]
        for chunk in chunks:  # what a chunk says and what it scores belong together
            for choice in chunk.choices:
                scored = choice.logprobs.content if choice.logprobs else []
                assert text_of(scored) == (choice.delta.content or "")
    else:
        choice = client.chat.completions.create(**ask).choices[0]
        text, content = choice.message.content, choice.logprobs.content
    assert text == text_of(content) == SPOKEN
    assert len(content) == len(TOKENIZER.encode(SPOKEN).ids)  # the token that ended it has no text
    assert all(entry.top_logprobs == [] for entry in content)
    assert any(entry.token.startswith("\\x") for entry in content)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stop_string_cuts_off_has_no_log_probabilities_and_what_it_held_back_has(client, stream):
    free = client.completions.create(model="llama", prompt=PROMPT, logprobs=0, **GREEDY).choices[0]
    for stop in (free.text[5:8], free.text[-2:] + "never"):
        ask = {"model": "llama", "prompt": PROMPT, "logprobs": 0, "stop": [stop], **GREEDY}
        answer = client.completions.create(**ask, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        text = "".join(choice.text for choice in choices)
        assert text == free.text.partition(stop)[0]
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
        begun = sum(offset < len(text) for offset in free.logprobs.text_offset)
        assert tokens == free.logprobs.tokens[: begun if stop in free.text else None]


def test_offsets_of_a_completion_point_at_its_tokens(client):
    answer = client.completions.create(model="speaker", prompt="hi", temperature=0, logprobs=0, max_tokens=40).choices[
        0
    ]
    assert answer.text == SPOKEN
    for token, offset, likeliest, logprob in zip(
        answer.logprobs.tokens,
        answer.logprobs.text_offset,
        answer.logprobs.top_logprobs,
        answer.logprobs.token_logprobs,
        strict=True,
    ):
        assert likeliest == {token: logprob}
        assert token.startswith("bytes:\\x") or answer.text.startswith(token, offset)


def test_special_tokens_have_no_bytes(client):
    ask = {"model": "llama", "messages": ASK, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    content = client.chat.completions.create(**ask, logit_bias={str(IM_END): 100}, extra_body={"ignore_eos": True})
    entry = content.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes) == ("<|im_end|>", None)
    assert content.choices[0].message.content == ""


# Echo


def test_echo_scores_the_prompt_as_transformers_does(client, reference):
    answer = client.completions.create(model="llama", prompt=PROMPT, echo=True, logprobs=2, max_tokens=0, temperature=0)
    tokens = TOKENIZER.encode(PROMPT).ids
    scores = answer.choices[0].logprobs
    expected = reference(tokens)[torch.arange(len(tokens) - 1), tokens[1:]].tolist()
    assert answer.choices[0].text == PROMPT
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert scores.text_offset == [len(TOKENIZER.decode(tokens[:i]).rstrip("\ufffd")) for i in range(len(tokens))]
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (0, "length")


def test_a_long_prompt_is_scored_in_pieces_and_again_although_it_is_cached(client, reference):
    tokens = (TOKENIZER.encode(PROMPT).ids * 20)[:200]
    for _ in range(2):
        answer = client.completions.create(model="llama", prompt=tokens, echo=True, logprobs=0, max_tokens=1)
        expected = reference(tokens)[torch.arange(len(tokens) - 1), tokens[1:]].tolist()
        assert answer.choices[0].logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-3)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_echo_comes_first_in_every_choice_streamed_or_not(client):
    ask = {"model": "llama", "prompt": PROMPT, "n": 2, "seed": 5, "max_tokens": 8, "logprobs": 1}
    bare = client.completions.create(**ask, echo=False)
    whole = client.completions.create(**ask, echo=True)
    assert [choice.text for choice in whole.choices] == [PROMPT + choice.text for choice in bare.choices]
    prompt_tokens = whole.usage.prompt_tokens
    for index, choice in enumerate(whole.choices):
        assert len(choice.logprobs.tokens) == prompt_tokens + len(bare.choices[index].logprobs.tokens)
        assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
    texts, tokens = ["", ""], [[], []]
    for chunk in client.completions.create(**ask, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


def test_echo_of_tokens_is_their_text(client):
    tokens = [IM_END, *TOKENIZER.encode(PROMPT).ids]
    answer = client.completions.create(model="llama", prompt=tokens, echo=True, max_tokens=0)
    assert answer.choices[0].text == "<|im_end|>" + PROMPT


def test_the_first_token_of_a_checkpoint_is_no_text_of_the_echo(client):
    answer = client.completions.create(model="gemma", prompt="the fox", echo=True, max_tokens=0, logprobs=0)
    assert answer.choices[0].text == "the fox"
    assert answer.choices[0].logprobs.text_offset[:2] == [0, 0]


# Several answers


def test_several_answers_are_those_of_the_seeds_that_follow(client):
    ask = {"model": "llama", "messages": ASK, "temperature": 1.0, "max_tokens": 16}
    together = client.chat.completions.create(**ask, n=4, seed=11)
    alone = [client.chat.completions.create(**ask, seed=11 + i) for i in range(4)]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [c.message.content for c in together.choices] == [a.choices[0].message.content for a in alone]
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert together.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)


def test_streamed_answers_are_told_apart_by_index_and_end_once(client):
    ask = {"model": "llama", "messages": ASK, "temperature": 1.0, "max_tokens": 16, "n": 3, "seed": 11}
    whole = client.chat.completions.create(**ask)
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options=usage))
    assert {i: text for i, (text, _) in merged(chunks).items()} == {
        choice.index: choice.message.content for choice in whole.choices
    }
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert sorted(choice.index for choice in choices if choice.finish_reason) == [0, 1, 2]
    assert sorted(choice.index for choice in choices if choice.delta.role) == [0, 1, 2]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_what_comes_within_the_interval_is_one_event_but_the_first_word_and_the_end_come_at_once(client):
    ask = {"model": "llama", "messages": ASK, "stream": True, **GREEDY, "max_tokens": 100}
    merged_chunks = list(client.chat.completions.create(**ask, stream_options={"interval_ms": 10_000}))
    chunks = list(client.chat.completions.create(**ask))
    assert merged(merged_chunks) == merged(chunks)
    assert len(merged_chunks) < 5 < len(chunks)


def test_usage_so_far_is_in_every_event_if_asked_for(client):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(model="llama", messages=ASK, stream=True, stream_options=usage, **GREEDY)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12
    assert chunks[0].usage.prompt_tokens == chunks[-1].usage.prompt_tokens


def test_usage_so_far_says_nothing_where_usage_is_not_included(client):
    asked = {"model": "llama", "messages": ASK, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert all(chunk.usage is None and chunk.choices for chunk in client.chat.completions.create(**asked, **GREEDY))


# Bias and refusals


def test_bias_forbids_a_token_and_forces_another(client):
    free = client.completions.create(model="llama", prompt=PROMPT, logprobs=0, **GREEDY).choices[0]
    name = free.logprobs.tokens[0].removeprefix("bytes:")
    (first,) = (token for token in range(384) if Vocabulary(TOKENIZER).name_of(token) == name)
    forbidden = client.completions.create(
        model="llama", prompt=PROMPT, logit_bias={str(first): -100}, logprobs=0, **GREEDY
    )
    assert free.logprobs.tokens[0] not in forbidden.choices[0].logprobs.tokens
    forced = client.completions.create(model="llama", prompt=PROMPT, logit_bias={str(THE): 100}, **GREEDY)
    assert forced.choices[0].text == "the" * 12


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": 3}, "logprobs"),
        ("chat/completions", {"n": 0}, "n"),
        ("chat/completions", {"n": 129}, "n"),
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"384": 1}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"5": 101}}, "logit_bias.5"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"stream": True, "stream_options": {"interval_ms": -1}}, "stream_options.interval_ms"),
    ],
)
def test_what_cannot_be_is_refused_by_name(engine, path, body, param):
    asked = {"messages": ASK} if path.startswith("chat") else {"prompt": PROMPT}
    answer = httpx.post(f"{engine.url}/v1/{path}", json={"model": "llama", **asked, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_no_log_probability_is_minus_infinity_in_json(client):
    answer = client.completions.create(model="speaker", prompt="hi", logprobs=20, max_tokens=4, temperature=0)
    assert all(math.isfinite(x) for entry in answer.choices[0].logprobs.top_logprobs for x in entry.values())


# Ids, load, deadlines


def test_the_id_of_a_request_is_the_callers_and_comes_back_with_every_response(engine):
    body = {"model": "llama", "messages": ASK, "max_tokens": 2}
    for path, asked, status in (
        ("/v1/chat/completions", body, 200),
        ("/v1/chat/completions", {**body, "stream": True}, 200),
        ("/v1/chat/completions", {**body, "model": "nobody"}, 404),
        ("/v1/chat/completions", {**body, "temperature": 9}, 400),
        ("/nowhere", {}, 404),
    ):
        answer = httpx.post(engine.url + path, json=asked, headers={"X-Request-Id": "trace/7f-1"})
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["trace/7f-1"])
        if status == 200:
            assert "chatcmpl-trace/7f-1" in answer.text
    ids = {httpx.get(engine.url + "/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize("value", ["a b", "x" * 129, 'a"b', "é"])
def test_an_id_that_would_break_a_log_or_a_header_is_refused(engine, value):
    answer = httpx.get(engine.url + "/v1/models", headers={"X-Request-Id": value.encode()})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")
    assert answer.headers["x-request-id"] != value


def test_a_deadline_ends_an_answer_with_an_error_that_no_client_retries(engine):
    body = {"model": "llama", "messages": ASK, "max_tokens": 1900, "ignore_eos": True, "deadline_seconds": 0.2}
    whole = httpx.post(engine.url + "/v1/chat/completions", json=body, timeout=30)
    assert (whole.status_code, whole.headers["x-should-retry"]) == (408, "false")
    assert (whole.json()["error"]["code"], whole.json()["error"]["param"]) == ("deadline_exceeded", "deadline_seconds")
    streamed = httpx.post(engine.url + "/v1/chat/completions", json={**body, "stream": True}, timeout=30)
    assert "deadline_exceeded" in streamed.text.split("\n\n")[-3]


def test_load_says_how_many_requests_there_are(engine):
    assert httpx.get(engine.url + "/load").json()["server_load"] == 0
    body = {"model": "llama", "messages": ASK, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", engine.url + "/v1/chat/completions", json=body, timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert httpx.get(engine.url + "/load").json()["server_load"] == 1
