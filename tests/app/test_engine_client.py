"""The one client of every engine: what it hands on, and what it calls each failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from app.engine_client import EngineClient, EngineRefused, EngineSilent, EngineUnreachable, ModelSpec
from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import nobody_listens
from tests.waiting import until

ASK = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        engine.add(["m"])
        yield engine


def talk(url, body):
    async def run():
        client = EngineClient(url, api_key="key")
        try:
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def answer(client, **sampling):
    stream = client.stream_chat("m", ASK, sampling=sampling, silence_seconds=2)
    return [delta async for delta in stream]


def test_an_answer_comes_in_pieces_and_ends_with_its_counts(engine):
    engine.say("m", Script.of("Grüße 🙂", size=1))
    *pieces, last = talk(engine.url, lambda client: answer(client, max_tokens=3))
    assert "".join(piece.text for piece in pieces) == "Grüße 🙂"
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens, last.cached_tokens) == ("stop", 7, 7, 5)
    (asked,) = engine.asked
    assert asked["max_tokens"] == 3 and asked["stream"] and asked["authorization"] == "Bearer key"


def test_nul_is_made_storable(engine):
    engine.say("m", Script(("a\0b",)))
    assert talk(engine.url, answer)[0].text == "a\N{SYMBOL FOR NULL}b"


def test_closing_an_answer_closes_its_connection(engine):
    engine.say("m", Script.of("word " * 1000, pause_seconds=0.01))

    async def body(client):
        async with contextlib.aclosing(client.stream_chat("m", ASK, sampling={}, silence_seconds=5)) as stream:
            async for _ in stream:
                break

    talk(engine.url, body)
    until(lambda: engine.streaming == 0 and engine.hung_up == 1)


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        (Script.of("x", refuse=503), EngineRefused, "HTTP 503: m is broken inside"),
        (Script.of("x", end="error"), EngineRefused, "m fell over"),
        (Script.of("x", end="break"), EngineUnreachable, "chunked|closed|ended"),
        (Script.of("x", end="silence"), EngineSilent, "no answer for 2 s"),
    ],
    ids=["refused", "error event", "broken", "silent"],
)
def test_each_failure_has_its_name(engine, script, error, words):
    engine.say("m", script)
    with pytest.raises(error, match=words):
        talk(engine.url, answer)


def test_signs_of_life_without_a_word_are_silence(engine):
    engine.say("m", Script.of("x", end="pings"))

    async def body(client):
        async with asyncio.timeout(3):
            return [delta async for delta in client.stream_chat("m", ASK, sampling={}, silence_seconds=0.3)]

    with pytest.raises(EngineSilent, match=r"no answer for 0\.3 s"):
        talk(engine.url, body)


def test_a_model_that_thinks_aloud_is_not_silent(engine):
    engine.say("m", Script.of("x", thoughts=6))

    async def body(client):
        return [delta.text async for delta in client.stream_chat("m", ASK, sampling={}, silence_seconds=0.4)]

    assert talk(engine.url, body) == ["x", ""]


ODD = (
    {"error": None, "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": {"why": 1}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
)


@pytest.mark.parametrize(
    "usage",
    [{"prompt_tokens": {}}, {"prompt_tokens": 2**40, "completion_tokens": -1}, [7], {"prompt_tokens_details": 3}],
)
def test_what_is_odd_beside_an_answer_loses_nothing_of_it(usage):
    """Neither an error that is none, nor a reason or a count that cannot be kept."""
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in (*ODD, {"choices": [], "usage": usage}))
    with answering_once(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + lines.encode()) as url:
        text, last = talk(url, answer)
    assert (text.text, last.finish_reason) == ("Hi", "stop")
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (None, None, None)


def test_nobody_listening_is_unreachable():
    with nobody_listens() as url, pytest.raises(EngineUnreachable):
        talk(url, answer)
    with pytest.raises(EngineUnreachable, match="starting"):
        talk(lambda: None, answer)


@contextlib.contextmanager
def answering_once(reply: bytes):
    """A server that sends these bytes to its first caller; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # to close before all is read would reset what was sent
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhm?", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"],
    ids=["no JSON", "no HTTP", "empty"],
)
def test_a_server_that_is_no_engine_is_an_engine_error(reply):
    with answering_once(reply) as url, pytest.raises((EngineRefused, EngineUnreachable)):
        talk(url, lambda client: client.listed_models(2))


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b'{"models": [1]}', b'{"models": [{"name": "x"}]}'])
def test_what_lists_models_in_another_form_is_no_engine_of_ours(body):
    with (
        answering_once(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as url,
        pytest.raises(EngineRefused, match="not that of an engine of ours"),
    ):
        talk(url, lambda client: client.models())


def test_refusal_without_a_word_is_told_by_its_status():
    with (
        answering_once(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url,
        pytest.raises(EngineRefused, match=r"^HTTP 404: Not Found$"),
    ):
        talk(url, lambda client: client.listed_models(2))


def test_models_are_put_listed_and_taken_away(engine):
    async def body(client):
        await client.put_model("a b", ModelSpec("path:/x", "Be brief.", {"seed": 1}))
        put = await client.models()
        await client.delete_model("a b")
        await client.delete_model("a b")
        return put, await client.models(), await client.count_tokens("m", ASK)

    put, left, count = talk(engine.url, body)
    assert put["a b"].status == "ready" and put["a b"].system_prompt_tokens == 2
    assert "a b" not in left and count == 1


def test_a_redirect_is_not_followed(engine):
    reply = f"HTTP/1.1 302 Found\r\nLocation: {engine.url}/v1/models\r\nContent-Length: 0\r\n\r\n".encode()
    with answering_once(reply) as url, pytest.raises(EngineRefused, match="302"):
        talk(url, lambda client: client.listed_models(2))
