"""Plays the battles: one engine, one checkpoint, two models, of which one answers through a relay that slows it.

The arena runs as it always does, in processes of its own on a data folder of its own. A visitor is a real browser
session where there is a browser (Playwright, and a Chromium), or plain HTTP, and the report says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from app.config import AppConfig, environment_without_settings
from app.errors import ArenaError
from app.service_file import running_arena
from db import queries
from db.connect import Database

FAST, SLOW = "kestrel-quick", "tortoise-calm"  # as no answer would have them by chance
INNER = "tortoise-inner"  # the slow one's name on the engine
PROMPTS = (
    "Why is the sky blue?",
    "Write two sentences about rain.",
    "List three uses of a brick.",
    "What is 12 times 12?",
    "Say hello in five languages.",
)
START_SECONDS, BATTLE_SECONDS = 300.0, 120.0
MANY = str(10**6)
SETTINGS = {"ARENA_BATTLES_PER_VISITOR": MANY, "ARENA_BATTLES_PER_ADDRESS": MANY}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Played:
    """One battle as its visitor's side saw it: bytes by address, and when each piece of a side's text came."""

    bodies: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: {"a": [], "b": []})
    ended: dict[str, float] = field(default_factory=dict)
    slow_side: str = ""


@dataclass(frozen=True)
class Setting:
    url: str
    forbidden: tuple[str, ...]  # names, sources, paths and addresses that nobody may be told


@contextlib.contextmanager
def arena(source: str, slow_ms: float, answer_tokens: int) -> Iterator[Setting]:
    """An engine, a relay and an arena on free ports; all of them end with the block. Raises ArenaError."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blindcheck-")))
        engine_url = f"http://127.0.0.1:{free_port()}"
        stack.enter_context(_process(["-m", "engine", "serve", "--port", engine_url.rpartition(":")[2]], folder))
        _wait(lambda: httpx.get(f"{engine_url}/health").status_code == 200, "the engine does not start")
        httpx.put(f"{engine_url}/models/{INNER}", json={"source": source}).raise_for_status()
        relay = stack.enter_context(slowed(engine_url, slow_ms / 1000))
        config = AppConfig(data_folder=folder / "data")
        slow_source = f"openai:{relay}/v1#{INNER}"
        _fill(config, {FAST: source, SLOW: slow_source}, answer_tokens)
        arguments = ["--port", "0", "--engine-url", engine_url, "--data-folder", str(config.data_folder)]
        stack.enter_context(_process(["-c", "from app.cli import main; main()", "serve", *arguments], folder))
        running = _wait(lambda: running_arena(config), "the arena does not start")
        _wait(
            lambda: httpx.get(f"{running.url}/api/status").json()["ready_models"] == 2,
            "the two models do not get ready",
        )
        yield Setting(running.url, (FAST, SLOW, INNER, source, relay, engine_url, str(folder)))


def _fill(config: AppConfig, models: dict[str, str], answer_tokens: int) -> None:
    config.data_folder.mkdir(parents=True)
    database = Database(config.database)
    database.upgrade_to_head()
    with database.session() as session:
        for name, source in models.items():
            sampling = {"max_tokens": answer_tokens}
            queries.add_model(session, name=name, source=source, sampling=sampling, now=datetime.now(UTC))
    database.close()


