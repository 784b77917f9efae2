"""The whole product once: browser, website and the real engine over tiny checkpoints."""

from __future__ import annotations

import re

import httpx
import playwright.sync_api
import pytest

from tests.app.running import ADMIN_PASSWORD, Website
from tests.engine.server_fixture import EngineProcess, TinyModel
from tests.waiting import until

LLAMA = TinyModel("zebra-one")
GEMMA = TinyModel("giraffe-two", family="gemma3")


@pytest.fixture(scope="module")
def engine_process():
    with EngineProcess() as engine:
        yield engine


@pytest.fixture(scope="module")
def real_site(engine_process, tmp_path_factory):
    models = [(model.name, model.source) for model in (LLAMA, GEMMA)]
    folder = tmp_path_factory.mktemp("real")
    with Website(folder, engine_url=engine_process.url, models=models, views=True, answer_tokens=40) as site:
        yield site.ready()


def test_nothing_that_reaches_the_browser_names_a_model_before_the_vote(real_site, open_site):
    received = []
    visit = open_site(real_site)
    visit.page.on("response", lambda answer: received.append(answer))
    visit.go("/").ask("Who are you?").ask("And now?")
    texts = [f"{answer.url} {answer.all_headers()} {body_of(answer)}" for answer in received]
    battle = visit.battle()
    for path in (f"/api/battles/{battle}", f"/api/battles/{battle}/events?after=0"):
        texts.append(visit.page.request.get(real_site.url + path).text())
    texts.append(visit.page.content())
    marks = [LLAMA.name, GEMMA.name, LLAMA.source, GEMMA.source, "prompt_tokens", "completion_tokens"]
    found = [(mark, text[:200]) for text in texts for mark in marks if mark in text]
    assert found == []
    assert any("event: block" in text for text in texts)
    visit.vote("a")
    shown = {visit.page.inner_text(f"#chat-{side} h2 >> nth=0") for side in "ab"}
    assert shown == {LLAMA.name, GEMMA.name}


def body_of(answer) -> str:
    """Of what the browser still has: not of a stream, nor of a page that was left, which was before any question."""
    is_text = re.search(r"json|html|javascript|css|svg", answer.headers.get("content-type", ""))
    try:
        return answer.body().decode() if is_text and answer.status == 200 else ""
    except playwright.sync_api.Error:
        return ""


def test_model_is_registered_loaded_and_fights_without_a_restart(real_site, open_site, engine_process):
    visit = open_site(real_site, "/admin/login").signed_in(ADMIN_PASSWORD).go("/admin")
    assert re.search(r"KV pool: \d+% in use", visit.page.inner_text("#admin-head"))
    visit.register(name="ostrich-three", source=LLAMA.source, system_prompt="Be brief.", temperature="0.2")
    visit.model("ostrich-three").locator(".chip.ready").wait_for()
    for name in (LLAMA.name, GEMMA.name):
        visit.model(name).locator(".chip.ready").wait_for()
    visit.register(name="lost", source="path:/not/there")
    visit.model("lost").locator(".chip.failed").wait_for()
    visit.page.get_by_role("button", name=f"Disable {GEMMA.name}").click()
    visit.model(GEMMA.name).locator(".chip.disabled").wait_for()
    until(lambda: httpx.get(f"{real_site.url}/api/status").json()["ready_models"] == 2)
    visit.go("/").ask("Who are you?").vote("b")
    assert "ostrich-three" in visit.page.inner_text("#reveal")


def test_crash_of_the_engine_is_one_neutral_sentence_and_the_battle_goes_on(real_site, open_site, engine_process):
    visit = open_site(real_site)
    visit.ask("word " * 60, until=None).until("streaming", "votable")
    engine_process.kill9()
    visit.until("interrupted", "votable")
    if visit.state == "interrupted":
        sentences = set(visit.page.locator(".missing").all_inner_texts())
        assert sentences == {"This answer could not be finished."}
    engine_process.restart()
    real_site.ready()
    visit.page.click("#regenerate")
    visit.until("votable")
