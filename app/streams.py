"""One turn, live: two answers arrive at their own speeds and are shown at one pace, to whoever reads along.

    engine A -> _hear ──> Side a ─┐                              ┌─> reader
    engine B -> _hear ──> Side b ─┴─> one tick, both sides ─> EventLog ─> reader

Knows no database and no model: it is given two sources of text and a function that saves how the turn ended. No event
tells more than the text shown so far: no counts, no names, and no speed, as both sides are shown at the pace of the
slower and begin together. With nobody reading, the turn is interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import orjson

from app.engine_client import Delta, EngineError
from app.errors import SIDE_FAILED
from app.markdown import Block, GrowingMarkdown

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1  # at most one event a side in each; the first comes as soon as both sides have a word
END_SECONDS = 0.4  # from the end of the shorter answer to when the longer one goes on: see Lockstep
# A side is told to have ended once the other has gone on that far, or has ended too: an engine says that it is done
# some time after its last word, and how long after would tell the fast one from the slow one.
END_LEEWAY_CHARACTERS = 100
PING_SECONDS = 0.5  # between signs of life of a stream that has nothing to say: a dead reader shows by its silence
PERCEIVED_SECONDS = 1.0  # a pace of less than this is none that anybody could compare with
RETRY_MILLISECONDS = 300  # what a browser waits before it connects again
NEVER_SHOWN = {ord("\r"): None, 0xFFFD: None}  # U+FFFD: bytes of no character, which hot sampling makes up
SIDE_MESSAGES = {"failed": SIDE_FAILED}


@dataclass(frozen=True)
class Outcome:
    """How one side's answer ended, as it is saved. `text` is what was shown, or of a failed side what had come."""

    state: str
    text: str
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_ms: float | None = None
    duration_ms: float | None = None


Source = Callable[[], AsyncGenerator[Delta, None]]
Save = Callable[[Mapping[str, Outcome]], Awaitable[str]]


@dataclass(frozen=True)
class Pace:
    characters_per_second: float
    lag_seconds: float


class EventLog:
    """The newest event of each kind, with ids that rise. A slow or late reader skips what was overwritten meanwhile.

    So its size is that of the answers, however long they took, and nothing waits for a reader.
    """

    def __init__(self, first_id: int):
        self._next_id = first_id
        self._events: dict[tuple, tuple[int, bytes]] = {}  # in the order of their ids
        self._changed = asyncio.Event()
        self.closed = False

    @property
    def last_id(self) -> int:
        return self._next_id - 1

    def put(self, key: tuple, name: str, data: Mapping) -> None:
        """`key` is what the event replaces."""
        self._events.pop(key, None)
        self._events[key] = (self._next_id, encode_event(self._next_id, name, data))
        self._next_id += 1
        self._wake()

    def close(self) -> None:
        """No event follows; readers end after the last one."""
        self.closed = True
        self._wake()

    def after(self, event_id: int) -> bytes:
        """All events with higher ids, in order."""
        found = []
        for number, event in reversed(self._events.values()):
            if number <= event_id:
                break
            found.append(event)
        return b"".join(reversed(found))

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Events after that id as they come, and a comment where for a while there are none; ends when closed."""
        while True:
            changed = self._changed
            if events := self.after(after):
                after = self.last_id
                yield events
            elif self.closed:
                return
            else:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield b": ping\n\n"

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def encode_event(event_id: int, name: str, data: Mapping) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event_id, name.encode(), orjson.dumps(data))


def block_event(turn: int, side: str, block: Block) -> dict:
    return {"turn": turn, "side": side, "block": block.number, "html": block.html, "final": block.final}


def side_event(turn: int, side: str, state: str) -> dict:
    return {"turn": turn, "side": side, "state": state, "message": SIDE_MESSAGES.get(state)}


def state_event(turn: int, state: str) -> dict:
    return {"state": state, "turn": turn}


class Audience:
    """Who reads a turn, and when anybody last did. A reader is a function that says how long it has been silent."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._silences: set[Callable[[], float]] = set()
        self._seen = clock()

    @contextlib.contextmanager
    def joined(self, silence_seconds: Callable[[], float]):
        self._silences.add(silence_seconds)
        try:
            yield
        finally:
            self._silences.discard(silence_seconds)
            self._note(self._clock() - silence_seconds())

    def touch(self) -> None:
        """Somebody asked for the battle in another way."""
        self._note(self._clock())

    def absent_seconds(self) -> float:
        now = self._clock()
        for silence_seconds in self._silences:
            self._note(now - silence_seconds())
        return now - self._seen

    def _note(self, moment: float) -> None:
        self._seen = max(self._seen, moment)


