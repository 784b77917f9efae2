"""The page map: every page in its state after each event, figures that fit it, and its way to a reader and back."""

from __future__ import annotations

import asyncio
import json
import struct
import zlib

import httpx
import numpy as np
import pytest

from engine import page_frames as frames
from engine.kv.page_map import STATES, PageMap, counted
from engine.page_frames import CHANGES, FIGURES, WHOLE, changes, whole
from tests.engine.fake_runner import HYBRID, FakeRunner
from tests.engine.rig import Rig
from tests.engine.server_fixture import EngineProcess, TinyModel

SYSTEM = "You are a kind and patient teacher who explains everything to children with many examples."
PROMPT = list(range(20, 60))  # 40 tokens: 3 blocks, 2 pages each


def rig_of(**models: str) -> Rig:
    """Models over one fake checkpoint, by their system prompts."""
    rig = Rig({"fake": FakeRunner()})
    for name, system_prompt in models.items():
        rig.put(name, "fake", system_prompt)
    return rig


def pages(rig: Rig) -> dict[str, int]:
    """By state, the ones without a page left out."""
    return {state: count for state, count in counted(rig.engine.page_map.states).items() if count}


def expected_states(rig: Rig) -> np.ndarray:
    """The states worked out anew from the tables alone."""
    states = np.zeros(rig.memory.pool.total, np.uint8)
    tables = [(table, 0) for table in rig.memory.tables.values()] + [(table, 1) for table in rig.memory.pins]
    readers: dict = {}
    for table, is_pin in tables:
        for block in table.held():
            reading, pinned = readers.get(block, (0, 0))
            readers[block] = (reading + 1 - is_pin, pinned + is_pin)
    for block in rig.memory.blocks.cached:
        states[block.pages] = STATES.index("cached")
    for block, (reading, pinned) in readers.items():
        name = ("pinned_in_use" if reading else "pinned") if pinned else "used" if reading == 1 else "shared"
        states[block.pages] = STATES.index(name)
    return states


# States


def test_page_is_free_then_used_then_cached_and_free_again_once_its_checkpoint_goes():
    rig = rig_of(a="")
    assert pages(rig) == {"free": 400}
    rig.ask("a", PROMPT, max_tokens=8)
    rig.engine.step()
    assert pages(rig) == {"free": 394, "used": 6}
    rig.drain()
    assert pages(rig) == {"free": 396, "cached": 4}, "two full blocks are kept; the begun one is given back"
    rig.engine.delete_model("a")
    rig.drain()
    assert pages(rig) == {"free": 400}


def test_pages_that_two_requests_read_are_shared_until_one_of_them_ends():
    rig = rig_of(a="")
    rig.generate("a", PROMPT, max_tokens=1)
    rig.ask("a", PROMPT, max_tokens=20)
    rig.ask("a", PROMPT, max_tokens=4)
    rig.engine.step()
    assert pages(rig)["shared"] == 4
    while rig.engine.step() and len(rig.scheduler.running) == 2:
        pass
    assert "shared" not in pages(rig)
    assert pages(rig)["used"] >= 6


def test_system_prompt_is_pinned_and_shows_when_it_is_read():
    rig = rig_of(a=SYSTEM)
    pinned = rig.memory.pinned_pages
    assert pages(rig) == {"free": 400 - pinned, "pinned": pinned} and pinned > 4
    prefix = rig.engine._models["a"].prefix_ids
    rig.ask("a", prefix + PROMPT, max_tokens=4)
    rig.engine.step()
    assert (pages(rig)["pinned_in_use"], pages(rig)["pinned"]) == (pinned - 2, 2), "the begun block is read by nobody"
    rig.drain()
    assert pages(rig)["pinned"] == pinned
    rig.engine.delete_model("a")
    rig.drain()
    assert pages(rig) == {"free": 400}


