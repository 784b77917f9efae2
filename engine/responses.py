"""Answers in JSON and errors in their one shape, as responses and as OpenAPI describes them."""

from __future__ import annotations

import logging
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.errors import BadRequest, EngineError
from engine.models import ModelStatus
from engine.schema import ErrorBody, explained

log = logging.getLogger(__name__)


def described(answers: dict[int, tuple[str, ...]]) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: what a route answers with, by status, and errors in their one shape."""
    errors = {status: {"model": ErrorBody, "description": "An error."} for status in ("4XX", "5XX")}
    contents = {status: {kind: {} for kind in kinds} for status, kinds in answers.items()}
    return errors | {
        status: {"description": HTTPStatus(status).phrase, **({"content": content} if content else {})}
        for status, content in contents.items()
    }


def json_response(content: Any, status: int = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def model_response(status: ModelStatus) -> Response:
    return json_response(asdict(status), HTTPStatus.ACCEPTED if status.status == "loading" else HTTPStatus.OK)


def error_response(error: EngineError) -> Response:
    response = json_response(error.as_dict(), error.status)
    if not error.worth_a_retry:
        response.headers["x-should-retry"] = "false"  # which OpenAI's clients obey
    return response


async def on_error(request: Request, error: Exception) -> Response:
    """What went wrong in a route."""
    if isinstance(error, RequestValidationError):
        error = explained(error.errors()[0])
    elif isinstance(error, HTTPException):
        status, words = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
        error = BadRequest(words)
        error.status = status
    elif not isinstance(error, EngineError):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        error = EngineError("the engine failed to answer; its log says why")
    return error_response(error)
