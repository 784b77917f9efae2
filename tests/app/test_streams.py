"""One live turn: what is shown when, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from functools import partial

import orjson
import pytest

from app.config import AppConfig
from app.engine_client import Delta, EngineUnreachable
from app.errors import SIDE_FAILED
from app.streams import END_LEEWAY_CHARACTERS, END_SECONDS, TICK_SECONDS, EventLog, Lockstep, Pace, TurnStream
from tests.app.virtual_time import run

GRACE_SECONDS = AppConfig().reader_grace_seconds
FAST = Pace(characters_per_second=100_000, lag_seconds=1)
WORDS = "one two three four five six seven eight nine ten\n\n"


async def speak(text: str, *, size: int = 5, pause: float = 0.0, first_pause: float = 0.0, fails: bool = False):
    await asyncio.sleep(first_pause)
    for start in range(0, len(text), size):
        await asyncio.sleep(pause)
        yield Delta(text=text[start : start + size])
    if fails:
        raise EngineUnreachable("alpha at 10.0.0.1 broke")
    yield Delta(finish_reason="stop", completion_tokens=9)


class Turn:
    """A turn with sources of the test's, read from its first moment unless told otherwise."""

    def __init__(self, *, pace: Pace = FAST, grace: float = 5.0, longest: int = 100_000, **sources):
        self.saved = []
        self.stream = TurnStream(
            turn=1,
            sources=sources,
            save=self._save,
            first_event_id=1,
            pace=pace,
            grace_seconds=grace,
            longest_answer_characters=longest,
            clock=asyncio.get_running_loop().time,
        )

    async def _save(self, outcomes):
        self.saved.append(outcomes)
        return "votable" if all(outcome.state == "done" for outcome in outcomes.values()) else "interrupted"

    async def read(self, after: int = 0):
        """(time, event name, data, id) of every event."""
        clock = asyncio.get_running_loop().time
        with self.stream.audience.joined(lambda: 0.0):
            async for chunk in self.stream.log.read(after):
                at = clock()
                for event in chunk.decode().split("\n\n"):
                    lines = dict(line.split(": ", 1) for line in event.split("\n") if ": " in line and line[0] != ":")
                    if "data" in lines:
                        yield at, lines["event"], orjson.loads(lines["data"]), int(lines["id"])

    async def run(self):
        task = asyncio.create_task(self.stream.run())
        events = [event async for event in self.read()]
        await task
        return events


def shown_over_time(events) -> dict[float, dict[str, int]]:
    """Length of the text of each side after each moment at which something was told."""
    html: dict[str, dict[int, str]] = defaultdict(dict)
    shown = {}
    for at, name, data, _ in events:
        if name == "block":
            html[data["side"]][data["block"]] = data["html"]
        shown[at] = {side: len("".join(blocks.values())) for side, blocks in html.items()}
    return shown


def end_times(events) -> dict[str, float]:
    return {d["side"]: at for at, name, d, _ in events if name == "side" and d["state"] != "streaming"}


def test_both_sides_are_shown_at_the_pace_of_the_slower():
    async def body():
        turn = Turn(a=partial(speak, "x" * 60, size=60), b=partial(speak, "y" * 60, size=3, pause=0.05))
        return await turn.run()

    lengths = list(shown_over_time(run(body())).values())
    assert len(lengths) > 5
    assert all(abs(each.get("a", 0) - each.get("b", 0)) == 0 for each in lengths if len(each) == 2)


def test_the_first_words_of_both_sides_come_together():
    async def body():
        turn = Turn(a=partial(speak, WORDS), b=partial(speak, WORDS, first_pause=0.6))
        return await turn.run()

    events = run(body())
    first = {}
    for at, name, data, _ in events:
        if name == "block":
            first.setdefault(data["side"], at)
    assert first["a"] == first["b"]
    assert first["a"] - events[0][0] > 0.5


def test_the_first_words_wait_for_both_sides_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr("app.streams.TICK_SECONDS", 30.0)

    async def body():
        heard = asyncio.Event()

        async def slow():
            await heard.wait()
            async for delta in speak(WORDS):
                yield delta

        turn = Turn(a=partial(speak, WORDS), b=slow)
        running, told = asyncio.create_task(turn.stream.run()), []
        async with asyncio.timeout(10):
            await asyncio.sleep(0.05)
            assert turn.stream.log.last_id == 3, "nothing of the side that is first"
            heard.set()
            async for _, name, data, _ in turn.read():
                told += [data["side"]] if name == "block" else []
                if len(told) == 2:
                    break
        running.cancel()
        return told

    assert run(body()) == ["a", "b"]


def test_a_side_goes_on_no_faster_once_the_other_has_ended():
    """The quick model's backlog must not rush in when the slow one's short answer is over."""

    async def body():
        pace = Pace(characters_per_second=100_000, lag_seconds=60)
        turn = Turn(pace=pace, a=partial(speak, "y" * 60, size=6, pause=0.12), b=partial(speak, "x" * 220, size=220))
        return await turn.run()

    events = run(body())
    ends = end_times(events)
    start = next(at for at, name, _, _ in events if name == "block")
    together = 60 + END_LEEWAY_CHARACTERS  # shown when the end of a is told
    before, alone = together / (ends["a"] - start), (220 - together) / (ends["b"] - ends["a"])
    assert alone < 1.5 * before


