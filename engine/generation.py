"""The answer to one request while it is made: what its prompts ask of the engine, and how the events go out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from engine.answer import DONE, Answer
from engine.architectures import Runner
from engine.core import Engine
from engine.delivery import ClientGone, Delivery, Inbox
from engine.errors import DeadlineExceeded, EngineDead, EngineError
from engine.metrics import RequestTimer
from engine.request import Terms
from engine.schema import GenerationRequest
from engine.sequence import GenerationEvent, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ask:
    """What one prompt asks of a model: `n` answers. `runner`: whose tokens these are."""

    model: str
    runner: Runner
    prompt_ids: list[int]
    params: SamplingParams
    terms: Terms


class Generation(Response):
    """The answer to one request, whole or as server-sent events, from its submission to its last byte.

    A request of several prompts is as many of the engine's; the choices of the second come after those of the first.
    """

    def __init__(
        self,
        engine: Engine,
        delivery: Delivery,
        request: GenerationRequest,
        asks: list[Ask],
        answer: Answer,
        timer: RequestTimer,
    ) -> None:
        self.engine, self.delivery, self.request = engine, delivery, request
        self.asks, self.answer, self.timer = asks, answer, timer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = sum(ask.params.n for ask in self.asks)
        with self.delivery.inbox(self.timer.observe, choices) as inbox, self._submitted(inbox):
            watch = asyncio.create_task(watch_connection(receive, inbox))
            try:
                await (self._stream(inbox, send) if self.request.stream else self._whole(inbox, send))
            except ClientGone:
                log.debug("%s: the client has gone", self.answer.id)
            finally:
                watch.cancel()

    @contextmanager
    def _submitted(self, inbox: Inbox) -> Iterator[None]:
        """While it lasts. What has not ended by then is aborted, also if only some of the prompts were taken."""
        taken = []
        try:
            for place, ask in enumerate(self.asks):
                deliver = partial(deliver_behind, inbox, place * ask.params.n) if place else inbox.deliver
                taken.append(self.engine.submit(ask.model, ask.prompt_ids, ask.params, deliver, ask.terms, ask.runner))
            yield
        finally:
            if not inbox.finished:
                with suppress(EngineDead):  # then nothing is left to abort
                    for request_id in taken:
                        self.engine.abort(request_id)

    async def _whole(self, inbox: Inbox, send: Send) -> None:
        events = [raise_failed(event) async for event in inbox]
        scored = self.asks[0].params.logprobs is not None  # then it takes a second where there are many choices
        body = await asyncio.to_thread(self.answer.whole, events) if scored else self.answer.whole(events)
        await self._start(send, b"application/json", (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, inbox: Inbox, send: Send) -> None:
        """The head of the response waits for the first token, so that what fails before it has its own status."""
        started = False
        interval = self.request.stream_options.interval_ms / 1000 if self.request.stream_options else 0
        try:
            async for event in inbox:
                events = self.answer.events(raise_failed(event))
                if not events:
                    continue
                if inbox.exhausted:
                    events += self.answer.end()
                if not started:
                    await self._start(send, b"text/event-stream; charset=utf-8", (b"cache-control", b"no-cache"))
                    started = True
                await send({"type": "http.response.body", "body": events, "more_body": not inbox.exhausted})
                if interval:
                    await inbox.gather(interval)
        except EngineError as error:
            if not started:
                raise
            words = b"data: " + orjson.dumps(error.as_dict()) + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": words})

    async def _start(self, send: Send, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        headers = (b"content-type", content_type), *headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def deliver_behind(inbox: Inbox, choices: int, event: GenerationEvent) -> None:
    """Behind so many choices of the prompts before."""
    inbox.deliver(replace(event, index=choices + event.index))


async def watch_connection(receive: Receive, inbox: Inbox) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.fail(ClientGone())


def raise_failed(event: GenerationEvent) -> GenerationEvent:
    if event.finish_reason == "error":
        raise EngineError(event.error or "the generation failed")
    if event.finish_reason == "deadline":
        raise DeadlineExceeded(event.error, param="deadline_seconds")
    if event.finish_reason == "abort":
        raise EngineDead(event.error or "the generation was stopped by the engine")
    return event