def test_prefix_that_two_models_pin_stays_pinned_while_one_is_left():
    rig = rig_of(a=SYSTEM, b=SYSTEM)
    pinned = rig.memory.pinned_pages
    rig.engine.delete_model("a")
    rig.engine.step()
    assert pages(rig) == {"free": 400 - pinned, "pinned": pinned}


def test_map_agrees_with_the_tables_after_every_step_of_a_crowded_pool():
    rig = Rig({"full": FakeRunner(), "hybrid": FakeRunner(HYBRID, "hybrid")}, pages=60)
    for name, source in (("a", "full"), ("b", "hybrid")):
        rig.put(name, source, "You are kind and patient.")
    random = np.random.default_rng(1)
    for number in range(14):
        prompt = random.integers(20, 300, 5 + 16 * (number % 4)).tolist()
        rig.ask("ab"[number % 2], prompt[:16] * (number % 3) + prompt, max_tokens=40 + number)
    while rig.engine.step():
        assert np.array_equal(rig.engine.page_map.states, expected_states(rig))
    assert rig.scheduler.preemptions and rig.memory.blocks.evictions, "the pool was crowded"


def test_counts_are_those_of_kv():
    rig = rig_of(a=SYSTEM)
    rig.generate("a", PROMPT, max_tokens=3)
    rig.ask("a", rig.engine._models["a"].prefix_ids + PROMPT, max_tokens=30)
    rig.engine.step()
    shown, kv = rig.engine.occupancy()["pages"], rig.engine.kv()["pages"]
    assert (shown["free"], shown["cached"]) == (kv["free"], kv["cached"])
    assert shown["used"] + shown["shared"] + shown["pinned"] + shown["pinned_in_use"] == kv["used"]
    assert shown["pinned"] + shown["pinned_in_use"] == kv["pinned"]


# Figures


def test_waste_of_each_way_is_the_share_of_its_slots_without_a_token():
    rig = rig_of(a="")
    rig.ask("a", PROMPT, max_tokens=8)
    rig.engine.step()
    ways = rig.engine.occupancy()["ways"]
    length = rig.engine._models["a"].context_length
    assert (ways["paged"]["pages"], ways["paged"]["waste_percent"]) == (6, round(100 * 8 / 48, 2))
    assert ways["paged"]["more_battles"] == 394 // (2 * 2 * 32), "161 + 338 tokens until one was served: 32 blocks"
    assert ways["max"]["pages"] == length * 2 // 16
    assert ways["max"]["waste_percent"] == pytest.approx(100 * (1 - 40 / length), abs=0.5)
    assert ways["pow2"]["pages"] == round(41 * 2 / 16), "the prompt, and 1 for the answer that begins"


def test_battles_that_would_fit_follow_the_mean_of_the_requests_served():
    rig = rig_of(a="")
    for _ in range(3):
        rig.generate("a", PROMPT, max_tokens=24)
    figures = rig.engine.occupancy()
    assert (figures["means"]["prompt_tokens"], figures["means"]["answer_tokens"]) == (40, 24)
    assert figures["ways"]["paged"]["more_battles"] == 400 // (2 * 4 * 2)
    assert figures["ways"]["pow2"]["more_battles"] == 400 * 16 // (2 * (40 + 32) * 2)
    assert figures["running"] == figures["tokens"] == 0


def test_engine_without_a_model_has_figures_too():
    figures = Rig({}).engine.occupancy()
    assert figures["pages"]["free"] == figures["total"]
    assert {way["waste_percent"] for way in figures["ways"].values()} == {0.0}


# The way to a reader


def messages(stream: bytes):
    while stream:
        kind, length = struct.unpack_from("<II", stream)
        yield kind, stream[8 : 8 + length]
        stream = stream[8 + length :]


def applied(states: np.ndarray | None, stream: bytes) -> np.ndarray:
    """What a reader has after these messages."""
    for kind, payload in messages(stream):
        if kind == WHOLE:
            states = np.frombuffer(zlib.decompress(payload), np.uint8).copy()
        elif kind == CHANGES:
            for start, run in np.frombuffer(payload, "<u4").reshape(-1, 2).tolist():
                states[start : start + (run >> 3)] = run & 7
    return states


