"""Blind by construction: every byte that reaches a browser before its vote, searched for what would tell the models."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.app.fake_engine import FakeEngine, Script
from tests.app.running import Reading, Website, events_of

NAMES = ("zephyr-secret-7b", "quokka-hidden-13b")
SOURCES = ("path:/srv/weights/zephyr", "path:/srv/weights/quokka")


@pytest.fixture(scope="module")
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def site(engine, tmp_path_factory):
    """With Gradio's pages, as a visitor meets it."""
    models = list(zip(NAMES, SOURCES, strict=True))
    sampling = {"temperature": 0.123}
    with Website(
        tmp_path_factory.mktemp("blind"), engine_url=engine.url, models=models, sampling=sampling, views=True
    ) as site:
        yield site.ready()


class Recorder(httpx.Client):
    """Keeps all that was received, headers and bodies."""

    def __init__(self, url: str):
        self.received: list[bytes] = []
        super().__init__(base_url=url, timeout=30, trust_env=False, event_hooks={"response": [self._keep]})

    def _keep(self, response: httpx.Response) -> None:
        self.received.append(str(response.status_code).encode() + b" " + repr(response.headers.multi_items()).encode())
        if "event-stream" not in response.headers.get("content-type", ""):
            self.received.append(response.read())

    def read(self, battle: str) -> Reading:
        reading = Reading()
        with self.stream("GET", f"/api/battles/{battle}/events") as response:
            reading.events = list(events_of(response, reading))
        self.received.append(reading.raw)
        return reading

    def everything(self) -> str:
        return b"\n".join(self.received).decode("utf-8", "replace")


def test_nothing_before_the_vote_tells_the_models(site, engine):
    engine.say(NAMES[0], "An answer. " * 20, Script.of("x", end="error"), "Another.")
    engine.say(NAMES[1], Script.of("One more answer. " * 9, pause_seconds=0.01), "Short.")
    browser = Recorder(site.url)
    browser.get("/")
    browser.get("/config")
    browser.get("/gradio_api/info")
    browser.get("/openapi.json")
    browser.get("/api/status")
    browser.post("/api/notice")
    browser.post("/api/count", json={"prompt": "How many?"})
    battle = browser.post("/api/battles", json={"prompt": "Who are you?"}).json()["battle"]
    browser.post(f"/api/battles/{battle}/vote", json={"kind": "a"})
    browser.read(battle)
    browser.get("/")
    browser.get("/api/battles/current")
    browser.get(f"/api/battles/{battle}")
    browser.post(f"/api/battles/{battle}/turns", json={"prompt": "And now?"})
    failed = browser.read(battle)
    assert failed.state == "interrupted"
    browser.get(f"/api/battles/{battle}")
    browser.post(f"/api/battles/{battle}/turns", json={"prompt": "x"})
    browser.post(f"/api/battles/{battle}/regenerate")
    assert browser.read(battle).state == "votable"
    browser.get(f"/api/battles/{battle}")
    browser.get("/api/admin/models")

    seen = browser.everything()
    for told in (*NAMES, *SOURCES, "zephyr", "quokka", engine.url, "0.123", "path:/"):
        assert told not in seen, told
    answers = "".join(part for part in seen.split("\n") if part.startswith("data: "))
    assert not re.search(r'"\w*(token|usage|finish|model|first|duration|_ms|cached)\w*":', answers)

    revealed = browser.post(f"/api/battles/{battle}/vote", json={"kind": "tie"})
    assert set(revealed.json()["models"].values()) == set(NAMES), "the search would have found them"


def test_which_model_is_on_which_side_is_a_fair_coin(site, engine):
    engine.scripts.clear()
    sides = []
    visitor = site.visitor()
    while set(sides) != set(NAMES):
        assert len(sides) < 40, "the chance of one side only is 1 in 500,000,000,000"
        battle, _ = visitor.battle()
        sides.append(visitor.vote(battle, "tie").json()["models"]["a"])
