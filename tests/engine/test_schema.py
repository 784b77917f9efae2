"""A body that is wrong in ever so many places is refused for the first: errors are made on the event loop."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import EngineError, UnknownParameter
from engine.schema import (
    MOST_MESSAGES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    Schema,
    TokenizeRequest,
    explained,
)

ASK = {"role": "user", "content": "hello"}
MANY = 5000
UNKNOWN = {f"a{i}": 1 for i in range(MANY)}
WRONG = ([None] * MANY, [{}] * MANY, [1.5] * MANY, [""] * MANY, [UNKNOWN], UNKNOWN, {str(i): "x" for i in range(MANY)})
REQUESTS: tuple[type[Schema], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ModelRequest,
)


def errors_in(schema: type[Schema], body: dict[str, Any]) -> list[Any]:
    try:
        schema.model_validate(body)
    except ValidationError as error:
        return error.errors()
    except EngineError as error:
        return [error]
    return []


@pytest.mark.parametrize(
    ("schema", "body", "named"),
    [
        (ChatRequest, {"messages": [{}] * MANY}, "messages[0].role"),
        (ChatRequest, {"messages": [ASK] * (MOST_MESSAGES + 1)}, "messages"),
        (TokenizeRequest, {"messages": [{}] * MANY}, "messages[0].role"),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}, "tokens[0]"),
        (ChatRequest, {"messages": [ASK], **UNKNOWN}, "a0"),
        (ChatRequest, {"messages": [ASK, {**ASK, **UNKNOWN}]}, "messages[1].a0"),
        (ChatRequest, {"messages": [ASK], "logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
        (ModelRequest, {"source": "path:/x", "sampling": UNKNOWN}, "sampling.a0"),
        (ChatRequest, {"messages": [ASK], "response_format": {"type": "text", **UNKNOWN}}, "response_format.a0"),
    ],
)
def test_the_first_of_very_many_mistakes_is_the_only_one_made(schema, body, named):
    errors = errors_in(schema, body)
    assert len(errors) <= 2  # a message without any field lacks both
    first = errors[0] if isinstance(errors[0], EngineError) else explained(errors[0])
    assert first.param == named


@pytest.mark.parametrize("schema", REQUESTS)
def test_no_field_has_thousands_of_errors(schema):
    for name in schema.names():
        for wrong in WRONG:
            assert len(errors_in(schema, {name: wrong})) < 20, name


DEEP: Any = []
for _ in range(2000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"model": DEEP}, "model"),
        ({"tools": DEEP}, "tools"),
        ({"messages": [{**ASK, "content": [{"type": DEEP}]}]}, "messages"),
    ],
)
def test_what_is_nested_too_deeply_to_be_shown_is_refused_without_it(body, named):
    error = errors_in(ChatRequest, {"messages": [ASK], **body})[0]
    assert (error if isinstance(error, EngineError) else explained(error)).param == named


def test_fields_are_known_by_the_names_that_callers_write():
    asked = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert errors_in(ChatRequest, {"messages": [ASK], "response_format": asked}) == []
    assert errors_in(ChatRequest, {"messages": [ASK], "structured_outputs": {"json": "{}"}}) == []
    (error,) = errors_in(ChatRequest, {"messages": [ASK], "structured_outputs": {"json": "{}", "json_schema": "{}"}})
    assert isinstance(explained(error), UnknownParameter)