@pytest.mark.parametrize("pages", [1, 2, 100, 4096])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_changes_lead_a_reader_from_one_map_to_the_next(pages, share):
    random = np.random.default_rng(pages)
    before = random.integers(0, 6, pages).astype(np.uint8)
    after = np.where(random.random(pages) < share, random.integers(0, 6, pages), before).astype(np.uint8)
    assert np.array_equal(applied(before.copy(), changes(before, after)), after)
    assert np.array_equal(applied(None, whole(after)), after)


def test_run_of_pages_is_eight_bytes():
    before, after = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    after[10:30], after[30:35], after[99] = 2, 3, 1
    ((kind, payload),) = messages(changes(before, after))
    assert kind == CHANGES
    assert np.frombuffer(payload, "<u4").tolist() == [10, 20 * 8 + 2, 30, 5 * 8 + 3, 99, 1 * 8 + 1]


def test_what_changes_everywhere_is_sent_whole():
    before, after = np.zeros(4096, np.uint8), np.arange(4096, dtype=np.uint8) % 6
    assert [kind for kind, _ in messages(changes(before, after))] == [WHOLE]


def test_reader_is_sent_everything_once_and_nothing_while_nothing_changes():
    rig = rig_of(a=SYSTEM)
    rig.engine.config = rig.config

    async def watch():
        stream = frames.page_frames(rig.engine)
        first = await anext(stream)
        silent = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.3)
        assert not silent.done()
        rig.ask("a", PROMPT, max_tokens=2)
        rig.engine.step()
        second = await silent
        await stream.aclose()
        return first, second

    first, second = asyncio.run(watch())
    assert [kind for kind, _ in messages(first)] == [FIGURES, WHOLE]
    assert CHANGES in [kind for kind, _ in messages(second)]
    assert np.array_equal(applied(applied(None, first), second), rig.engine.page_map.states)


def test_figures_of_the_last_change_come_though_nothing_changes_after_it(monkeypatch):
    monkeypatch.setattr(frames, "PING_SECONDS", 1000.0)
    rig = rig_of(a=SYSTEM)

    async def watch() -> list[dict]:
        stream, told = frames.page_frames(rig.engine), []
        while len(told) < 2:
            told += [json.loads(payload) for kind, payload in messages(await anext(stream)) if kind == FIGURES]
            if len(told) == 1 and not rig.scheduler.running:
                rig.ask("a", PROMPT, max_tokens=2)
                rig.engine.step()
        await stream.aclose()
        return told

    before, after = asyncio.run(asyncio.wait_for(watch(), 10))
    assert (before["running"], after["running"]) == (0, 1)


def test_huge_pool_is_drawn_by_every_nth_page(monkeypatch):
    monkeypatch.setattr(frames, "MOST_DRAWN", 150)
    rig = rig_of(a=SYSTEM)
    first = asyncio.run(anext(frames.page_frames(rig.engine)))
    (_, figures), _ = messages(first)
    assert json.loads(figures)["stride"] == 3
    assert np.array_equal(applied(None, first), rig.engine.page_map.states[::3])


def test_real_engine_streams_its_map_and_names_no_model():
    model = TinyModel("zebra-one", system_prompt=SYSTEM)
    with EngineProcess([model]) as engine, httpx.stream("GET", engine.url + "/kv/pages") as response:
        first = next(response.iter_raw())
    (kind, figures), (_, _) = messages(first)
    assert kind == FIGURES
    assert json.loads(figures)["pages"]["pinned"] > 0
    assert counted(applied(None, first)) == json.loads(figures)["pages"]
    assert b"zebra" not in first and model.source.encode() not in first


def test_map_of_no_pages_is_empty():
    assert counted(PageMap(0).states) == dict.fromkeys(STATES, 0)
