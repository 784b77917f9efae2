"""An engine whose pace and failures a test decides: the HTTP of ours and of OpenAI's, words that are written here.

Runs in a thread of the test's process, on a free port of loopback. A script says what a model answers; `asked`,
`hung_up` and `torn` tell what reached it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CONTEXT_LENGTH = 1000


@dataclass(frozen=True)
class Script:
    """`pieces` of text, `pause_seconds` before each; then a finish reason, a broken connection or silence."""

    pieces: tuple[str, ...]
    pause_seconds: float = 0.0
    first_pause_seconds: float = 0.0
    thoughts: int = 0  # told before the text, one each 0.1 s
    end: str = "stop"  # or "length"; "break": the connection; "error": an error event; "silence", "pings": for ever
    refuse: int | None = None  # an HTTP status in place of a stream
    waits_for: threading.Event | None = None  # before the first piece

    @classmethod
    def of(cls, text: str, *, size: int = 4, **fields: Any) -> Script:
        return cls(tuple(text[i : i + size] for i in range(0, len(text), size)), **fields)


@dataclass
class FakeEngine:
    """`scripts`: by model, one an answer, the last one for all that follow. A model without one says "Hello"."""

    scripts: dict[str, list[Script]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by source: why it does not load
    loading: set[str] = field(default_factory=set)  # names that stay at half
    context_length: int = CONTEXT_LENGTH
    put_status: int | None = None  # what every PUT is refused with
    put_statuses: dict[str, int] = field(default_factory=dict)  # by source: what its PUT is refused with
    models: dict[str, dict] = field(default_factory=dict)
    asked: list[dict] = field(default_factory=list)
    puts: list[str] = field(default_factory=list)
    answering: Counter[str] = field(default_factory=Counter)  # streams by model
    torn: list[str] = field(default_factory=list)  # models that were taken away while they answered
    hung_up: int = 0

    def __enter__(self) -> FakeEngine:
        self._turns: defaultdict[str, int] = defaultdict(int)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [
            Route("/models", self._list),
            Route("/models/{name}", self._put, methods=["PUT"]),
            Route("/models/{name}", self._delete, methods=["DELETE"]),
            Route("/v1/models", self._list_openai),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/kv", lambda request: JSONResponse({"pages": {"total": 1, "free": 1, "cached": 0, "used": 0}})),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    def say(self, model: str, *scripts: Script | str) -> None:
        self.scripts[model] = [Script.of(each) if isinstance(each, str) else each for each in scripts]
        self._turns[model] = 0

    def add(self, names: Iterable[str]) -> None:
        """Models that are there already, as a remote endpoint's are."""
        self.models |= {name: {"source": "path:/x"} for name in names}

    @property
    def streaming(self) -> int:
        return self.answering.total()

    def _status(self, name: str) -> dict:
        spec = self.models[name]
        reason = self.failures.get(spec["source"])
        loading = name in self.loading
        return {
            "name": name,
            "status": "failed" if reason else "loading" if loading else "ready",
            "reason": reason,
            "done": 50 if loading else 100,
            "total": 100,
            "unit": "bytes",
            "source": spec["source"],
            "context_length": self.context_length,
            "checkpoint_context_length": self.context_length,
            "system_prompt_tokens": len(spec.get("system_prompt", "").split()),
            "architecture": "fake",
            "chat_format": "fake",
        }

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"models": [self._status(name) for name in self.models]})

    async def _put(self, request: Request) -> Response:
        name = request.path_params["name"]
        body = await request.json()
        self.puts.append(name)
        status = self.put_statuses.get(body["source"], self.put_status)
        if status or "refused" in body["source"]:
            return JSONResponse({"error": {"message": "no such checkpoint", "type": "x"}}, status or 422)
        self.models[name] = body
        return JSONResponse(self._status(name), 202)

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self.answering[name]:
            self.torn.append(name)
        known = self.models.pop(name, None)
        return Response(status_code=204 if known else 404)

    async def _list_openai(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _tokenize(self, request: Request) -> Response:
        """A token a word, and the system prompt's."""
        body = await request.json()
        count = sum(len(message["content"].split()) for message in body["messages"])
        count += self._status(body["model"])["system_prompt_tokens"]
        return JSONResponse({"count": count, "max_model_len": self.context_length, "tokens": []})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body | {"authorization": request.headers.get("authorization")})
        name = body["model"]
        scripts = self.scripts.get(name) or [Script.of("Hello")]
        script = scripts[min(self._turns[name], len(scripts) - 1)]
        self._turns[name] += 1
        if script.refuse:
            return JSONResponse({"error": {"message": f"{name} is broken inside"}}, script.refuse)
        return StreamingResponse(self._stream(name, script), media_type="text/event-stream")

    async def _stream(self, name: str, script: Script):
        def event(delta: dict, finish: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            document = {"id": f"{name}-1", "object": "chat.completion.chunk", "model": name, "choices": [choice]}
            return f"data: {json.dumps(document)}\n\n"

        self.answering[name] += 1
        whole = False
        try:
            yield event({"role": "assistant", "content": ""})
            await asyncio.sleep(script.first_pause_seconds)
            while script.waits_for and not script.waits_for.is_set():
                await asyncio.sleep(0.01)
            for _ in range(script.thoughts):
                await asyncio.sleep(0.1)
                yield event({"content": None, "reasoning_content": "hm"})
            for piece in script.pieces:
                await asyncio.sleep(script.pause_seconds)
                yield event({"content": piece})
            if script.end == "break":
                raise ConnectionError("as the script says")
            if script.end == "error":
                yield f"data: {json.dumps({'error': {'message': f'{name} fell over'}})}\n\n"
                return
            if script.end == "silence":
                await asyncio.sleep(3600)
            while script.end == "pings":
                await asyncio.sleep(0.05)
                yield ": ping\n\n"
                yield event({"role": "assistant", "content": ""})
            yield event({}, script.end)
            usage = {"prompt_tokens": 7, "completion_tokens": len(script.pieces), "total_tokens": 7}
            usage["prompt_tokens_details"] = {"cached_tokens": 5}
            yield f"data: {json.dumps({'id': 'x', 'model': name, 'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
            whole = True
        finally:
            self.answering[name] -= 1
            self.hung_up += not whole
