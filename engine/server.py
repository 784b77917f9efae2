"""The engine over HTTP: OpenAI's API, models, pages, metrics. Knows requests and connections, no pages and no weights.

A request's way: `Gate` (key, size) -> schema (every parameter honoured or refused) -> tokens, off the event loop where
there are many -> `Generation`: `Engine.submit` -> its `Inbox` -> one write a step. A client that goes away, whatever
state its request is in, ends the request and frees its pages.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

import kernels
from engine.answer import CHAT, TEXT, Answer, Dialect, Echo, echo_of
from engine.architectures import Runner
from engine.chat import ChatFormat
from engine.config import EngineConfig
from engine.core import Engine
from engine.delivery import Delivery
from engine.errors import EngineDead, EngineError, InvalidParameter, ModelNotFound
from engine.gate import Gate
from engine.generation import Ask, Generation
from engine.grammar import Grammar, Grammars
from engine.metrics import Metrics
from engine.models import ModelSpec, ModelStatus
from engine.page_frames import page_frames
from engine.request import Terms
from engine.responses import described, json_response, model_response, on_error
from engine.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ModelRequest,
    TokenizeRequest,
    check_tokens,
    sampling_params,
)
from engine.sequence import SamplingParams
from engine.vocabulary import Spelling, Vocabulary

log = logging.getLogger(__name__)
INLINE_CHARACTERS = 4096  # a text up to this is tokenised on the event loop: about a millisecond
CHARACTERS_A_MESSAGE, CHARACTERS_A_TOKEN = 64, 8  # that take about as long: a message without a word, a look at a token
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
T = TypeVar("T")
JSON, EVENTS, TEXT_LINES, BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"


class JsonRequest(Request):
    """Reads bodies strictly: no NaN, no half of a surrogate pair."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_strictly


