"""The pool for those who watch: one reader of the engine for all, none for none, and a veil that tells no pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from app.engine_client import EngineUnreachable
from app.errors import NotReady
from app.memory import page_frames
from app.memory.page_frames import CACHED, CHANGES, FIGURES, FREE, PINNED, PINNED_IN_USE, SHARED, USED, WHOLE
from app.memory.veil import ShownText, Veil, bare
from app.memory.watch import Memory
from engine import page_frames as engine_frames

MEAN = {
    "pages_per_slot": 2.5, "context_length": 8192.0, "system_tokens": 40.0, "prompt_tokens": 60.0,
    "answer_tokens": 100.0, "slots": {"paged": 128, "max": 8192, "pow2": 188},
}  # fmt: skip
TOTAL = 4000


def pool(**runs: int) -> np.ndarray:
    """A map that begins with so many pages of each state; the rest is free."""
    states = np.zeros(TOTAL, np.uint8)
    at = 0
    for state, count in runs.items():
        states[at : at + count] = page_frames.STATES.index(state)
        at += count
    return states


def figures_of(states: np.ndarray, **changed) -> dict:
    way = {"pages": 7, "waste_percent": 1.5, "more_battles": 3}
    figures = {
        "total": TOTAL, "page_bytes": 8192, "stride": 1, "pages": page_frames.counted(states), "running": 0,
        "waiting": 0, "tokens": 0, "cached_tokens_served": 1000, "means": MEAN,
        "ways": {"paged": way, "max": way, "pow2": way},
    }  # fmt: skip
    return figures | changed


IDLE = pool(pinned=100, cached=50)


@dataclass
class Pool:
    """An engine that says what a test has it say."""

    opened: int = 0
    open: int = 0
    away: bool = False
    queues: list[asyncio.Queue] = field(default_factory=list)
    states: np.ndarray = field(default_factory=lambda: IDLE.copy())
    figures: dict = field(default_factory=lambda: figures_of(IDLE))

    async def page_frames(self):
        if self.away:
            raise EngineUnreachable("away")
        self.opened += 1
        self.open += 1
        queue: asyncio.Queue = asyncio.Queue()
        self.queues.append(queue)
        try:
            yield self._figures()
            yield self._kind(page_frames.whole(self.states))
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self.open -= 1
            self.queues.remove(queue)

    async def kv(self):
        own = {"running": 1, "waiting": 0, "tokens": 5, "pages_used": 9, "pages_pinned": 2, "checkpoint": "path:/x"}
        return {"models": {"zebra-one": own}}

    def becomes(self, states: np.ndarray, **changed) -> None:
        for queue in self.queues:
            queue.put_nowait(self._kind(page_frames.changes(self.states, states)))
        self.states, self.figures = states, figures_of(states, **changed)
        for queue in self.queues:
            queue.put_nowait(self._figures())

    def goes(self) -> None:
        self.away = True
        for queue in self.queues:
            queue.put_nowait(None)

    def _figures(self):
        return FIGURES, json.dumps(self.figures).encode()

    def _kind(self, message: bytes):
        ((kind, payload),) = page_frames.split(bytearray(message))
        return kind, payload


@dataclass
class Arena:
    """What the memory may ask about battles."""

    begun: int = 0
    waiting: int = 0
    shown: dict = field(default_factory=dict)

    async def undecided(self) -> int:
        return self.waiting


class Screen:
    """A viewer: what he has after all he was sent."""

    def __init__(self, memory: Memory, *, exact: bool = False):
        self.received = b""
        self.states: np.ndarray | None = None
        self.figures: dict = {}
        self._task = asyncio.create_task(self._read(memory, exact))

    async def _read(self, memory: Memory, exact: bool) -> None:
        async with aclosing(memory.watch(exact=exact)) as messages:
            async for chunk in messages:
                self.received += chunk
                for kind, payload in page_frames.split(bytearray(chunk)):
                    if kind == FIGURES:
                        self.figures = json.loads(payload)
                    else:
                        self.states = page_frames.applied(self.states, kind, payload)

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def eventually(true: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watched(pool: Pool, arena: Arena):
    memory = Memory(pool, turns_begun=lambda: arena.begun, undecided=arena.undecided, shown=lambda: arena.shown)
    try:
        yield memory
    finally:
        await memory.close()


def same(screen: Screen, states: np.ndarray) -> Callable[[], bool]:
    return lambda: screen.states is not None and np.array_equal(screen.states, states)


# On the wire


def test_website_and_engine_write_the_same_bytes():
    random = np.random.default_rng(0)
    for share in (0.0, 0.01, 0.9):
        before = random.integers(0, 6, 3000).astype(np.uint8)
        after = np.where(random.random(3000) < share, random.integers(0, 6, 3000), before).astype(np.uint8)
        assert page_frames.changes(before, after) == engine_frames.changes(before, after)
        assert page_frames.whole(after) == engine_frames.whole(after)
    kinds = (engine_frames.FIGURES, engine_frames.WHOLE, engine_frames.CHANGES)
    assert kinds == (FIGURES, WHOLE, CHANGES)


def test_messages_are_read_however_they_are_cut():
    after = pool(used=10, shared=5)
    stream = page_frames.figures_message({"a": 1}) + page_frames.whole(IDLE) + page_frames.changes(IDLE, after)
    buffer, states = bytearray(), None
    for byte in stream:
        buffer.append(byte)
        for kind, payload in page_frames.split(buffer):
            states = states if kind == FIGURES else page_frames.applied(states, kind, payload)
    assert np.array_equal(states, after) and not buffer


def test_what_is_no_stream_of_frames_is_refused():
    with pytest.raises(ValueError, match="no stream"):
        list(page_frames.split(bytearray(b"<!doctype html>")))
    with pytest.raises(ValueError, match="before the whole"):
        page_frames.applied(None, CHANGES, b"")


# Viewers


def test_many_viewers_are_one_reader_of_the_engine_and_none_is_none():
    async def story():
        engine, arena = Pool(), Arena()
        async with watched(engine, arena) as memory:
            await asyncio.sleep(0.15)
            assert engine.opened == 0, "nobody watches"
            screens = [Screen(memory) for _ in range(20)] + [Screen(memory, exact=True)]
            await eventually(lambda: all(same(screen, IDLE)() for screen in screens))
            after = pool(pinned=100, cached=30, used=40)
            engine.becomes(after)
            await eventually(lambda: all(same(screen, after)() for screen in screens))
            assert (engine.opened, engine.open) == (1, 1)
            for screen in screens:
                await screen.leave()
            await eventually(lambda: engine.open == 0)

    asyncio.run(story())


def test_nothing_is_sent_while_nothing_changes():
    async def story():
        engine = Pool()
        async with watched(engine, Arena()) as memory:
            screen = Screen(memory)
            await eventually(same(screen, IDLE))
            await asyncio.sleep(0.2)
            received = len(screen.received)
            await asyncio.sleep(0.5)
            assert len(screen.received) == received

    asyncio.run(story())


def test_engine_that_goes_is_told_and_its_return_is_noticed(monkeypatch):
    monkeypatch.setattr("app.memory.watch.AGAIN_SECONDS", 0.05)

    async def story():
        engine = Pool()
        async with watched(engine, Arena()) as memory:
            screen = Screen(memory)
            await eventually(same(screen, IDLE))
            engine.goes()
            await eventually(lambda: screen.figures == {"away": True})
            engine.away, engine.states = False, pool(pinned=100)
            engine.figures = figures_of(engine.states)
            await eventually(same(screen, pool(pinned=100)))
            assert "total" in screen.figures

    asyncio.run(story())


def test_snapshot_needs_no_viewer_and_says_when_the_engine_is_away(monkeypatch):
    monkeypatch.setattr("app.memory.watch.FIRST_SECONDS", 0.3)

    async def story():
        engine = Pool()
        async with watched(engine, Arena()) as memory:
            assert (await memory.snapshot(exact=False)) == figures_of(IDLE)
            exact = await memory.snapshot(exact=True)
            assert exact["pages"] == figures_of(IDLE)["pages"]
        engine.away = True
        async with watched(engine, Arena()) as memory:
            with pytest.raises(NotReady):
                await memory.snapshot(exact=False)

    asyncio.run(story())


def test_only_the_admin_is_told_the_models():
    async def story():
        async with watched(Pool(), Arena()) as memory:
            visitor, admin = Screen(memory), Screen(memory, exact=True)
            await eventually(lambda: bool(admin.figures.get("models")))
            assert admin.figures["models"]["zebra-one"]["pages_used"] == 9
            assert b"zebra" not in visitor.received and b"models" not in visitor.received

    asyncio.run(story())


# The veil


def battle_seen(*frames: np.ndarray, served: int) -> tuple[bytes, np.ndarray]:
    """All that a visitor is sent who watches a whole battle until its vote, on an engine that goes through these maps;
    and the map he has at the end, after the vote."""

    async def story():
        engine, arena = Pool(), Arena()
        async with watched(engine, arena) as memory:
            screen = Screen(memory)
            await eventually(same(screen, IDLE))
            arena.begun, arena.waiting = 1, 1
            for number, states in enumerate(frames, 1):
                arena.shown = {"b1": [ShownText(100, 200 * number), ShownText(100, 200 * number)]}
                engine.becomes(states, cached_tokens_served=1000 + served, running=2, tokens=served * number)
                await eventually(lambda n=number: screen.figures.get("tokens") == 2 * (25 + 50 * n + 32))
            arena.shown = {}
            await eventually(lambda: screen.figures["running"] == 0)
            blind = screen.received
            arena.waiting = 0
            await eventually(same(screen, frames[-1]))
            return blind, screen.states

    return asyncio.run(story())


def test_two_pairs_that_say_the_same_are_drawn_the_same_to_the_byte():
    small = [pool(pinned=100, cached=50, used=count) for count in (30, 60)]
    large = [pool(pinned_in_use=60, pinned=40, cached=20, shared=10, used=count) for count in (900, 1800)]
    assert battle_seen(*small, served=17)[0] == battle_seen(*large, served=412)[0]


def test_map_changes_with_the_text_while_a_battle_waits_for_its_vote():
    veil = Veil(IDLE, figures_of(IDLE))
    used = []
    for shown in (16, 320, 640):
        states, figures = veil.draw({"b": [ShownText(64, shown), ShownText(64, shown)]})
        assert figures["estimated"] and figures["running"] == 2
        assert figures["pages"] == page_frames.counted(states)
        used.append(int((states == USED).sum()))
    assert used == [round(2 * slots * 2.5) for slots in (32, 96, 176)]


def test_answers_under_way_are_charged_no_more_system_prompts_than_they_read():
    """A system prompt of 32 shared slots takes 80 pages at the mean size; two answers read two at most, not all 400."""
    idle = pool(pinned=400)
    texts = [ShownText(asked=64, answered=64)] * 2
    _, figures = Veil(idle, figures_of(idle)).draw({"battle": texts})
    assert figures["ways"]["paged"]["pages"] == 2 * 80 + 2 * 32 * 2.5


def test_pages_of_an_ended_battle_are_kept_and_its_next_turn_has_them_again():
    veil = Veil(IDLE, figures_of(IDLE))
    first, _ = veil.draw({"b": [ShownText(64, 64)]})
    ended, _ = veil.draw({})
    assert np.array_equal(ended == CACHED, (first == USED) | (IDLE == CACHED))
    again, _ = veil.draw({"b": [ShownText(128, 64)]})
    assert ((again == USED) & (first == USED)).sum() == (first == USED).sum()


def test_veil_remembers_no_battle_that_ended_and_counts_each_of_its_turns():
    veil = Veil(IDLE, figures_of(IDLE))
    served = []
    for number in range(1000):
        _, figures = veil.draw({f"b{number}": [ShownText(0, 0)] * 2})
        served.append(figures["cached_tokens_served"])
    assert len(veil._requests) == 1
    veil.draw({})
    _, again = veil.draw({"b999": [ShownText(0, 0)] * 2})
    assert again["cached_tokens_served"] - served[-1] == served[-1] - served[-2] > 0


def test_veil_over_a_full_pool_uses_again_what_is_kept():
    veil = Veil(IDLE, figures_of(IDLE))
    for number in range(12):
        states, figures = veil.draw({f"b{number}": [ShownText(0, 4000), ShownText(0, 100)]})
        assert (states == PINNED).sum() == 100
        assert sum(figures["pages"].values()) == TOTAL
        assert (states == USED).sum() == round((1008 + 32) * 2.5)
    assert figures["pages"]["free"] == 0


def test_veil_shows_nobody_who_reads_and_nothing_of_a_time_it_did_not_see():
    busy = pool(pinned_in_use=60, pinned=40, used=30, shared=10, cached=20)
    states, _ = Veil(busy, figures_of(busy)).draw({})
    assert set(np.unique(states)) == {FREE, CACHED, PINNED}
    states, figures = bare(busy, figures_of(busy))
    assert set(np.unique(states)) == {FREE, PINNED} and (states == PINNED).sum() == 100
    assert figures["cached_tokens_served"] == 0 and figures["means"]["answer_tokens"] != MEAN["answer_tokens"]
    assert SHARED not in states and PINNED_IN_USE not in states


def test_turn_that_begins_between_two_looks_is_veiled_at_once():
    async def story():
        engine, arena = Pool(), Arena()
        async with watched(engine, arena) as memory:
            screen = Screen(memory)
            await eventually(same(screen, IDLE))
            arena.begun = 1  # its row is not in the database yet, nor was it looked for
            engine.becomes(pool(pinned=100, cached=50, used=333))
            await eventually(lambda: screen.figures.get("estimated", False))
            assert USED not in screen.states

    asyncio.run(story())
