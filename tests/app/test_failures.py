"""What breaks below a battle, and what its visitor sees of it: one neutral sentence, and a way on."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import sqlite3
import sys
import threading
import time
import uuid
from datetime import UTC, datetime

import pytest
import sqlalchemy

from app.errors import SIDE_FAILED
from app.registry import FRESH_SECONDS
from db import queries
from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import SHIPPED_GRACE_SECONDS, Website
from tests.waiting import until

LONG = Script.of("word " * 5000, pause_seconds=0.01)


def error(response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def side_of(visitor, battle, state: str) -> str:
    answers = visitor.snapshot(battle)["turns"][-1]["answers"]
    return next(side for side, answer in answers.items() if answer["state"] == state)


@pytest.mark.parametrize(
    "script",
    [
        Script.of("some words", end="break"),
        Script.of("some words", end="error"),
        Script.of("", end="break"),
        Script.of("x", refuse=500),
        Script.of("x", refuse=429),
        Script.of(""),
        Script.of("  \n "),
    ],
    ids=["broken", "error event", "broken at once", "500", "429", "empty", "blank"],
)
def test_a_side_that_fails_is_never_an_answer_and_can_be_tried_again(visitor, engine, script):
    engine.say("alpha", script, "whole")
    engine.say("beta", "fine")
    battle, reading = visitor.battle()
    assert reading.state == "interrupted"
    failed = side_of(visitor, battle, "failed")
    assert reading.side_states(failed)[-1] == "failed"
    answer = visitor.snapshot(battle)["turns"][0]["answers"][failed]
    assert answer == {"state": "failed", "blocks": [], "message": SIDE_FAILED}
    assert b"alpha" not in reading.raw and b"500" not in reading.raw
    assert error(visitor.vote(battle)) == (409, "not_votable")
    assert error(visitor.post(f"/api/battles/{battle}/turns", json={"prompt": "x"})) == (409, "wrong_state")

    whole = "b" if failed == "a" else "a"
    assert error(visitor.post(f"/api/battles/{battle}/sides/{whole}/retry")) == (409, "wrong_state")
    assert visitor.post(f"/api/battles/{battle}/sides/{failed}/retry").status_code == 202
    again = visitor.read(battle, after=reading.last_id)
    assert again.state == "votable" and again.html(failed) == "<p>whole</p>\n" and again.html(whole) == ""
    assert [body["model"] for body in engine.asked].count("beta") == 1
    assert visitor.vote(battle).status_code == 200


def test_two_failed_sides_are_tried_again_together(visitor, engine):
    engine.say("alpha", Script.of("", end="break"), "whole")
    engine.say("beta", Script.of("", end="break"), "whole")
    battle, reading = visitor.battle()
    assert visitor.post(f"/api/battles/{battle}/sides/a/retry").status_code == 202
    again = visitor.read(battle, after=reading.last_id)
    assert again.state == "votable" and again.html("a") == again.html("b") == "<p>whole</p>\n"


def test_a_side_that_does_not_exist_cannot_be_tried(visitor):
    battle, _ = visitor.battle()
    assert visitor.post(f"/api/battles/{battle}/sides/c/retry").status_code == 404


def test_a_silent_side_fails_in_time(engine, tmp_path):
    with Website(tmp_path, engine_url=engine.url, silence_seconds=0.5) as site:
        engine.say("alpha", Script.of("word", end="silence"))
        _, reading = site.ready().visitor().battle()
        assert reading.state == "interrupted"
    until(lambda: engine.streaming == 0)


# Readers that vanish


@pytest.mark.skipif(sys.platform != "linux", reason="needs a socket filter to cut a network")
def test_a_cut_network_stops_both_sides(engine, tmp_path):
    """The reader's kernel drops every packet from one moment on, as a cut cable would: nothing is closed."""
    engine.say("alpha", LONG)
    engine.say("beta", LONG)
    with Website(tmp_path, engine_url=engine.url, reader_grace_seconds=SHIPPED_GRACE_SECONDS) as site:
        visitor = site.ready().visitor()
        battle = visitor.ask()
        with socket.create_connection((visitor.base_url.host, visitor.base_url.port)) as reader:
            cookie = "; ".join(f"{name}={value}" for name, value in visitor.cookies.items())
            asked = f"GET /api/battles/{battle}/events HTTP/1.1\r\nHost: x\r\nCookie: {cookie}\r\n\r\n"
            reader.sendall(asked.encode())
            received = b""
            while received.count(b"event: block") < 3:
                received += reader.recv(65536)
            drop_everything(reader)
            until(lambda: engine.streaming == 0)


