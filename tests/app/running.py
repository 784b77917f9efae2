"""The website on a real socket, in a thread of the test's process, and a visitor who talks to it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx

from app import serving
from app.config import AppConfig
from app.services import Services, build_services
from app.web import create_app
from db import queries
from db.connect import Database
from tests.databases import migrated_file
from tests.waiting import until

T = TypeVar("T")

ADMIN_PASSWORD = "a long enough password"
SHIPPED_GRACE_SECONDS = AppConfig().reader_grace_seconds
PATIENT = {"sync_seconds": 0.1, "reader_grace_seconds": 20.0}  # no pause of a busy machine ends a turn


class Website:
    """Serves until the block ends. `models`: (name, source) rows of a new database; without them the shipped ones."""

    def __init__(
        self,
        folder: Path,
        *,
        engine_url: str = "",
        models: Sequence[tuple[str, str]] | None = (("alpha", "path:/alpha"), ("beta", "path:/beta")),
        sampling: dict[str, Any] | None = None,
        views: bool = False,
        **settings: Any,
    ):
        """`views` False leaves Gradio's pages out, which take a second to mount; the rest is what it always is."""
        self.folder = folder
        self._views = views
        values = {"data_folder": folder, "engine_url": engine_url, "admin_password": ADMIN_PASSWORD, "port": 0}
        self.config = AppConfig(**(values | PATIENT | settings))
        if models is not None:
            fill(self.config.database, models, sampling or {})

    def __enter__(self) -> Website:
        self.listening = serving.bind("127.0.0.1", 0)
        self.url = serving.address_of(self.listening)
        self.services = build_services(self.config)
        self._loop = asyncio.new_event_loop()
        make_app = serving.make_app if self._views else without_views
        self._website = serving.Website(self.services, self.listening, make_app=make_app)
        self._thread = threading.Thread(target=self._run, name="website", daemon=True)
        self._thread.start()
        until(lambda: self._website.serves or not self._thread.is_alive(), seconds=30)
        return self

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._website.run())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._website.end)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the website did not end"
        self.listening.close()

    def ready(self, models: int = 2) -> Website:
        until(lambda: httpx.get(f"{self.url}/api/status").json()["ready_models"] >= models, seconds=60)
        return self

    def visitor(self, *, accepts: bool = True, **headers: str) -> Visitor:
        visitor = Visitor(self.url, headers)
        if accepts:
            visitor.post("/api/notice").raise_for_status()
        return visitor

    def in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it where the website runs, as a view would."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def database(self) -> Database:
        return Database(self.config.database)


def without_views(services: Services):
    return create_app(services, mount_views=lambda *args, **named: None)


def fill(url: str, models: Sequence[tuple[str, str]], sampling: dict[str, Any]) -> None:
    database = Database(url)
    if database.is_sqlite and not Path(database.url.database).exists():
        shutil.copy(migrated_file(), database.url.database)
    else:
        database.upgrade_to_head()
    with database.session() as session:
        known = {model.name for model in queries.models(session, retired=True)}
        for name, source in models:
            if name not in known:
                queries.add_model(session, name=name, source=source, sampling=sampling, now=datetime.now(UTC))
    database.close()


@dataclass
class Event:
    id: int
    name: str
    data: dict
    at: float


@dataclass
class Reading:
    """What one reader of a battle's events was told."""

    events: list[Event] = field(default_factory=list)
    raw: bytes = b""

    def html(self, side: str) -> str:
        blocks: dict[int, str] = {}
        for event in self.events:
            if event.data.get("side") == side and event.name == "block":
                blocks[event.data["block"]] = event.data["html"]
            elif event.data.get("side") == side and event.data["state"] == "streaming":
                blocks.clear()
        return "".join(blocks[number] for number in sorted(blocks))

    def side_states(self, side: str) -> list[str]:
        return [each.data["state"] for each in self.events if each.name == "side" and each.data["side"] == side]

    @property
    def state(self) -> str:
        return [event.data["state"] for event in self.events if event.name == "state"][-1]

    @property
    def last_id(self) -> int:
        return self.events[-1].id if self.events else 0


class Visitor(httpx.Client):
    def __init__(self, url: str, headers: dict[str, str] | None = None):
        super().__init__(base_url=url, headers=headers, timeout=30, trust_env=False)

    def __enter__(self) -> Visitor:
        return self  # httpx counts a client that has sent something as entered

    def __exit__(self, *raised: object) -> None:
        self.close()

    def ask(self, prompt: str = "Why is the sky blue?") -> str:
        response = self.post("/api/battles", json={"prompt": prompt})
        response.raise_for_status()
        return response.json()["battle"]

    def read(self, battle: str, *, after: int = 0, stop: Callable[[Reading], bool] = lambda reading: False) -> Reading:
        """Reads until the stream ends, or `stop` is true after an event and the reader hangs up."""
        reading = Reading()
        headers = {"Last-Event-ID": str(after)} if after else {}
        with self.stream("GET", f"/api/battles/{battle}/events", headers=headers, timeout=60) as response:
            response.raise_for_status()
            for event in events_of(response, reading):
                reading.events.append(event)
                if stop(reading):
                    break
        return reading

    def battle(self, prompt: str = "Why is the sky blue?") -> tuple[str, Reading]:
        battle = self.ask(prompt)
        return battle, self.read(battle)

    def vote(self, battle: str, kind: str = "a") -> httpx.Response:
        return self.post(f"/api/battles/{battle}/vote", json={"kind": kind})

    def snapshot(self, battle: str) -> dict:
        response = self.get(f"/api/battles/{battle}")
        response.raise_for_status()
        return response.json()


def events_of(response: httpx.Response, reading: Reading) -> Iterator[Event]:
    rest = b""
    for chunk in response.iter_raw():
        reading.raw += chunk
        *found, rest = (rest + chunk).split(b"\n\n")
        for each in found:
            fields = dict(line.split(b": ", 1) for line in each.split(b"\n") if not line.startswith(b":"))
            if b"data" in fields:
                data = json.loads(fields[b"data"])
                yield Event(int(fields[b"id"]), fields[b"event"].decode(), data, time.monotonic())


@contextmanager
def nobody_listens() -> Iterator[str]:
    """An address on a port that is taken, and refuses who comes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
