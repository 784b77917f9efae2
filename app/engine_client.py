"""One engine over HTTP: ours, or any endpoint that speaks OpenAI's protocol. The only module that knows its paths.

Knows no battle and no visitor. What goes wrong leaves as an `EngineError`, whose words are for the admin's log and
never for a visitor:

    EngineError
    ├── EngineUnreachable    no connection, or it broke; another try may work
    ├── EngineSilent         connected, and no answer for longer than allowed
    └── EngineRefused        an HTTP status of 400 or more, with the engine's own sentence
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import responses
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from app.memory import page_frames
from db.tables import storable

CONNECT_SECONDS = 5.0
PAGE_FRAMES_SECONDS = 10.0  # of silence, when the engine sends a sign of life every two
ANSWER_SECONDS = 30.0  # of a request that is not a stream
LIST_SECONDS = 10.0  # of one that no tokenizer, page or checkpoint has to be waited for
LONGEST_LINE_BYTES = 4 * 1024 * 1024
UNSENDABLE = 422  # the status with which any engine would refuse what cannot even be written down


class EngineError(Exception):
    """Root of what an engine may do to its caller."""


class EngineUnreachable(EngineError):
    """Nothing listens there, or the connection broke in mid-answer."""


class EngineSilent(EngineError):
    """No word for longer than the caller allows."""


class EngineRefused(EngineError):
    def __init__(self, status: int, message: str):
        super().__init__(f"HTTP {status}: {message or responses.get(status, 'no word why')}")
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Delta:
    """A piece of an answer. The last one carries `finish_reason` and, where the engine tells them, the counts."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class EngineModel:
    """What an engine says of a model: `done` of `total` in `unit` while it loads."""

    name: str
    status: str  # loading, ready or failed
    reason: str | None = None
    done: int = 0
    total: int = 0
    unit: str = ""
    context_length: int | None = None
    checkpoint_context_length: int | None = None
    system_prompt_tokens: int = 0
    architecture: str | None = None
    chat_format: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """What an engine is asked to serve under a name."""

    source: str
    system_prompt: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    context_length: int | None = None
    precision: str | None = None  # of the weights; None: the engine's own
    adapter: str | None = None  # over the checkpoint
    kv_share: float = 0.0  # of the pool, that it may count on