def drop_everything(connection: socket.socket) -> None:
    """A socket filter of one instruction: keep 0 bytes of each packet."""
    code = ctypes.create_string_buffer(b"\x06\x00\x00\x00\x00\x00\x00\x00")  # BPF_RET | BPF_K, 0
    program = ctypes.create_string_buffer(16)
    ctypes.memmove(program, (1).to_bytes(2, "little"), 2)
    ctypes.memmove(ctypes.byref(program, 8), ctypes.addressof(code).to_bytes(8, "little"), 8)
    so_attach_filter = 26
    connection.setsockopt(socket.SOL_SOCKET, so_attach_filter, program.raw)


def test_a_reader_that_changes_connections_interrupts_nothing(visitor, engine):
    engine.say("alpha", Script.of("word " * 60, pause_seconds=0.03))
    battle = visitor.ask()
    after = 0
    for _ in range(3):
        seen = visitor.read(battle, after=after, stop=lambda reading: len(reading.events) >= 3)
        after = seen.last_id or after
        time.sleep(0.3)
    until(lambda: visitor.snapshot(battle)["state"] == "votable")


def test_answers_are_saved_though_the_reader_left_before_the_end(site, visitor, engine):
    engine.say("alpha", Script.of("word " * 10, pause_seconds=0.02))
    battle = visitor.ask()
    visitor.read(battle, stop=lambda reading: bool(reading.html("a")))
    until(lambda: state_of(site, battle) != "streaming")  # to ask for its snapshot would be to read it again
    assert state_of(site, battle) == "votable"


def state_of(site, battle: str) -> str:
    with site.services.database.session(read_only=True) as session:
        return queries.find_battle(session, battle).state


# The database


