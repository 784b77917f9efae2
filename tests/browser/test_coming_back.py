"""Reloads, closed tabs, lost connections and second tabs: the battle is the database's, not the page's."""

from __future__ import annotations

import pytest

from tests.app.fake_engine import Script
from tests.app.running import SHIPPED_GRACE_SECONDS
from tests.browser.conftest import one_site
from tests.waiting import until

STORY = " ".join(f"word{number}" for number in range(2000))  # more than a minute


@pytest.fixture
def slow(engine):
    for name in ("alpha", "beta"):
        engine.say(name, Script.of(STORY, size=6, pause_seconds=0.04), "An answer at last.")


def words_shown(visit, side: str = "a") -> int:
    return len(visit.page.locator(f"#chat-{side} .blocks").last.inner_text().split())


def test_reload_in_mid_stream_goes_on_from_what_was_shown(site, open_site, slow):
    visit = open_site(site).ask("Tell me a story", until="streaming")
    until(lambda: words_shown(visit) > 8)
    shown, battle = words_shown(visit), visit.battle()
    visit.page.reload()
    visit.until("streaming")
    assert words_shown(visit) >= shown
    until(lambda: words_shown(visit) > shown + 5)
    assert visit.battle() == battle
    assert visit.page.inner_text("#chat-a .blocks").startswith("word0 word1 word2")
    visit.page.click("#stop")
    visit.until("votable")


def test_reload_keeps_pair_and_sides_and_the_vote_stays_possible(site, open_site):
    visit = open_site(site).ask()
    answers = [visit.answer(side) for side in "ab"]
    visit.page.reload()
    visit.until("votable")
    assert [visit.answer(side) for side in "ab"] == answers
    visit.vote("a")


def test_closed_tab_stops_both_sides(engine, open_site, slow, tmp_path):
    """Within two seconds: that is shown where no machine is too slow for it, in tests/app/test_streams.py."""
    with one_site(tmp_path, engine_url=engine.url, reader_grace_seconds=SHIPPED_GRACE_SECONDS) as site:
        visit = open_site(site.ready()).ask("Tell me a story", until="streaming")
        until(lambda: words_shown(visit) > 2)
        assert engine.streaming == 2
        visit.page.close()
        until(lambda: engine.streaming == 0)
        again = open_site(site)
        assert again.state == "interrupted"
        assert "interrupted" in again.page.inner_text("#banner")
        assert not again.page.locator("#vote-a").is_visible()
        again.page.click("#regenerate")
        again.until("votable")
        assert again.answer("a") == "An answer at last."


def test_lost_connection_is_said_and_the_stream_goes_on(site, open_site, slow):
    visit = open_site(site).ask("Tell me a story", until="streaming")
    until(lambda: words_shown(visit) > 8)
    page, tried, network = visit.page, [], {"is_gone": True}

    def route(route):
        tried.append(route.request.url)
        route.abort() if network["is_gone"] else route.continue_()

    page.route("**/events*", route)
    page.evaluate("dispatchEvent(new Event('offline'))")  # what a browser says when the network goes
    page.wait_for_selector("#banner .note.bad")
    assert page.inner_text("#banner") == "Connection lost. Trying again…"
    shown = words_shown(visit)
    network["is_gone"] = False
    page.wait_for_selector("#banner .note", state="detached")
    until(lambda: words_shown(visit) > shown + 5)
    assert tried and all("after=" in url and "after=0" not in url for url in tried)
    page.click("#stop")
    visit.until("votable")


def test_second_tab_learns_that_the_first_has_voted(site, open_site):
    first = open_site(site).ask()
    second = open_site(site)
    assert second.state == "votable"
    first.vote("a")
    second.page.click("#vote-b")
    second.until("voted")
    assert second.page.locator("#chat-a[data-chosen]").count() == 1


def test_second_tab_follows_when_it_is_looked_at(site, open_site, engine):
    first, second = open_site(site).ask(), open_site(site)
    engine.say("alpha", "Another answer.")
    engine.say("beta", "Another answer.")
    first.page.click("#regenerate")
    until(lambda: first.state == "votable" and first.answer("a") == "Another answer.")
    assert second.answer("a") != "Another answer."
    second.page.evaluate("dispatchEvent(new Event('focus'))")
    until(lambda: second.answer("a") == "Another answer.")
    first.vote("a")
    second.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert names(second) == names(first)


def names(visit) -> list[str]:
    visit.until("voted")
    assert visit.page.locator("#reveal .thanks").is_visible()
    return visit.page.locator("#reveal .names strong").all_inner_texts()


def test_voted_battle_is_found_again_with_its_names_until_the_visitor_goes_on(site, open_site):
    visit = open_site(site).ask().vote("b")
    shown, answer = names(visit), visit.answer("a")
    visit.page.reload()
    assert (names(visit.drawn()), visit.answer("a")) == (shown, answer)
    visit.page.click("#reveal a")
    visit.page.wait_for_url("**/leaderboard")
    visit.page.go_back()
    assert names(visit.drawn()) == shown
    assert visit.page.locator("#chat-b[data-chosen]").count() == 1
    visit.page.click("#new-battle")
    visit.page.reload()
    assert visit.drawn().state == "idle"


def test_tab_that_learns_of_the_vote_from_another_finds_the_names_again_too(site, open_site):
    first, second = open_site(site).ask(), open_site(site)
    first.vote("a")
    second.page.click("#vote-b")
    shown = names(second)
    second.page.reload()
    assert names(second.drawn()) == shown == names(first)


def test_new_question_after_a_vote_is_what_a_reload_finds(site, open_site):
    visit = open_site(site).ask().vote("a").ask("And why is grass green?")
    visit.page.reload()
    assert visit.drawn().until("votable").page.inner_text("#chat-a .question-text") == "And why is grass green?"


def test_refusal_is_in_the_language_of_the_page(site, open_site):
    first = open_site(site).ask()
    second = open_site(site, "/?lang=zh")
    first.vote("a")
    second.page.click("#vote-b")
    names(second)
    assert second.page.inner_text("#banner") == "这场对战已经投过票了。"
    second.go("/?lang=en")


def test_fewer_than_two_ready_models_is_said_and_the_page_goes_on_when_there_are_two(engine, open_site, tmp_path):
    engine.loading.add("gamma")
    try:
        with one_site(tmp_path, engine_url=engine.url, models=[("alpha", "path:/a"), ("gamma", "path:/c")]) as website:
            website.ready(1)
            visit = open_site(website)
            visit.page.wait_for_selector("#not-ready")
            assert "/admin" in visit.page.inner_text("#not-ready")
            assert not visit.page.locator("#composer").is_visible()
            engine.loading.clear()
            visit.page.wait_for_selector("#composer")
            assert visit.page.locator("#not-ready").count() == 0
    finally:
        engine.loading.clear()


def test_second_tab_follows_what_the_first_has_asked(site, open_site, slow):
    first = open_site(site).ask("Tell me a story", until="streaming")
    until(lambda: words_shown(first) > 2)
    second = open_site(site)
    assert second.state == "streaming"
    first.page.click("#stop")
    second.until("votable")
    first.until("votable").ask("And the end?")
    second.page.click("#regenerate")
    second.until("votable")
    assert second.page.locator("#chat-a .question-text").all_inner_texts() == ["Tell me a story", "And the end?"]
    assert second.answer("a") == first.answer("a") == "An answer at last."