class Lockstep:
    """How many characters of both answers may be shown: one number for both sides.

    It follows the shorter of the texts that are not yet shown to their end, at most at `pace`. Once a side has been
    shown to its end the other goes on no faster than before, lest its speed betray it, unless it would lag behind for
    longer than `lag_seconds`; and not at once, but END_SECONDS later. A fast engine says with its last word that it is
    done, a slow one some time after it, and what of a slow one comes meanwhile lets it go on as evenly as a fast one.
    """

    def __init__(self, pace: Pace):
        self._pace = pace
        self._position = 0.0
        self._shown_seconds = 0.0
        self._alone_rate = 0.0  # of the side that goes on when the other has ended
        self._now: float | None = None
        self._reached: dict[str, tuple[int, float]] = {}  # by side: the last length that was all shown, and when

    def advance(self, now: float, arrived: Mapping[str, int], ended: Mapping[str, bool]) -> int:
        """`arrived`: characters by side; `ended`: whether no more will come."""
        elapsed = 0.0 if self._now is None else now - self._now
        if self._position == 0:
            elapsed = max(elapsed, TICK_SECONDS)  # the first words need not wait for their letters to be counted out
        self._now = now
        for side, length in arrived.items():
            if length <= self._position and self._reached.get(side, (-1, 0))[0] != length:
                self._reached[side] = length, now
        limit = min((arrived[side] for side in arrived if not self._is_shown(side, arrived, ended)), default=0)
        if limit > 0:
            self._shown_seconds += elapsed
            self._position = min(self._position + self._rate(arrived, ended, limit) * elapsed, limit)
        return int(self._position)

    def _is_shown(self, side: str, arrived: Mapping[str, int], ended: Mapping[str, bool]) -> bool:
        length, since = self._reached.get(side, (-1, 0.0))
        return ended[side] and length == arrived[side] and self._now - since >= END_SECONDS

    def _rate(self, arrived: Mapping[str, int], ended: Mapping[str, bool], limit: int) -> float:
        fastest = self._pace.characters_per_second
        if not any(self._is_shown(side, arrived, ended) for side in arrived) or self._position == 0:
            return fastest
        together = self._shown_seconds > PERCEIVED_SECONDS
        as_before = self._position / self._shown_seconds if together else fastest
        in_time = (limit - self._position) / max(self._pace.lag_seconds, 1e-9)
        self._alone_rate = max(self._alone_rate or as_before, in_time)
        return min(fastest, self._alone_rate)


@dataclass
class Side:
    """What has arrived of one answer and how much of it is shown."""

    name: str
    text: str = ""
    shown: int = 0
    state: str = "streaming"
    announced: bool = False
    delta: Delta = field(default_factory=Delta)  # the last one: how it finished, and its counts
    error: str | None = None
    first_token_ms: float | None = None
    duration_ms: float | None = None
    _markdown: GrowingMarkdown = field(default_factory=GrowingMarkdown)
    _unsent: dict[int, Block] = field(default_factory=dict)
    _finished: bool = False

    @property
    def ended(self) -> bool:
        return self.state != "streaming"

    @property
    def all_shown(self) -> bool:
        return self.shown == len(self.text)

    def end(self, state: str) -> None:
        """No more text comes. What was not shown by then is not part of a stopped or interrupted answer."""
        if self.state == "failed" or (self.ended and self.all_shown):
            return
        if state in ("stopped", "interrupted"):
            self.text = self.text[: self.shown]
        self.state = state

    def show(self, position: int, *, tell_end: bool = True) -> None:
        """Brings the shown text up to that many characters; without `tell_end` its end is not let on yet."""
        if self.state == "failed" or self._finished:
            return
        new = self.text[self.shown : position]
        self.shown += len(new)
        changed = self._markdown.push(new) if new else []
        if self.ended and self.all_shown and tell_end:
            changed += self._markdown.finish()
            self._finished = True
        self._unsent |= {block.number: block for block in changed}

    def next_event(self, turn: int) -> tuple[tuple, str, dict] | None:
        """The one thing to say now, if there is one: a block, or when all are said, how the side ended."""
        if self.state != "failed" and self._unsent:
            block = self._unsent.pop(min(self._unsent))
            return ("block", self.name, block.number), "block", block_event(turn, self.name, block)
        if (self.state == "failed" or self._finished) and not self.announced:
            self.announced = True
            return ("end", self.name), "side", side_event(turn, self.name, self.state)
        return None

    def outcome(self) -> Outcome:
        return Outcome(
            state=self.state,
            text=self.text,
            finish_reason=self.delta.finish_reason,
            error=self.error,
            prompt_tokens=self.delta.prompt_tokens,
            completion_tokens=self.delta.completion_tokens,
            cached_tokens=self.delta.cached_tokens,
            first_token_ms=self.first_token_ms,
            duration_ms=self.duration_ms,
        )