@contextlib.contextmanager
def locked(site):
    """Another process in the middle of a write that takes longer than ours waits: a tenth of a second here."""
    database = site.services.database._engine

    def wait_less(connection: sqlite3.Connection, *_) -> None:
        connection.execute("PRAGMA busy_timeout = 100")

    sqlalchemy.event.listen(database, "checkout", wait_less)
    connection = sqlite3.connect(site.folder / "arena.sqlite3", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()
        sqlalchemy.event.remove(database, "checkout", wait_less)
        database.dispose()


@contextlib.contextmanager
def full(site):
    """No page can be added to the site's database, and those that hold votes have no room for another."""
    engine = site.services.database._engine

    def limit(connection: sqlalchemy.Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    with contextlib.closing(sqlite3.connect(site.folder / "arena.sqlite3", isolation_level=None)) as filler:
        pages = filler.execute("PRAGMA page_count").fetchone()[0]
        filler.execute(f"PRAGMA max_page_count = {pages}")
        with contextlib.suppress(sqlite3.OperationalError):
            for number in itertools.count(1_000_000):
                text = uuid.uuid4().hex
                filler.execute(
                    "INSERT INTO votes (battle_id, visitor_id, kind, created_at, number, counted, previous_hash, "
                    "chain_hash, private_digest) VALUES (?, ?, 'a', '2000-01-01 00:00:00.000000', ?, 1, ?, ?, ?)",
                    (text, text, number, text, text, text),
                )
        sqlalchemy.event.listen(engine, "begin", limit, insert=True)
        try:
            yield
        finally:
            sqlalchemy.event.remove(engine, "begin", limit)
            engine.dispose()
            filler.execute("DELETE FROM votes WHERE created_at < '2001'")


def test_while_the_database_is_locked_no_vote_is_thanked_for_and_it_stays_possible(engine, tmp_path):
    with Website(tmp_path, engine_url=engine.url) as site:
        visitor = site.ready().visitor()
        battle, _ = visitor.battle()
        with locked(site):
            assert error(visitor.vote(battle)) == (503, "storage")
            assert visitor.snapshot(battle)["models"] is None
        assert visitor.vote(battle).status_code == 200


def test_while_the_disk_is_full_no_vote_is_thanked_for_and_it_stays_possible(engine, tmp_path):
    with Website(tmp_path, engine_url=engine.url) as site:
        visitor = site.ready().visitor()
        battle, _ = visitor.battle()
        with full(site):
            assert error(visitor.vote(battle)) == (503, "storage")
            assert visitor.snapshot(battle)["vote"] is None
        assert visitor.vote(battle).status_code == 200


def hold(engine) -> threading.Event:
    """No answer ends before it is set: so that what happens to the database happens before a turn is saved."""
    ends = threading.Event()
    engine.say("alpha", Script.of("Hello", waits_for=ends))
    return ends


def test_answers_are_saved_once_the_database_is_back(engine, tmp_path):
    with Website(tmp_path, engine_url=engine.url) as site:
        visitor, ends = site.ready().visitor(), hold(engine)
        battle = visitor.ask()
        readings = []
        reader = threading.Thread(target=lambda: readings.append(visitor.read(battle)))
        reader.start()
        with locked(site):
            ends.set()
            time.sleep(1.5)
        reader.join()
        assert readings[0].state == "votable" and visitor.vote(battle).status_code == 200


def test_a_turn_that_could_not_be_saved_is_shown_interrupted_while_the_disk_is_full(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("app.battles.SAVE_PAUSES_SECONDS", ())
    with Website(tmp_path, engine_url=engine.url) as site:
        visitor, ends = site.ready().visitor(), hold(engine)
        battle = visitor.ask()
        with locked(site):
            ends.set()
            assert visitor.read(battle).state == "interrupted"
            shown = visitor.snapshot(battle)
            sides = [side["state"] for side in shown["turns"][0]["answers"].values()]
            assert shown["state"] == "interrupted" and sides == ["interrupted", "interrupted"]
        assert visitor.post(f"/api/battles/{battle}/regenerate").status_code < 300
        assert visitor.read(battle).state == "votable"


# Models that come and go


def test_models_that_left_end_a_battle_without_answers(tmp_path):
    with FakeEngine() as engine, Website(tmp_path, engine_url=engine.url) as site:
        visitor = site.ready().visitor()
        votable, _ = visitor.battle()
        engine.say("alpha", Script.of("", end="break"))
        broken, _ = visitor.battle()
        retire(site, "alpha")
        until(lambda: visitor.get("/api/status").json()["ready_models"] == 1)
        assert error(visitor.post(f"/api/battles/{broken}/regenerate")) == (409, "wrong_state")
        assert visitor.snapshot(broken)["state"] == "void"
        assert error(visitor.vote(broken)) == (409, "not_votable")
        refused = visitor.post(f"/api/battles/{votable}/turns", json={"prompt": "x"})
        assert error(refused) == (409, "wrong_state") and "alpha" not in refused.text
        assert visitor.vote(votable).status_code == 200, "what was answered can be voted on"


def test_a_model_is_not_taken_from_under_a_streaming_answer(tmp_path):
    with FakeEngine() as engine, Website(tmp_path, engine_url=engine.url) as site:
        engine.say("alpha", Script.of("word " * 60, pause_seconds=0.02))
        visitor = site.ready().visitor()
        battle = visitor.ask()
        retire(site, "alpha")
        assert visitor.read(battle).state == "votable"
        until(lambda: "alpha" not in engine.models)
        assert engine.torn == []


def retire(site, name: str) -> None:
    database = site.database()
    with database.session() as session:
        queries.retire_model(session, name, datetime.now(UTC))
    database.close()


def test_status_is_that_of_now_and_not_of_the_last_comparison(tmp_path):
    with FakeEngine() as engine, Website(tmp_path, engine_url=engine.url, sync_seconds=600.0) as site:
        visitor = site.ready().visitor()
        assert visitor.get("/api/status").json() == {"ready_models": 2, "enough": True, "message": None}
        engine.__exit__()
        time.sleep(FRESH_SECONDS)
        told = visitor.get("/api/status").json()
        assert (told["ready_models"], told["enough"]) == (0, False) and "/admin" in told["message"]


def test_an_engine_that_went_away_is_told_before_a_battle_begins(tmp_path):
    with FakeEngine() as engine:
        site = Website(tmp_path, engine_url=engine.url)
        with site:
            visitor = site.ready().visitor()
            engine.__exit__()
            until(lambda: not visitor.get("/api/status").json()["enough"], seconds=15)
            assert error(visitor.post("/api/battles", json={"prompt": "x"})) == (503, "not_ready")
