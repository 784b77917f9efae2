"""Answers held to a grammar: a random checkpoint says nothing but what it may, and ends when it may."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import InvalidParameter
from engine.grammar import Grammar, Grammars
from engine.request import Terms
from tests.engine.fake_runner import HYBRID, TOKENIZER, FakeRunner
from tests.engine.rig import Rig
from tests.engine.test_core import words

ASK = [{"role": "user", "content": "what is the capital of france?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "rank": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["capital", "size", "rank"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), [a-c]{2,5}!"


@pytest.fixture(scope="module")
def client(engine):
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, seed: int = 0, **body):
    return client.chat.completions.create(
        model="llama", messages=ASK, temperature=1.0, seed=seed, max_tokens=200, extra_body=body
    )


def json_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}


def in_schema(text: str) -> bool:
    said = json.loads(text)
    return said.keys() == SCHEMA["properties"].keys() and said["size"] in ("small", "large") and 1 <= said["rank"] <= 99


# Over HTTP


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema_and_then_ends(client, seed):
    choice = ask(client, seed, response_format=json_schema(SCHEMA)).choices[0]
    assert in_schema(choice.message.content)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"regex": REGEX}},
        {"guided_regex": REGEX},
        {"structured_outputs": {"grammar": 'start: ("yes" | "no") ", " /[a-c]{2,5}/ "!"'}},
        {"guided_grammar": 'start: ("yes" | "no") ", " /[a-c]{2,5}/ "!"'},
    ],
)
def test_an_answer_matches_its_regex(client, body):
    choice = ask(client, 1, **body).choices[0]
    assert re.fullmatch(REGEX, choice.message.content) and choice.finish_reason == "stop"


@pytest.mark.parametrize("body", [{"guided_json": SCHEMA}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}])
def test_a_schema_comes_as_vllm_takes_it_too(client, body):
    assert in_schema(ask(client, 2, **body).choices[0].message.content)


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_an_answer_is_one_of_the_choices(client, field):
    choices = ['a "quoted" one', "日本\n", "a"]
    body = {field: choices if field == "guided_choice" else {"choice": choices}}
    assert {ask(client, seed, **body).choices[0].message.content for seed in range(12)} <= set(choices)


def test_any_json_object_will_do(client):
    body = {"response_format": {"type": "json_object"}, "logit_bias": {str(TOKENIZER.token_to_id("}")): 20}}
    choice = ask(client, **body).choices[0]
    assert isinstance(json.loads(choice.message.content), dict) and choice.finish_reason == "stop"


def test_each_of_several_answers_is_held_to_the_grammar_on_its_own(client):
    answer = client.chat.completions.create(
        model="llama", messages=ASK, n=4, seed=3, temperature=1.5, max_tokens=60, extra_body={"guided_regex": REGEX}
    )
    said = [choice.message.content for choice in answer.choices]
    assert all(re.fullmatch(REGEX, text) for text in said) and len(set(said)) > 1
    stream = client.chat.completions.create(
        model="llama",
        messages=ASK,
        n=4,
        seed=3,
        temperature=1.5,
        max_tokens=60,
        stream=True,
        extra_body={"guided_regex": REGEX},
    )
    streamed = [""] * 4
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == said


def test_a_schema_needs_no_name(client):
    unnamed = {"type": "json_schema", "json_schema": {"schema": {"const": "fox"}}}
    assert ask(client, 1, response_format=unnamed).choices[0].message.content == '"fox"'


def test_completions_take_a_grammar_too(client):
    answer = client.completions.create(model="gemma", prompt="say", max_tokens=60, extra_body={"guided_regex": REGEX})
    assert re.fullmatch(REGEX, answer.choices[0].text)


def test_a_stop_string_cuts_what_follows_a_grammar(client):
    assert ask(client, 1, guided_regex="ab+c", stop="c").choices[0].message.content.startswith("ab")
    assert ask(client, 1, guided_regex="aXb+", stop="X").choices[0].message.content == "a"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"response_format": json_schema({"type": "nonsense"})}, "response_format", "nonsense"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "response_format.json_schema.schema",
            "required",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"guided_regex": "(ab"}, "guided_regex", "unclosed group"),
        ({"guided_json": "{"}, "guided_json", "Expecting"),
        ({"guided_json": "[]"}, "guided_json", "object"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "give one"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "nothing"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
    ],
)
def test_a_grammar_that_is_none_is_refused_with_its_reason(engine, body, param, reason):
    answer = httpx.post(engine.url + "/v1/chat/completions", json={"model": "llama", "messages": ASK, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert reason in answer.json()["error"]["message"]


# In the engine


def held(value: str, ends: frozenset[int] = frozenset(), kind: str = "regex", **params):
    """The answer of a fake checkpoint held to a regex."""
    rig = Rig({"a": FakeRunner(HYBRID, "a", eos_token_ids=ends)})
    rig.put("a")
    grammar = Grammars(TOKENIZER, 384, ends).compile("it", kind, value)
    answer = rig.ask("a", words(20), 40, temperature=1.0, terms=Terms(grammar=grammar), **params)
    rig.drain()
    return answer


def test_an_answer_ends_when_its_grammar_has_nothing_more_without_an_end_token():
    answer = held("[ab]{7}")
    assert re.fullmatch("[ab]{7}", answer.text) and answer.reason == "stop"


def test_an_end_comes_only_where_the_grammar_is_complete():
    ends = frozenset(range(200, 384))
    for seed in range(5):
        answer = held("(ab){2,}", ends, seed=seed)
        assert re.fullmatch("(ab){2,}", answer.text) or answer.reason == "length"


@pytest.mark.parametrize(("kind", "value"), [("regex", "a"), ("grammar", 'start: "a" x\nx: x')])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_min_tokens_gives_way_to_a_grammar_that_is_complete_or_leads_nowhere(kind, value, ignore_eos):
    answer = held(value, frozenset({2, 4}), kind, min_tokens=10, ignore_eos=ignore_eos)
    assert (answer.text, answer.reason) == ("a", "stop")


def test_max_tokens_cuts_a_grammar_short():
    answer = held("[ab]{100}")
    assert answer.reason == "length" and re.fullmatch("[ab]+", answer.text)


def test_grammars_that_go_on_from_one_are_independent():
    one = Grammars(TOKENIZER, 384, frozenset({2})).compile("regex", "regex", "a{2}")
    other = one.copy()
    (a,) = TOKENIZER.encode("a").ids
    assert not one.accept(a) and one.accept(a)
    assert other.allowed()[a] and not other.accept(a)


def test_a_grammar_that_gives_up_while_it_looks_ahead_ends_no_answer_as_if_it_were_complete():
    tokenizer = LLTokenizer(TOKENIZER.to_str(), n_vocab=384, eos_token=[2])
    regex = LLMatcher.grammar_from_regex("(a|b)*a(a|b){20}")
    grammar = Grammar(LLMatcher(tokenizer, regex, log_level=0, limits=LLParserLimits(step_lexer_fuel=20)), 12)
    assert list(grammar.allowed().nonzero()[0]) == [2]
    with pytest.raises(ValueError, match="gave up"):
        grammar.accept(2)


@pytest.mark.parametrize("schema", ["[" * 100_000, '{"items":' * 100_000])
def test_the_text_of_a_schema_that_is_nested_too_deeply_is_refused(schema):
    with pytest.raises(InvalidParameter, match=r"it: .*recursion"):
        Grammars(TOKENIZER, 384, frozenset({2})).compile("it", "json", schema)


@pytest.mark.parametrize(("kind", "value"), [("grammar", "start: start"), ("regex", ""), ("regex", r"[^\s\S]")])
def test_a_grammar_of_no_text_is_refused(kind, value):
    with pytest.raises(InvalidParameter, match="nothing but the empty text"):
        Grammars(TOKENIZER, 384, frozenset({2})).compile("regex", kind, value)