@contextlib.contextmanager
def _process(arguments: list[str], folder: Path) -> Iterator[None]:
    with (folder / "output.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment_without_settings() | SETTINGS,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(true, complaint: str):
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        with contextlib.suppress(httpx.HTTPError):
            if value := true():
                return value
        time.sleep(0.2)
    raise ArenaError(f"{complaint} within {START_SECONDS:.0f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def slowed(engine_url: str, pause_seconds: float) -> Iterator[str]:
    """The address of a relay to the engine that waits before each event of a stream: a slower machine."""
    client = httpx.AsyncClient(base_url=engine_url, timeout=None)

    async def models(request: Request) -> Response:
        answer = await client.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def chat(request: Request) -> Response:
        asked = client.build_request("POST", "/v1/chat/completions", content=await request.body())
        asked.headers["Content-Type"] = "application/json"
        answer = await client.send(asked, stream=True)

        async def slowly():
            try:
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        await asyncio.sleep(pause_seconds)
                    yield line + "\n"
            finally:
                await answer.aclose()

        return StreamingResponse(slowly(), answer.status_code, media_type=answer.headers.get("content-type"))

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    port = free_port()
    options = {"log_level": "error", "lifespan": "off", "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=port, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5)


# Visitors


class OverHttp:
    """A visitor without a browser: the calls that the page makes."""

    how = "over HTTP, without a browser"

    def __init__(self, url: str):
        self._client = httpx.Client(base_url=url, timeout=BATTLE_SECONDS)
        self._client.post("/api/notice").raise_for_status()

    def play(self, prompt: str) -> Played:
        played = Played()
        began = time.perf_counter()
        answer = self._client.post("/api/battles", json={"prompt": prompt})
        answer.raise_for_status()
        played.bodies["/api/battles"] = answer.text
        battle = answer.json()["battle"]
        chunks = []
        with self._client.stream("GET", f"/api/battles/{battle}/events") as stream:
            for chunk in stream.iter_bytes():
                chunks.append((time.perf_counter() - began, chunk))
        read_events(played, chunks)
        played.bodies["/api/battles/events"] = b"".join(chunk for _, chunk in chunks).decode()
        played.bodies["/api/battles/snapshot"] = self._client.get(f"/api/battles/{battle}").text
        models = (
            self._client.post(f"/api/battles/{battle}/vote", json={"kind": "tie"}).raise_for_status().json()["models"]
        )
        played.slow_side = next(side for side, name in models.items() if name == SLOW)
        return played

    def close(self) -> None:
        self._client.close()


RECORDER = """
(() => {
  window.__seen = [];
  const real = window.fetch;
  window.fetch = async (...args) => {
    const response = await real(...args);
    const url = response.url;
    if (!response.body) return response;
    const [ours, theirs] = response.body.tee();
    (async () => {
      const reader = theirs.getReader();
      const decoder = new TextDecoder();
      for (;;) {
        const { done, value } = await reader.read().catch(() => ({ done: true }));
        if (done) return;
        window.__seen.push([performance.now() / 1000, url, decoder.decode(value, { stream: true })]);
      }
    })();
    return new Response(ours, { status: response.status, headers: response.headers });
  };
})();
"""


class InBrowser:
    """A visitor with a real browser: every body that the page reads, when it does, and the page itself."""

    def __init__(self, url: str, playwright, executable: str):
        self._browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        self.how = f"in a browser (Chromium {self._browser.version})"
        self._page = self._browser.new_page()
        self._page.add_init_script(RECORDER)
        self._page.set_default_timeout(BATTLE_SECONDS * 1000)
        self._page.request.post(f"{url}/api/notice")
        self._page.goto(url)
        self._state("idle", "votable", "voted")

    def _state(self, *states: str) -> None:
        self._page.wait_for_selector(", ".join(f"html[data-battle={state}]" for state in states))

    def play(self, prompt: str) -> Played:
        page = self._page
        if page.evaluate("document.documentElement.dataset.battle") != "idle":
            page.click("#new-battle")
            self._state("idle")
        began = page.evaluate("(window.__seen = [], performance.now() / 1000)")
        page.locator("#prompt textarea").fill(prompt)
        page.locator("#prompt textarea").press("Enter")
        self._state("votable")
        seen = page.evaluate("window.__seen")
        played = Played(bodies={"the page": page.content()})
        for _, url, text in seen:
            played.bodies[url] = played.bodies.get(url, "") + text
        chunks = [(at - began, text.encode()) for at, url, text in seen if "/events" in url]
        read_events(played, chunks)
        page.click("#vote-tie")
        self._state("voted")
        shown = {side: page.locator(f"#chat-{side} h2").first.inner_text() for side in "ab"}
        played.slow_side = next(side for side, name in shown.items() if name == SLOW)
        return played

    def close(self) -> None:
        self._browser.close()


def read_events(played: Played, chunks: list[tuple[float, bytes]]) -> None:
    """When each side's pieces came and when it ended. An event counts from when its last byte was there."""
    rest = b""
    for at, chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            for line in event.splitlines():
                if line.startswith(b"data: "):
                    _note(played, at, json.loads(line[6:]))


def _note(played: Played, at: float, data: dict) -> None:
    side = data.get("side")
    if side and "html" in data:
        played.times[side].append(at)
    elif side and data.get("state") != "streaming":
        played.ended[side] = at


@contextlib.contextmanager
def visitor(url: str, *, over_http: bool) -> Iterator[OverHttp | InBrowser]:
    """A browser where there is one, unless plain HTTP is asked for."""
    executable = None if over_http else next(filter(None, map(shutil.which, CHROMIUM)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        executable = None
    if executable is None:
        with contextlib.closing(OverHttp(url)) as plain:
            yield plain
        return
    with sync_playwright() as playwright, contextlib.closing(InBrowser(url, playwright, executable)) as browser:
        yield browser


def battles(visiting: OverHttp | InBrowser, number: int, rng: random.Random) -> Iterator[Played]:
    for _ in range(number):
        yield visiting.play(rng.choice(PROMPTS))