class EngineServer:
    """The routes, and what they share: the engine, the delivery of its events, metrics, two threads for long texts."""

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self.engine, self.config = engine, config
        self.metrics = Metrics(engine.load, engine.kv)
        self.tokenising = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
        self.started = int(time.time())
        self._grammars: WeakKeyDictionary[Runner, Grammars] = WeakKeyDictionary()
        self._vocabularies: WeakKeyDictionary[Runner, Vocabulary] = WeakKeyDictionary()
        self.delivery: Delivery
        self.closing = False  # ends the streams that have no end of their own

    def app(self) -> FastAPI:
        app = FastAPI(title="Paged Arena engine", docs_url=None, redoc_url=None, lifespan=self._lifespan)
        app.router.route_class = JsonRoute
        app.add_middleware(Gate, config=self.config)
        for error in (EngineError, RequestValidationError, HTTPException, Exception):
            app.add_exception_handler(error, on_error)
        for method, path, route, answers in (
            ("POST", "/v1/chat/completions", self.chat, {200: (JSON, EVENTS)}),
            ("POST", "/v1/completions", self.complete, {200: (JSON, EVENTS)}),
            ("GET", "/v1/models", self.list_ready, {200: (JSON,)}),
            ("GET", "/v1/models/{name:path}", self.get_ready, {200: (JSON,)}),
            ("POST", "/tokenize", self.tokenize, {200: (JSON,)}),
            ("POST", "/detokenize", self.detokenize, {200: (JSON,)}),
            ("GET", "/models", self.list_models, {200: (JSON,)}),
            ("PUT", "/models/{name:path}", self.put_model, {200: (JSON,), 202: (JSON,)}),
            ("DELETE", "/models/{name:path}", self.delete_model, {204: ()}),
            ("POST", "/models/{name:path}/sleep", self.sleep_model, {200: (JSON,), 202: (JSON,)}),
            ("POST", "/models/{name:path}/wake", self.wake_model, {200: (JSON,), 202: (JSON,)}),
            ("GET", "/health", self.health, {200: (JSON,), 503: (JSON,)}),
            ("GET", "/version", self.show_version, {200: (JSON,)}),
            ("GET", "/load", self.load, {200: (JSON,)}),
            ("GET", "/metrics", self.show_metrics, {200: (TEXT_LINES,)}),
            ("GET", "/kv", self.kv, {200: (JSON,)}),
            ("GET", "/kv/pages", self.kv_pages, {200: (BYTES,)}),
        ):
            app.add_api_route(
                path,
                route,
                methods=[method],
                response_model=None,
                response_class=Response,
                status_code=min(answers),
                responses=described(answers),
            )
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI):
        self.delivery = Delivery(asyncio.get_running_loop())
        self.engine.start(self.delivery.send)
        yield
        await asyncio.to_thread(self.engine.close)
        self.tokenising.shutdown(wait=False, cancel_futures=True)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        runner, spec = self._served(body.model)
        timer = self.metrics.timer(spec.name, body.n or 1)
        chat = runner.chat_format(spec.chat_template)
        prompt_ids = body.read(await self._encode_chat(chat, spec, body))
        params = self._params(body, runner, spec, prompt_ids, max_tokens=None, stop=chat.stop)
        asks = [Ask(spec.name, runner, prompt_ids, params, await self._terms(runner, body))]
        answer = self._answer(CHAT, body, request, asks)
        return Generation(self.engine, self.delivery, body, asks, answer, timer)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        runner, spec = self._served(body.model)
        timer = self.metrics.timer(spec.name, body.n or 1)
        whole = await self._encode_prompts(runner, body)
        prompts = [body.read(tokens) for tokens in whole]
        params = [self._params(body, runner, spec, prompt, max_tokens=COMPLETION_TOKENS) for prompt in prompts]
        terms = await self._terms(runner, body)
        asks = [Ask(spec.name, runner, *each, terms) for each in zip(prompts, params, strict=True)]
        echoes = await self._echoes(runner, body, whole, prompts) if body.echo else ()
        answer = self._answer(TEXT, body, request, asks, echoes)
        return Generation(self.engine, self.delivery, body, asks, answer, timer)

    def _served(self, model: str | None) -> tuple[Runner, ModelSpec]:
        """The one that a request names. It may leave that out where there is only one."""
        if model is None:
            names = [status.name for status in self.engine.models()]
            if len(names) != 1:
                raise InvalidParameter("model", f"model is required: there are {len(names)}, see GET /v1/models")
            (model,) = names
        return self.engine.runner_of(model)

    async def _echoes(
        self, runner: Runner, body: CompletionRequest, whole: list[list[int]], prompts: list[list[int]]
    ) -> list[Echo]:
        """Of the prompts as far as they are read: their own text where that is all."""
        vocabulary = self._vocabulary(runner)

        def echoes() -> list[Echo]:
            texts = [
                said if isinstance(said, str) and len(read) == len(tokens) else None
                for said, tokens, read in zip(body.prompts, whole, prompts, strict=True)
            ]
            return [echo_of(read, vocabulary, text) for read, text in zip(prompts, texts, strict=True)]

        return await self._tokenised(echoes, characters=CHARACTERS_A_TOKEN * sum(map(len, prompts)))

    def _params(
        self, body: GenerationRequest, runner: Runner, spec: ModelSpec, prompt_ids: list[int], **options: Any
    ) -> SamplingParams:
        """`params_for`, within what this very prompt and its answer can reach."""
        scored = bool(body.scores_asked.get("prompt_logprobs"))
        longest = self.engine.longest(spec.name, prompt_ids, salt=body.cache_salt or "", scored=scored)
        return params_for(body, runner, replace(spec, context_length=longest), prompt_ids, **options)

    def _answer(
        self, dialect: Dialect, body: GenerationRequest, request: Request, asks: list[Ask], echoes: Sequence[Echo] = ()
    ) -> Answer:
        ask, spelling = asks[0], None
        if ask.params.logprobs is not None:
            special = not ask.params.skip_special_tokens
            spelling = Spelling(self._vocabulary(ask.runner), bool(body.return_tokens_as_token_ids), special)
        return Answer(
            dialect,
            ask.model,
            request.state.request_id,
            usage=body.stream_options,
            spelling=spelling,
            echoes=echoes,
            choices=ask.params.n,
        )

    def _vocabulary(self, runner: Runner) -> Vocabulary:
        """Made once a checkpoint, and gone with it."""
        if runner not in self._vocabularies:
            self._vocabularies[runner] = Vocabulary(runner.tokenizer)
        return self._vocabularies[runner]

    async def _terms(self, runner: Runner, body: GenerationRequest) -> Terms:
        grammar = await self._grammar(runner, body)
        beams = body.beams if isinstance(body, CompletionRequest) else None
        return Terms(body.user or "", body.priority or 0, body.deadline_seconds, grammar, beams, body.cache_salt or "")

    async def _grammar(self, runner: Runner, body: GenerationRequest) -> Grammar | None:
        """What the answer is held to, compiled off the event loop: it can take a while. Raises InvalidParameter."""
        if (asked := body.grammar_asked()) is None:
            return None

        def compile() -> Grammar:
            if runner not in self._grammars:
                self._grammars[runner] = Grammars(runner.tokenizer, runner.vocab_size, runner.eos_token_ids)
            return self._grammars[runner].compile(*asked)

        return await asyncio.get_running_loop().run_in_executor(self.tokenising, compile)

    async def tokenize(self, body: TokenizeRequest) -> Response:
        runner, spec = self._served(body.model)
        if body.prompt is not None:
            (tokens,) = await self._encode_texts(runner, [body.prompt], special=body.add_special_tokens is not False)
        else:
            tokens = await self._encode_chat(runner.chat_format(spec.chat_template), spec, body)
        written = await self._written(runner, tokens) if body.return_token_strs else None
        counts = {"count": len(tokens), "max_model_len": spec.context_length}
        return json_response({**counts, "tokens": tokens, "token_strs": written})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        runner, _ = self._served(body.model)

        def decode() -> str:
            tokens = check_tokens("tokens", body.tokens, runner.vocab_size)
            return runner.tokenizer.decode(tokens, skip_special_tokens=False)

        text = await self._tokenised(decode, characters=CHARACTERS_A_TOKEN * len(body.tokens))
        return json_response({"prompt": text})

    async def list_ready(self) -> Response:
        ready = [self._listed(status) for status in self.engine.models() if status.status == "ready"]
        return json_response({"object": "list", "data": ready})

    async def get_ready(self, name: str) -> Response:
        found = next((status for status in self.engine.models() if status.name == name), None)
        if found is None or found.status != "ready":
            raise ModelNotFound(name, "ready " if found else "")
        return json_response(self._listed(found))

    def _listed(self, status: ModelStatus) -> dict[str, Any]:
        return {
            "id": status.name,
            "object": "model",
            "created": self.started,
            "owned_by": "paged-arena",
            "max_model_len": status.context_length,
        }

    async def list_models(self) -> Response:
        return json_response({"models": [asdict(status) for status in self.engine.models()]})

    async def put_model(self, name: str, body: ModelRequest) -> Response:
        if not 0 < len(name) <= 200 or not name.isprintable():
            raise InvalidParameter("name", "a model's name is 1 to 200 printable characters")
        spec = ModelSpec(
            name=name,
            source=body.source,
            system_prompt=body.system_prompt,
            sampling=body.sampling.model_dump(exclude_none=True),
            chat_template=body.chat_template,
            context_length=body.context_length,
            precision=body.precision,
            adapter=body.adapter,
            kv_share=body.kv_share,
        )
        return model_response(await asyncio.to_thread(self.engine.put_model, spec))

    async def sleep_model(self, name: str) -> Response:
        return model_response(await asyncio.to_thread(self.engine.sleep_model, name))

    async def wake_model(self, name: str) -> Response:
        return model_response(await asyncio.to_thread(self.engine.wake_model, name))

    async def delete_model(self, name: str) -> Response:
        await asyncio.to_thread(self.engine.delete_model, name)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def health(self) -> Response:
        models = {status.name: status.status for status in self.engine.models()}
        failure = self.engine.failure
        state = {
            "status": "dead" if failure else "ok",
            "engine_thread": failure or "alive",
            "step_seconds": round(self.engine.step_seconds, 3),
            "models": models,
        }
        return json_response(state, HTTPStatus.SERVICE_UNAVAILABLE if failure else HTTPStatus.OK)

    async def show_version(self) -> Response:
        return json_response({"version": version("paged-arena")})

    async def load(self) -> Response:
        """`server_load`, as vLLM counts it: the requests that are being worked on or wait."""
        load = self.engine.load()
        return json_response({"server_load": load["running"] + load["waiting"], **load})

    async def show_metrics(self) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def kv(self) -> Response:
        return json_response(await asyncio.to_thread(self.engine.kv))

    async def kv_pages(self) -> Response:
        """The page map, live; ends when its reader does."""
        frames = page_frames(self.engine, is_over=lambda: self.closing)
        return StreamingResponse(frames, media_type="application/octet-stream")

    async def _encode_chat(self, chat: ChatFormat, spec: ModelSpec, body: ChatRequest | TokenizeRequest) -> list[int]:
        messages = [message.as_dict() for message in body.messages]
        if spec.system_prompt and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": spec.system_prompt}, *messages]
        encode = partial(chat.encode, messages, **body.rendering, add_special_tokens=bool(body.add_special_tokens))
        characters = sum(len(message["content"]) + CHARACTERS_A_MESSAGE for message in messages)
        return await self._tokenised(encode, characters=characters)

    async def _encode_prompts(self, runner: Runner, body: CompletionRequest) -> list[list[int]]:
        if isinstance(body.prompts[0], list):

            def check() -> list[list[int]]:
                return [list(check_tokens("prompt", prompt, runner.vocab_size)) for prompt in body.prompts]

            return await self._tokenised(check, characters=CHARACTERS_A_TOKEN * sum(map(len, body.prompts)))
        return await self._encode_texts(runner, body.prompts, special=body.add_special_tokens is not False)

    async def _encode_texts(self, runner: Runner, texts: list[str], *, special: bool) -> list[list[int]]:
        """`special`: with the checkpoint's own first token, one of it. Control tokens in a text count, as in a
        template."""

        def encode() -> list[list[int]]:
            encoded = runner.tokenizer.encode_batch_fast(texts, add_special_tokens=special)  # lets other threads run
            return [one_first_token(each.ids, runner) if special else each.ids for each in encoded]

        return await self._tokenised(encode, characters=sum(map(len, texts)))

    async def _written(self, runner: Runner, tokens: list[int]) -> list[str | None]:
        """How the vocabulary writes each."""
        write = partial(list, map(runner.tokenizer.id_to_token, tokens))
        return await self._tokenised(write, characters=CHARACTERS_A_TOKEN * len(tokens))

    async def _tokenised(self, work: Callable[[], T], *, characters: int) -> T:
        """What is as much work as so many characters are to a tokenizer; off the event loop where they are many."""
        if characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.tokenising, work)


