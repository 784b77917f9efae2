"""Carries what a request generates from the engine's thread to the event loop, and merges what is not read in time.

Knows no HTTP and no tokens. One wake-up of the loop serves all requests of a step, when the engine's thread has told
them all; a reader that falls behind finds one event that holds everything since its last look, so a slow one costs no
more memory than its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from engine.sequence import GenerationEvent


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Delivery:
    """All open inboxes of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Inbox, GenerationEvent]] = deque()
        self._woken = False
        self._open: set[Inbox] = set()

    @contextmanager
    def inbox(self, observe: Callable[[GenerationEvent, float], None], choices: int = 1) -> Iterator[Inbox]:
        """`observe` sees every event, with the time at which it came, before the reader does."""
        inbox = Inbox(self, observe, choices)
        self._open.add(inbox)
        try:
            yield inbox
        finally:
            self._open.discard(inbox)

    def fail_all(self, failure: Exception) -> None:
        for inbox in self._open:
            inbox.fail(failure)

    def post(self, inbox: Inbox, event: GenerationEvent) -> None:
        """Called on the engine's thread; never blocks. The loop learns of it with the next `send`."""
        self._posted.append((inbox, event))

    def send(self) -> None:
        """Wakes the loop for all that was posted, from any thread; nothing, where nothing was."""
        if self._posted and not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self._loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._woken = False  # first: what is sent from here on wakes the loop again
        while self._posted:
            inbox, event = self._posted.popleft()
            inbox.put(event)


class Inbox:
    """The events of one request, until each of its choices has ended. Every method but `deliver` belongs to the event
    loop."""

    def __init__(self, delivery: Delivery, observe: Callable[[GenerationEvent, float], None], choices: int = 1) -> None:
        self._delivery = delivery
        self._observe = observe
        self._waiting: dict[int, GenerationEvent] = {}  # by choice, those that came first at the front
        self._failure: Exception | None = None
        self._running = choices
        self._reader: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether the engine is done with the request."""
        return self._running == 0

    @property
    def exhausted(self) -> bool:
        """Whether the reader has got everything."""
        return self.finished and not self._waiting

    def deliver(self, event: GenerationEvent) -> None:
        self._delivery.post(self, event)

    def put(self, event: GenerationEvent) -> None:
        self._observe(event, time.monotonic())
        if event.finish_reason is not None:
            self._running -= 1
        if self.finished:
            self._ended.set()
        earlier = self._waiting.get(event.index)
        self._waiting[event.index] = event if earlier is None else merged(earlier, event)
        self._wake()

    def fail(self, failure: Exception) -> None:
        """Whoever waits for the next event, or comes to, gets `failure` instead."""
        self._failure = failure
        self._ended.set()
        self._wake()

    async def next(self) -> GenerationEvent:
        """What came first: everything of one choice since its last, as one event. Raises what `fail` was given."""
        while not self._waiting and self._failure is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._failure is not None:
            raise self._failure
        return self._waiting.pop(next(iter(self._waiting)))

    async def gather(self, seconds: float) -> None:
        """Lets events come together for so long, where none waits; no longer than until the last, or a failure."""
        if not self._waiting and not self._ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._ended.wait()

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        while not self.exhausted:
            yield await self.next()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merged(earlier: GenerationEvent, later: GenerationEvent) -> GenerationEvent:
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        scores=earlier.scores + later.scores,
        prompt_scores=earlier.prompt_scores or later.prompt_scores,
    )
