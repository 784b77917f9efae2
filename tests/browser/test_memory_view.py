"""The memory view in a browser: the map moves while a battle streams, and its numbers are the engine's."""

from __future__ import annotations

import pytest

from tests.app.running import ADMIN_PASSWORD, Website
from tests.engine.server_fixture import EngineProcess, TinyModel

SYSTEM = "You are a kind and patient teacher who explains everything to children with many examples."
MODELS = (TinyModel("zebra-one", system_prompt=SYSTEM), TinyModel("giraffe-two", family="gemma3"))
PICTURE = "document.getElementById('pages').toDataURL()"
SHOWN = "Object.fromEntries([...document.querySelectorAll('[data-figure]')].map((each) => [each.dataset.figure, each.textContent]))"  # noqa: E501


@pytest.fixture(scope="module")
def engine_process():
    with EngineProcess() as engine:
        yield engine


@pytest.fixture(scope="module")
def real_site(engine_process, tmp_path_factory):
    models = [(model.name, model.source) for model in MODELS]
    sampling = {"ignore_eos": True, "max_tokens": 120}
    folder = tmp_path_factory.mktemp("memory")
    with Website(folder, engine_url=engine_process.url, models=models, sampling=sampling, views=True) as site:
        for name in ("zebra-one",):
            site.in_loop(site.services.registry.change(name, system_prompt=SYSTEM))
        yield site.ready()


def live(visit):
    return visit.eventually("document.documentElement.dataset.memory === 'live'")


def counted(visit, state: str) -> int:
    return int(visit.page.evaluate(SHOWN)[f"pages.{state}"].replace(",", ""))


def test_map_moves_while_a_battle_streams_and_names_nobody(real_site, open_site):
    visit = live(open_site(real_site, "/memory"))
    before = visit.page.evaluate(PICTURE)
    visitor = real_site.visitor()
    battle = visitor.ask("word " * 40)
    reading = visitor.read(battle, stop=lambda reading: visit.page.evaluate(PICTURE) != before)
    assert reading.state == "streaming", "the map changed before the answers ended"
    assert visit.page.evaluate("document.documentElement.hasAttribute('data-estimated')")
    assert "mean size" in visit.page.inner_text("#memory-status")
    visitor.read(battle)
    assert not any(model.name in visit.page.content() for model in MODELS)
    visitor.vote(battle)
    visit.eventually("!document.documentElement.hasAttribute('data-estimated')")


def test_numbers_are_those_of_kv(real_site, open_site, engine_process):
    visitor = real_site.visitor()
    battle, _ = visitor.battle()
    visitor.vote(battle)
    visit = open_site(real_site, "/admin/login").signed_in(ADMIN_PASSWORD).go("/memory")
    kv = engine_process.kv()
    live(visit).eventually("[...document.querySelectorAll('[data-figure=\"pages.cached\"]')][0].textContent !== '–'")
    assert counted(visit, "cached") == kv["pages"]["cached"] > 0
    assert counted(visit, "free") == kv["pages"]["free"]
    assert counted(visit, "pinned") == kv["pages"]["pinned"] > 0
    visit.eventually("document.querySelectorAll('#memory-models tbody tr').length === 2")
    assert {"zebra-one", "giraffe-two"} <= set(visit.page.inner_text("#memory-models tbody").split())
    painted = visit.page.evaluate("[document.getElementById('pages').width, document.getElementById('pages').height]")
    assert min(painted) > 20


def test_page_is_told_in_words_to_pointer_and_keyboard(real_site, open_site):
    visit = live(open_site(real_site, "/memory"))
    visit.page.hover("#pages", position={"x": 3, "y": 3})
    visit.page.wait_for_selector("#page-said:has-text('Page 0: part of a system prompt')")
    visit.page.focus("#pages")
    visit.page.keyboard.press("End")
    visit.page.wait_for_selector("#page-said:has-text('free')")


def test_engine_that_is_away_is_told_and_the_page_fits_a_phone(site, open_site):
    visit = open_site(site, "/memory?lang=zh", phone=True)
    visit.eventually("document.documentElement.dataset.memory === 'away'")
    assert "引擎" in visit.page.inner_text("#memory-status")
    assert visit.overflow() == 0