def one_first_token(tokens: list[int], runner: Runner) -> list[int]:
    """Without the second, where a text or template begins with the one that the tokenizer adds."""
    return tokens[1:] if tokens[:2] == [runner.bos_token_id] * 2 else tokens


def params_for(
    body: GenerationRequest,
    runner: Runner,
    spec: ModelSpec,
    prompt_ids: list[int],
    *,
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
) -> SamplingParams:
    """`stop`: what ends an answer in the model's chat format, beside what the request says."""
    if not prompt_ids:
        raise InvalidParameter(body.text_param, f"{body.text_param}: there is nothing to answer")
    params = sampling_params(
        body,
        spec.sampling,
        model=spec.name,
        prompt_tokens=len(prompt_ids),
        context_length=spec.context_length,
        vocab_size=runner.vocab_size,
        max_tokens=max_tokens,
    )
    return replace(params, stop=params.stop + stop)


class HttpServer(uvicorn.Server):
    """uvicorn, but: says on stdout when it listens, ends open answers at a signal, ends when the engine thread has."""

    def __init__(self, server: EngineServer, address: str) -> None:
        super().__init__(
            uvicorn.Config(
                server.app(),
                loop="auto",  # uvloop, which the engine's thread wakes without letting go of the interpreter
                http="h11",  # bounds the head of a request; httptools would read on, and lose bodies that offer h2c
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.engine_server, self.address = server, address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(json.dumps({"ready": True, "url": self.address}), flush=True)

    async def on_tick(self, counter: int) -> bool:
        if self.engine_server.engine.failure:
            log.critical("the engine thread has ended: %s", self.engine_server.engine.failure)
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine_server.closing = True
        why = self.engine_server.engine.failure or "the engine is shutting down"
        self.engine_server.delivery.fail_all(EngineDead(why))
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self):
        """As uvicorn's, but a signal that was obeyed is not raised again afterwards."""
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def serve(config: EngineConfig) -> int:
    """Runs the engine until a signal or the end of its thread; the exit status. Raises ConfigError, OSError."""
    listener = listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    backend = kernels.load(config.backend, config.threads or None, cache_folder=config.cache_folder)
    engine = Engine(config, backend)
    server = HttpServer(EngineServer(engine, config), f"http://{f'[{host}]' if ':' in host else host}:{port}")
    server.run(sockets=[listener])
    return 1 if engine.failure else 0


def listen(host: str, port: int) -> socket.socket:
    """Connections wait in the backlog while the engine starts. A client that vanished is noticed within a minute."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):  # Linux; accepted sockets inherit them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
    return listener