class EngineClient:
    """`url()` is asked for each request, as a restarted engine may listen elsewhere; None means there is none now.

    `prefix` is where OpenAI's paths begin: "/v1" for our engine, "" where the URL ends with it already. `interval_ms`:
    asks our engine, which alone knows it, to merge what it says of an answer within that time, but for the first word
    and the end.
    """

    def __init__(
        self,
        url: Callable[[], str | None] | str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        prefix: str = "/v1",
        interval_ms: int = 0,
    ):
        self._url = (lambda: url) if isinstance(url, str) else url
        self._prefix = prefix
        self._key = api_key
        self._admin_key = admin_key or api_key
        self._stream_options = {"include_usage": True} | ({"interval_ms": interval_ms} if interval_ms else {})
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    # Answers

    async def stream_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        *,
        sampling: Mapping[str, Any],
        silence_seconds: float,
    ) -> AsyncIterator[Delta]:
        """The answer, piece by piece, ended by one with a finish reason. Raises EngineError.

        Closing the iterator closes the connection, at which the engine gives up the request and frees its pages.
        """
        body = {
            **sampling,
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": self._stream_options,
        }
        finish: str | None = None
        usage: Mapping[str, Any] = {}
        timeout = httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS)
        async with self._stream("POST", f"{self._prefix}/chat/completions", body, timeout) as response:
            events, said_at = _server_sent_events(response), _now()
            while (event := await _next(events, said_at, silence_seconds)) is not None:
                if event.get("error"):
                    raise EngineRefused(response.status_code, _sentence(event))
                usage = _table(event.get("usage")) or usage
                for choice in event.get("choices") or ():
                    if isinstance(reason := choice.get("finish_reason"), str):
                        finish = reason or finish
                    delta = choice.get("delta") or {}
                    if any(said for name, said in delta.items() if name != "role"):  # thoughts count as well
                        said_at = _now()
                    if text := delta.get("content"):
                        yield Delta(text=storable(text))
        if finish is None:
            raise EngineUnreachable("the stream ended before the answer did")
        yield Delta(
            finish_reason=finish,
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(_table(usage.get("prompt_tokens_details")).get("cached_tokens")),
        )

    async def count_tokens(self, model: str, messages: Sequence[Mapping[str, str]]) -> int:
        """Of the prompt that a chat with these messages becomes, the model's own system prompt included."""
        answer = await self._ask("POST", "/tokenize", {"model": model, "messages": list(messages)})
        return answer["count"]

    # Models

    async def models(self) -> dict[str, EngineModel]:
        answer = await self._ask("GET", "/models", key=self._admin_key, seconds=LIST_SECONDS)
        known = EngineModel.__dataclass_fields__
        try:
            return {
                each["name"]: EngineModel(**{key: value for key, value in each.items() if key in known})
                for each in answer["models"]
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineRefused(200, "its list of models is not that of an engine of ours") from error

    async def put_model(self, name: str, spec: ModelSpec) -> None:
        """Asks for it; `models` tells how it goes on. Raises EngineRefused for a spec that cannot be."""
        body = {
            "source": spec.source,
            "system_prompt": spec.system_prompt,
            "sampling": dict(spec.sampling),
            "chat_template": spec.chat_template,
            "context_length": spec.context_length,
            "precision": spec.precision,
            "adapter": spec.adapter,
            "kv_share": spec.kv_share,
        }
        await self._ask("PUT", f"/models/{quote(name, safe='')}", body, key=self._admin_key)

    async def delete_model(self, name: str) -> None:
        try:
            await self._ask("DELETE", f"/models/{quote(name, safe='')}", key=self._admin_key)
        except EngineRefused as error:
            if error.status != 404:
                raise

    async def listed_models(self, timeout_seconds: float) -> list[str]:
        """The ids of OpenAI's model list: what a remote endpoint serves."""
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await self._ask("GET", f"{self._prefix}/models")
            return [each["id"] for each in answer["data"]]
        except TimeoutError:
            raise EngineSilent(f"no answer within {timeout_seconds:g} s") from None
        except (KeyError, TypeError) as error:
            raise EngineRefused(200, "its list of models is not in OpenAI's form") from error

    # State

    async def kv(self) -> dict[str, Any]:
        """The pool of pages, as DESIGN 9 gives its shape."""
        return await self._ask("GET", "/kv")

    async def step_seconds(self, timeout_seconds: float) -> float:
        """For how long the step that our engine is at has taken by now. Raises EngineError, also for a dead engine."""
        return (await self._ask("GET", "/health", seconds=timeout_seconds)).get("step_seconds", 0.0)

    async def page_frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """The page map, live: the messages of app/memory/page_frames.py, for ever. Raises EngineError, ValueError."""
        buffer = bytearray()
        timeout = httpx.Timeout(PAGE_FRAMES_SECONDS, connect=CONNECT_SECONDS)
        async with self._stream("GET", "/kv/pages", None, timeout) as response:
            async for chunk in response.aiter_raw():
                buffer += chunk
                for message in page_frames.split(buffer):
                    yield message

    # HTTP

    async def _ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, seconds: float = ANSWER_SECONDS
    ) -> Any:
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        async with self._stream(method, path, body, timeout, key=key) as response:
            content = await response.aread()
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise EngineRefused(response.status_code, "its answer is not JSON") from error

    def _stream(
        self, method: str, path: str, body: Any, timeout: httpx.Timeout, *, key: str | None = None
    ) -> _Exchange:
        url = self._url()
        if url is None:
            raise EngineUnreachable("the engine is starting")
        key = key or self._key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            content = None if body is None else orjson.dumps(body)
        except orjson.JSONEncodeError as error:  # as one that no rule of ours saw, written straight into the table
            raise EngineRefused(UNSENDABLE, f"JSON cannot carry it ({error})") from error
        if content is not None:
            headers["Content-Type"] = "application/json"
        request = self._http.build_request(
            method, url.rstrip("/") + path, content=content, headers=headers, timeout=timeout
        )
        return _Exchange(self._http, request)


class _Exchange:
    """One request and its open response; httpx's errors become ours, in the body as well."""

    def __init__(self, http: httpx.AsyncClient, request: httpx.Request):
        self._http = http
        self._request = request
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        try:
            self._response = await self._http.send(self._request, stream=True)
            if self._response.status_code >= 300:
                raise EngineRefused(self._response.status_code, _sentence(await self._response.aread()))
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self._response

    async def __aexit__(self, kind, error, trace) -> None:
        if self._response is not None:
            await self._response.aclose()
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            raise EngineSilent(f"no answer for {self._request.extensions['timeout']['read']:g} s") from error
        if isinstance(error, httpx.HTTPError | httpx.StreamError):
            raise EngineUnreachable(str(error) or type(error).__name__) from error


async def _server_sent_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line up to [DONE]; comments and other fields are skipped."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            raise EngineRefused(response.status_code, "a line of its stream has no end")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                return
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError as error:
                raise EngineRefused(response.status_code, "its stream is not JSON") from error
            if isinstance(event, dict):
                yield event


async def _next(events: AsyncIterator[dict[str, Any]], said_at: float, silence_seconds: float) -> dict[str, Any] | None:
    """The next event; None after the last. Raises EngineSilent once so long after `said_at`, whatever else comes: signs
    of life without a word would keep a silent side alive for ever."""
    try:
        async with asyncio.timeout_at(said_at + silence_seconds):
            return await anext(events, None)
    except TimeoutError:
        raise EngineSilent(f"no answer for {silence_seconds:g} s") from None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    """Of tokens, or None for what is none, or more than a database holds: not for that is an answer lost."""
    return value if type(value) is int and 0 <= value < 2**31 else None


def _sentence(body: bytes | dict) -> str:
    """The message of an error in OpenAI's shape, FastAPI's, or whatever came instead; at most 500 characters."""
    try:
        document = orjson.loads(body) if isinstance(body, bytes) else body
        error = document.get("error", document.get("detail", document))
        message = error.get("message", error) if isinstance(error, dict) else error
    except (orjson.JSONDecodeError, AttributeError):
        message = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    return " ".join(str(message).split())[:500]