class TurnStream:
    """A turn from its question to the moment its answers are saved."""

    def __init__(
        self,
        *,
        turn: int,
        sources: Mapping[str, Source],
        save: Save,
        first_event_id: int,
        pace: Pace,
        grace_seconds: float,
        longest_answer_characters: int,
        clock: Callable[[], float],
    ):
        self.turn = turn
        self._sources = sources
        self._save = save
        self._grace_seconds = grace_seconds
        self._longest = longest_answer_characters
        self._clock = clock
        self._sides = {name: Side(name) for name in sources}
        self._lockstep = Lockstep(pace)
        self._cut: str | None = None
        self._can_begin = asyncio.Event()  # both sides have a first word, or have ended
        self.audience = Audience(clock)
        self.log = EventLog(first_event_id)
        self.blocks: dict[str, dict[int, str]] = {name: {} for name in sources}  # as the log has told them
        self.log.put(("state",), "state", state_event(turn, "streaming"))
        for name in sources:
            self.log.put(("begin", name), "side", side_event(turn, name, "streaming"))

    def stop(self) -> None:
        """Ends both sides; what is shown stays."""
        self._cut = self._cut or "stopped"

    def interrupt(self) -> None:
        self._cut = self._cut or "interrupted"

    def shown_bytes(self) -> dict[str, int]:
        """By side, of its answer as far as its readers have been shown it."""
        return {name: len(side.text[: side.shown].encode()) for name, side in self._sides.items()}

    def side_state(self, name: str) -> str:
        """As the readers know it."""
        side = self._sides[name]
        return side.state if side.announced else "streaming"

    async def run(self) -> None:
        """Streams, saves once, tells how the turn ended. To end it early call `stop` or `interrupt`."""
        hearing = [asyncio.create_task(self._hear(side)) for side in self._sides.values()]
        try:
            while not all(side.announced for side in self._sides.values()):
                await self._next_tick()
                self._cut_if_unread()
                self._tick()
                if self._cut:
                    await _cancel(hearing)
        finally:
            await _cancel(hearing)
        state = await self._save({name: side.outcome() for name, side in self._sides.items()})
        self.log.put(("state",), "state", state_event(self.turn, state))
        self.log.close()

    async def _next_tick(self) -> None:
        """In a tenth of a second, or at once when there is a first word to show on both sides."""
        if self._can_begin.is_set():
            return await asyncio.sleep(TICK_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS):
                await self._can_begin.wait()

    def _begin_if_possible(self) -> None:
        if all(side.text or side.ended for side in self._sides.values()):
            self._can_begin.set()

    def _cut_if_unread(self) -> None:
        if self._cut is None and self.audience.absent_seconds() >= self._grace_seconds:
            self.interrupt()
        if self._cut:
            for side in self._sides.values():
                side.end(self._cut)

    def _tick(self) -> None:
        alive = {name: side for name, side in self._sides.items() if side.state != "failed"}
        position = self._lockstep.advance(
            self._clock(),
            {name: len(side.text) for name, side in alive.items()},
            {name: side.ended for name, side in alive.items()},
        )
        whole = all(side.ended and len(side.text) <= position for side in alive.values())
        for name, side in self._sides.items():
            side.show(position, tell_end=whole or position >= len(side.text) + END_LEEWAY_CHARACTERS)
            if event := side.next_event(self.turn):
                key, kind, data = event
                if kind == "block":
                    self.blocks[name][data["block"]] = data["html"]
                self.log.put(key, kind, data)

    async def _hear(self, side: Side) -> None:
        """Takes in one answer to its end. An answer without a word is a failure too: nobody could vote on it."""
        began = self._clock()
        try:
            async with contextlib.aclosing(self._sources[side.name]()) as deltas:
                async for side.delta in deltas:
                    if side.ended:
                        return
                    if side.delta.text and side.first_token_ms is None:
                        side.first_token_ms = (self._clock() - began) * 1000
                    side.text += side.delta.text.translate(NEVER_SHOWN)
                    if not self._can_begin.is_set():
                        self._begin_if_possible()
                    if len(side.text) > self._longest:
                        side.text = side.text[: self._longest]
                        side.delta = Delta(finish_reason="length")
                        break
            if not side.text.strip():
                side.error = "the answer was empty"
        except EngineError as error:
            side.error = f"{type(error).__name__}: {error}"
        except Exception as error:
            log.exception("a side failed by our own fault", extra={"side": side.name})
            side.error = f"{type(error).__name__}: {error}"
        side.duration_ms = (self._clock() - began) * 1000
        side.end("failed" if side.error else "done")
        self._begin_if_possible()


async def _cancel(tasks: list[asyncio.Task]) -> None:
    """Ends them and waits: their connections are closed when this returns."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