def test_two_texts_of_one_length_end_at_once_however_long_an_engine_takes_to_say_so():
    async def slow_to_end():
        yield Delta(text="x" * 60)
        await asyncio.sleep(0.5)
        yield Delta(finish_reason="stop")

    async def body():
        return await Turn(pace=Pace(300, 10), a=partial(speak, "y" * 60, size=60), b=slow_to_end).run()

    ends = end_times(run(body()))
    assert abs(ends["a"] - ends["b"]) < 0.05


@pytest.mark.parametrize("lag", [0.0, 0.1, 0.3])
def test_the_longer_text_goes_on_as_soon_whenever_the_engine_of_the_shorter_says_that_it_is_done(lag):
    """After 0.4 s and a tick: where it went on at once, the other was the fast one."""

    async def slow_to_end():
        async for delta in speak("y" * 40, size=4, pause=0.07):
            if delta.finish_reason:
                await asyncio.sleep(lag)
            yield delta

    async def body():
        return await Turn(pace=Pace(300, 10), a=slow_to_end, b=partial(speak, "x" * 200, size=200)).run()

    times = [at for at, name, data, _ in run(body()) if name == "block" and data["side"] == "b"]
    gaps = [later - at for at, later in itertools.pairwise(times)]
    assert END_SECONDS <= max(gaps) < END_SECONDS + 2 * TICK_SECONDS


def test_a_side_lags_behind_its_own_text_for_a_bounded_time():
    async def body():
        pace = Pace(characters_per_second=100_000, lag_seconds=0.5)
        turn = Turn(pace=pace, a=partial(speak, "y", pause=0.5), b=partial(speak, "x" * 5000, size=5000))
        return await turn.run()

    ends = end_times(run(body()))
    assert ends["b"] - ends["a"] < 3.0, "5,000 characters at the pace of the one before them would take hours"


def test_at_most_ten_events_a_second_and_side():
    async def body():
        turn = Turn(a=partial(speak, WORDS * 8, size=3, pause=0.01), b=partial(speak, "- x\n" * 100, pause=0.01))
        return await turn.run()

    events = run(body())
    for side in "ab":
        times = [at for at, name, data, _ in events if data.get("side") == side and data.get("state") != "streaming"]
        assert len(times) > 5
        assert all(later - first > 0.95 for first, later in zip(times, times[10:], strict=False))


def test_a_finished_block_is_never_sent_again():
    async def body():
        turn = Turn(a=partial(speak, WORDS * 6, pause=0.02), b=partial(speak, "```\ncode\n```\n\n" * 9, pause=0.02))
        return await turn.run()

    final = set()
    for _, name, data, _ in run(body()):
        if name == "block":
            assert (data["side"], data["block"]) not in final
            if data["final"]:
                final.add((data["side"], data["block"]))
    assert len(final) == 6 + 9


def test_events_tell_nothing_but_the_text():
    async def body():
        turn = Turn(a=partial(speak, WORDS), b=partial(speak, WORDS, fails=True))
        return await turn.run()

    known = {
        "block": {"turn", "side", "block", "html", "final"},
        "side": {"turn", "side", "state", "message"},
        "state": {"turn", "state"},
    }
    events = run(body())
    assert all(set(data) == known[name] for _, name, data, _ in events)
    assert "10.0.0.1" not in repr(events) and "alpha" not in repr(events)


def test_a_reader_that_comes_back_gets_what_it_missed_and_no_more():
    async def body():
        turn = Turn(a=partial(speak, WORDS * 3, pause=0.02), b=partial(speak, WORDS * 3, pause=0.02))
        task = asyncio.create_task(turn.stream.run())
        first = []
        async with contextlib.aclosing(turn.read()) as reading:
            async for event in reading:
                first.append(event)
                if len(first) == 8:
                    break
        rest = [event async for event in turn.read(after=first[-1][3])]
        await task
        return first, rest

    first, rest = run(body())
    ids = [event[3] for event in first + rest]
    assert ids == sorted(set(ids))
    blocks: dict[str, dict[int, str]] = defaultdict(dict)
    for _, name, data, _ in first + rest:
        if name == "block":
            blocks[data["side"]][data["block"]] = data["html"]
    assert list(blocks["a"].values()) == ["<p>one two three four five six seven eight nine ten</p>\n"] * 3


def test_with_nobody_reading_both_sides_stop_within_two_seconds():
    async def body():
        hung_up = []

        async def endless(side):
            try:
                while True:
                    yield Delta(text="word ")
                    await asyncio.sleep(0.01)
            finally:
                hung_up.append(side)

        turn = Turn(grace=GRACE_SECONDS, a=partial(endless, "a"), b=partial(endless, "b"))
        began = asyncio.get_running_loop().time()
        await turn.stream.run()
        return turn, hung_up, asyncio.get_running_loop().time() - began

    turn, hung_up, took = run(body())
    assert sorted(hung_up) == ["a", "b"] and GRACE_SECONDS <= took <= 2
    assert {outcome.state for outcome in turn.saved[0].values()} == {"interrupted"}
    assert len(turn.saved) == 1


