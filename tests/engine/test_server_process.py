"""The engine as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

import kernels
from engine.child import register
from engine.config import EngineConfig
from engine.core import Engine
from engine.server import EngineServer
from tests.engine.server_fixture import EngineProcess, TinyModel

SERVE = [sys.executable, "-m", "engine", "serve", "--kv-memory-bytes", "4MiB", "--backend", "reference"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_at_once_and_tells_those_who_wait(number):
    engine = EngineProcess([TinyModel("m")])
    body = {"model": "m", "prompt": "the", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", engine.url + "/v1/completions", json=body, timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        began = time.monotonic()
        os.kill(engine.pid, number)
        events = [line for line in lines if line]
    assert engine._child.process.wait(60) == 0
    assert time.monotonic() - began < 10  # a quarter of a second on an idle machine
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    engine.close()


def test_killed_engine_comes_back_on_its_port_without_models():
    with EngineProcess([TinyModel("m")]) as engine:
        url = engine.url
        engine.kill9()
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
        engine.restart()
        assert engine.url == url
        assert httpx.get(url + "/models").json() == {"models": []}


def test_one_line_of_json_says_where_it_listens():
    process = subprocess.Popen([*SERVE, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        line = json.loads(process.stdout.readline())
        assert line["ready"] is True
        assert httpx.get(line["url"] + "/health").status_code == 200
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=60)
    assert rest == ""


def test_engine_ends_with_the_process_that_started_it():
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({[*SERVE, '--port', '0', '--exit-with-parent']!r}, stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline().decode().strip(), flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    url = json.loads(parent.stdout.readline())["url"]
    assert httpx.get(url + "/health").status_code == 200
    parent.kill()
    parent.wait()
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        try:
            httpx.get(url + "/health", timeout=2)
        except httpx.TransportError:
            return
        time.sleep(0.1)
    pytest.fail("the engine still answers")


def test_engine_whose_parent_ended_before_it_could_look_ends_too():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [*SERVE, "--port", "0", "--exit-with-parent", "--parent-pid", str(gone.pid)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "") and "process that started the engine has ended" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["--host", "0.0.0.0"], "no api_key is set", 2),
        (["--dtype", "int3"], "--dtype must be one of", 2),
        (["--config", "/nowhere.toml"], "/nowhere.toml", 2),
        (["--port", "{taken}"], "in use", 1),
        (["--backend", "cpu"], "no C++ compiler found", 1),
    ],
)
def test_it_refuses_to_start_in_one_clear_line(arguments, words, status):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*SERVE, *(argument.replace("{taken}", port) for argument in arguments)]
        nothing_on_the_path = os.environ | {"PATH": ""}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=nothing_on_the_path)
    assert ended.returncode == status
    assert ended.stdout == ""
    assert words in ended.stderr
    assert ended.stderr.startswith("engine: ") and ended.stderr.count("\n") == 1


def test_unknown_variable_of_the_environment_is_named():
    environment = {**os.environ, "ARENA_ENGINE_KV_MEMROY": "1GiB"}
    ended = subprocess.run(SERVE, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 2
    assert "unknown setting: ARENA_ENGINE_KV_MEMROY" in ended.stderr


@pytest.mark.parametrize("stream", [True, False])
def test_process_ends_when_its_engine_thread_does_so_that_it_can_be_restarted(stream):
    code = (
        "import sys\n"
        "from engine import core\n"
        "from engine.__main__ import main\n"
        "step = core.Engine.step\n"
        "def step_until_asked(self):\n"
        "    self._run_commands()\n"
        "    if self._requests:\n"
        "        raise RuntimeError('the memory is on fire')\n"
        "    return step(self)\n"
        "core.Engine.step = step_until_asked\n"
        f"sys.exit(main({[*SERVE[3:], '--port', '0']!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = json.loads(process.stdout.readline())["url"]
    register(url, TinyModel("m").as_dict())
    failed = httpx.post(url + "/v1/completions", json={"model": "m", "prompt": "the", "stream": stream}, timeout=60)
    _, stderr = process.communicate(timeout=60)
    assert failed.status_code in (500, 503)  # of the step that broke, or of the next to ask a dead engine
    assert "the memory is on fire" in failed.json()["error"]["message"]
    assert process.returncode == 1
    assert "the memory is on fire" in stderr


async def asked_health(engine: Engine, config: EngineConfig) -> httpx.Response:
    transport = httpx.ASGITransport(EngineServer(engine, config).app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get("/health")


def test_health_is_bad_and_says_why_when_the_engine_thread_has_ended():
    config = EngineConfig(kv_memory_bytes=2**20, backend="reference", dtype="float32")
    engine = Engine(config, kernels.load("reference"))

    def burn() -> bool:
        raise RuntimeError("the memory is on fire")

    engine.step = burn
    engine.start()
    engine._thread.join(5)
    health = asyncio.run(asked_health(engine, config))
    assert health.status_code == 503
    assert "the memory is on fire" in health.json()["engine_thread"]


def test_health_tells_for_how_long_a_step_has_run():
    config = EngineConfig(kv_memory_bytes=2**20, backend="reference", dtype="float32")
    engine, begun, goes_on = Engine(config, kernels.load("reference")), threading.Event(), threading.Event()
    assert asyncio.run(asked_health(engine, config)).json()["step_seconds"] == 0

    def hang() -> bool:
        begun.set()
        return not goes_on.wait(30)

    engine.step = hang
    engine.start()
    begun.wait()
    time.sleep(0.05)
    assert asyncio.run(asked_health(engine, config)).json()["step_seconds"] >= 0.05
    goes_on.set()
    engine.close()
