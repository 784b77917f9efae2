"""The pool of pages, live, for those who watch: one reader of the engine, however many they are, none for none.

    engine ── GET /kv/pages ──> _follow ──> _tick, 20 a second ──> exact  ──> the admin
                                                 └─ Veil, while a battle waits for its vote ──> public ──> visitors

Knows battles only as two questions: how many turns were ever begun, and what text has been shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import orjson

from app.engine_client import EngineClient, EngineError
from app.errors import NotReady
from app.memory import page_frames
from app.memory.page_frames import FIGURES
from app.memory.veil import Shown, Veil, bare
from db.errors import DatabaseError

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
VOTES_SECONDS = 1.0  # between two looks at which battles wait for their vote
NAMES_SECONDS = 1.0  # between two looks at which model has how many pages, for the admin
AGAIN_SECONDS = 1.0  # before an engine that is away is asked again
LINGER_SECONDS = 2.0  # for which the engine is still read when the last viewer has left
PING_SECONDS = 2.0
FIRST_SECONDS = 3.0  # that a snapshot waits for the engine
UNKNOWN: dict[str, Any] = {}  # figures until something is known
AWAY = {"away": True}


class Channel:
    """One picture of the pool, and the message that led to it from the one before. A viewer who is late skips."""

    def __init__(self) -> None:
        self.viewers = 0
        self.version = 0
        self.states: np.ndarray | None = None
        self.figures = UNKNOWN
        self.latest = b""
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, states: np.ndarray | None, figures: dict[str, Any]) -> None:
        """`states` None: the engine is away. Wakes the viewers where something is new."""
        parts = []
        if figures != self.figures:
            parts.append(page_frames.figures_message(figures))
        if states is not None:
            if self.states is None or self.states.shape != states.shape:
                parts.append(page_frames.whole(states))
            elif not np.array_equal(self.states, states):
                parts.append(page_frames.changes(self.states, states))
        self.states, self.figures = states, figures
        if parts:
            self.latest = b"".join(parts)
            self.version += 1
            self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget(self) -> None:
        """Nothing is known any more: what was has been left unwatched."""
        self.states, self.figures = None, UNKNOWN
        self.version += 1

    def everything(self) -> bytes:
        whole = b"" if self.states is None else page_frames.whole(self.states)
        return page_frames.figures_message(self.figures) + whole

    async def read(self) -> AsyncIterator[bytes]:
        """Everything, then what changes; the figures again as a sign of life."""
        version = self.version
        yield self.everything()
        while not self._closed:
            if self.version == version:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    yield page_frames.figures_message(self.figures)
                continue
            is_next, version = self.version == version + 1, self.version
            yield self.latest if is_next else self.everything()


class Memory:
    def __init__(
        self,
        engine: EngineClient,
        *,
        turns_begun: Callable[[], int],
        undecided: Callable[[], Awaitable[int]],
        shown: Callable[[], Shown],
    ):
        """`turns_begun()` rises before a turn asks any model; `undecided()`: battles that may still be voted on."""
        self._engine = engine
        self._turns_begun = turns_begun
        self._undecided = undecided
        self._shown = shown
        self.exact, self.public = Channel(), Channel()
        self._states: np.ndarray | None = None  # as the engine has them
        self._figures: dict[str, Any] | None = None
        self._is_away = False
        self._names: dict[str, Any] = {}
        self._fresh = False  # something is new since the last tick
        self._decided_at: int | None = None  # turns begun when all battles had their vote; -1: not all; None: unknown
        self._look = asyncio.Event()
        self._seen: tuple[np.ndarray, dict[str, Any]] | None = None  # what visitors last saw as it was
        self._veil: Veil | None = None
        self._tasks: list[asyncio.Task] = []
        self._stopping: asyncio.TimerHandle | None = None

    # Viewers

    async def watch(self, *, exact: bool) -> AsyncIterator[bytes]:
        """Messages of `page_frames` for one viewer, until he or the website ends. `exact`: for the admin alone."""
        channel = self.exact if exact else self.public
        with self._joined(channel):
            async with contextlib.aclosing(channel.read()) as messages:  # ends at once when the viewer does
                async for message in messages:
                    yield message

    async def snapshot(self, *, exact: bool) -> dict[str, Any]:
        """The figures of now. Raises NotReady where the engine does not answer."""
        channel = self.exact if exact else self.public
        with self._joined(channel), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS), contextlib.aclosing(channel.read()) as messages:
                async for _ in messages:
                    if "total" in channel.figures:
                        return channel.figures
        raise NotReady("The engine does not answer just now, so nothing is known of its memory.", retry_after_seconds=2)

    @contextlib.contextmanager
    def _joined(self, channel: Channel) -> Iterator[None]:
        if not channel.viewers:
            channel.forget()
            self._fresh = True
            self._look.set()
        channel.viewers += 1
        if self._stopping:
            self._stopping.cancel()
        if not self._tasks:
            work = (self._follow, self._look_at_votes, self._look_at_names, self._tick_along)
            self._tasks = [asyncio.create_task(each(), name=f"memory {each.__name__}") for each in work]
        try:
            yield
        finally:
            channel.viewers -= 1
            if not self.exact.viewers + self.public.viewers:
                loop = asyncio.get_running_loop()
                self._stopping = loop.call_later(LINGER_SECONDS, self._stop)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._lose(is_away=False)
        self._decided_at = None

    async def close(self) -> None:
        """Ends all viewers."""
        self.exact.close()
        self.public.close()
        tasks = self._tasks
        self._stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What the engine says

    async def _follow(self) -> None:
        while True:
            try:
                async for kind, payload in self._engine.page_frames():
                    self._take(kind, payload)
            except (EngineError, ValueError, zlib.error) as error:
                log.info("the pool cannot be watched", extra={"reason": str(error)})
            self._lose(is_away=True)
            await asyncio.sleep(AGAIN_SECONDS)

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == FIGURES:
            self._figures = orjson.loads(payload)
        else:
            self._states = page_frames.applied(self._states, kind, payload)
        self._is_away = False
        self._fresh = True

    def _lose(self, *, is_away: bool) -> None:
        self._is_away = is_away
        self._states = self._figures = None
        self._names = {}
        self._fresh = True

    async def _look_at_names(self) -> None:
        while True:
            if self.exact.viewers:
                with contextlib.suppress(EngineError, KeyError):
                    models = (await self._engine.kv())["models"]
                    wanted = ("running", "waiting", "tokens", "pages_used", "pages_pinned")
                    self._names = {name: {key: model[key] for key in wanted} for name, model in models.items()}
                    self._fresh = True
            await asyncio.sleep(NAMES_SECONDS)

    # Blindness

    async def _look_at_votes(self) -> None:
        while True:
            self._look.clear()
            if self.public.viewers:
                begun = self._turns_begun()
                try:
                    self._decided_at = -1 if await self._undecided() else begun
                except DatabaseError as error:
                    self._decided_at = -1
                    log.info("which battles wait for a vote is unknown", extra={"reason": str(error)})
            else:
                self._decided_at = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), VOTES_SECONDS)

    @property
    def is_blind(self) -> bool:
        """Whether a battle may wait for its vote: unless a look since the last turn began found none."""
        return self._decided_at != self._turns_begun()

    # Twenty times a second

    async def _tick_along(self) -> None:
        while True:
            try:
                self._tick()
            except Exception:  # of our own fault: the next picture may be right again
                log.exception("the pool could not be drawn")
                await asyncio.sleep(AGAIN_SECONDS)
            await asyncio.sleep(TICK_SECONDS)

    def _tick(self) -> None:
        fresh, self._fresh = self._fresh, False
        if self._states is None or self._figures is None:
            if self._is_away:
                self.exact.put(None, AWAY)
                self.public.put(None, AWAY)
            return
        if fresh and self.exact.viewers:
            self.exact.put(self._states.copy(), {**self._figures, "models": self._names})
        if not self.public.viewers or self._decided_at is None:
            self._fresh = self._fresh or (fresh and self.public.viewers > 0)
            return
        if self.is_blind:
            self._veil = self._veil_over(self._states, self._figures)
            self.public.put(*self._veil.draw(self._shown()))
        elif fresh or self._veil:
            self._veil = None
            self._seen = self._states.copy(), self._figures
            self.public.put(*self._seen)

    def _veil_over(self, states: np.ndarray, figures: dict[str, Any]) -> Veil:
        """The one that is there, or a new one over what visitors last saw."""
        if self._veil and self._veil.fits(states, figures):
            return self._veil
        if self._seen and self._seen[0].shape == states.shape and self._seen[1]["total"] == figures["total"]:
            return Veil(*self._seen)
        return Veil(*bare(states, figures))