def slow_turn() -> Turn:
    """Outlives many graces."""
    slow = partial(speak, "x" * 5000, pause=0.01)
    return Turn(grace=GRACE_SECONDS, a=slow, b=slow)


def test_a_reader_whose_network_is_cut_is_nobody():
    async def body():
        turn, clock = slow_turn(), asyncio.get_running_loop().time
        began = clock()
        with turn.stream.audience.joined(lambda: clock() - began):
            await turn.stream.run()
        return turn, clock() - began

    turn, took = run(body())
    assert turn.saved[0]["a"].state == "interrupted" and GRACE_SECONDS <= took <= 2


def test_a_reader_who_comes_back_within_the_grace_has_all_of_it_again():
    async def body():
        turn = slow_turn()
        task = asyncio.create_task(turn.stream.run())
        while not task.done():
            with turn.stream.audience.joined(lambda: 0.0):
                await asyncio.sleep(0.01)
            await asyncio.sleep(GRACE_SECONDS - 2 * TICK_SECONDS)
        return turn

    assert run(body()).saved[0]["a"].state == "done"


def test_who_asks_for_the_battle_now_and_then_reads_it():
    async def body():
        turn = slow_turn()
        task = asyncio.create_task(turn.stream.run())
        while not task.done():
            turn.stream.audience.touch()
            await asyncio.sleep(GRACE_SECONDS - 2 * TICK_SECONDS)
        return turn

    assert run(body()).saved[0]["a"].state == "done"


def test_stop_keeps_what_is_shown_and_nothing_else():
    async def body():
        pace = Pace(characters_per_second=50, lag_seconds=1)
        turn = Turn(pace=pace, a=partial(speak, "x" * 1000), b=partial(speak, "y" * 1000))
        task = asyncio.create_task(turn.stream.run())
        events = []
        async for event in turn.read():
            events.append(event)
            if len(events) == 9:
                turn.stream.stop()
        await task
        return turn, events

    turn, events = run(body())
    outcome = turn.saved[0]["a"]
    assert outcome.state == "stopped" and 0 < len(outcome.text) < 100
    last = [data["html"] for _, name, data, _ in events if name == "block" and data["side"] == "a"][-1]
    assert last == f"<p>{outcome.text}</p>\n"


@pytest.mark.parametrize(
    "source",
    [
        partial(speak, "some text", fails=True),
        partial(speak, "", fails=True),
        partial(speak, " \n "),
    ],
    ids=["broken", "refused", "empty"],
)
def test_every_failure_reads_the_same_and_the_other_side_goes_on(source):
    async def body():
        turn = Turn(a=source, b=partial(speak, WORDS))
        return turn, await turn.run()

    turn, events = run(body())
    told = [data for _, name, data, _ in events if name == "side" and data["side"] == "a"]
    assert told[-1] == {"turn": 1, "side": "a", "state": "failed", "message": SIDE_FAILED}
    assert turn.saved[0]["b"].state == "done" and turn.saved[0]["a"].error


def test_what_stands_for_bytes_of_no_character_is_not_shown():
    async def body():
        turn = Turn(a=partial(speak, "tidy\ufffdtest"), b=partial(speak, WORDS))
        return turn, await turn.run()

    turn, events = run(body())
    assert turn.saved[0]["a"].text == "tidytest"
    assert not any("\ufffd" in data["html"] for _, name, data, _ in events if name == "block")


def test_an_answer_without_end_is_cut():
    async def body():
        turn = Turn(longest=300, a=partial(speak, "x" * 5000), b=partial(speak, WORDS))
        await turn.run()
        return turn.saved[0]["a"]

    outcome = run(body())
    assert len(outcome.text) == 300 and outcome.finish_reason == "length"


def test_a_log_keeps_one_event_of_a_kind():
    async def body():
        log = EventLog(7)
        for number in range(5):
            log.put(("block", "a", 0), "block", {"html": number})
        log.put(("state",), "state", {"state": "votable"})
        return log.after(0), log.after(11), log.last_id

    everything, newest, last_id = run(body())
    assert everything.count(b"event: block") == 1 and b'"html":4' in everything
    assert newest.startswith(b"id: 12\nevent: state") and last_id == 12


def test_lockstep_never_goes_back():
    lockstep = Lockstep(Pace(100, 10))
    texts = [(0, 0), (5, 9), (50, 60), (50, 90), (50, 500), (50, 500)]
    positions = [
        lockstep.advance(now, {"a": a, "b": b}, {"a": now >= 3, "b": now >= 5}) for now, (a, b) in enumerate(texts)
    ]
    assert positions == sorted(positions) and positions[1] == 5
