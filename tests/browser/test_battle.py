"""A battle in a browser: from the notice to the names, with a hand on the mouse or on the keyboard."""

from __future__ import annotations

import httpx
import pytest

from tests.app.fake_engine import Script
from tests.browser.visit import QUESTION

TWICE = "button => { button.click(); button.click() }"
SLOW = Script.of("word " * 400, size=5, pause_seconds=0.03)


def votes_of(site) -> int:
    return httpx.get(f"{site.url}/api/leaderboard").json()["votes"]


def test_battle_goes_from_the_question_to_the_names(site, open_site):
    visit = open_site(site)
    visit.ask(QUESTION)
    assert "A short answer." in visit.answer("a")
    assert "A short answer." in visit.answer("b")
    assert visit.page.locator("#chat-a h2").inner_text() == "Model A"
    visit.vote("b")
    names = [visit.page.locator(f"#chat-{side} h2").first.inner_text() for side in "ab"]
    assert sorted(names) == ["alpha", "beta"]
    assert f"You preferred {names[1]} over {names[0]}." in visit.page.inner_text("#reveal")
    assert visit.page.locator("#chat-b[data-chosen]").count() == 1
    visit.page.click("#reveal a")
    visit.drawn()
    assert "alpha" in visit.page.inner_text("#leaderboard-table")


def test_buttons_show_only_where_they_can_do_something(site, open_site, engine):
    visit = open_site(site)
    parts = ("vote-a", "vote-b", "vote-tie", "vote-bad", "regenerate", "new-battle", "reveal", "stop", "send")

    def visible() -> set[str]:
        return {part for part in parts if visit.page.locator(f"#{part}").is_visible()}

    votes = {"vote-a", "vote-b", "vote-tie", "vote-bad"}
    assert visible() == {"send"}
    engine.say("alpha", SLOW)
    engine.say("beta", SLOW)
    visit.ask(until="streaming").eventually("document.querySelector('#chat-a .blocks').innerText !== ''")
    assert visible() == {"stop", "new-battle"}
    visit.page.click("#stop")
    visit.until("votable")
    assert visible() == {*votes, "regenerate", "new-battle", "send"}
    visit.vote("tie")
    assert visible() == {"reveal", "new-battle", "send"}


def test_several_turns_are_had_before_the_vote_and_the_last_is_regenerated(site, open_site, engine):
    for name in ("alpha", "beta"):
        engine.say(name, "First.", "Second.", "Third.")
    visit = open_site(site)
    visit.ask("one").ask("two")
    assert visit.page.locator("#chat-a .turn").count() == 2
    visit.page.click("#regenerate")
    visit.eventually("document.querySelectorAll('#chat-a .blocks')[1].innerText.includes('Third.')")
    visit.until("votable")
    assert visit.page.locator("#chat-a .blocks").first.inner_text() == "First."
    assert visit.answer("b") == "Third."


def test_new_battle_clears_the_page_and_survives_a_reload(site, open_site):
    visit = open_site(site).ask()
    visit.page.click("#new-battle")
    assert visit.state == "idle"
    visit.page.reload()
    visit.drawn()
    assert visit.state == "idle"
    assert visit.page.locator("#hero").is_visible()


def test_another_battle_is_offered_only_where_there_can_be_one(site, open_site):
    visit = open_site(site).ask().vote()
    switch = site.services.registry.change
    site.in_loop(switch("beta", enabled=False))
    try:
        visit.page.evaluate("dispatchEvent(new Event('focus'))")
        visit.page.wait_for_selector("#not-ready")
        for button in ("new-battle", "rematch", "send"):
            assert not visit.page.locator(f"#{button}").is_visible()
        assert "add or enable models, at /admin" in visit.page.inner_text("#not-ready")
        assert visit.page.locator("#reveal").is_visible()
        visit.page.reload()
        visit.drawn().page.wait_for_selector("#not-ready")
        assert not visit.page.locator("#new-battle").is_visible()
    finally:
        site.in_loop(switch("beta", enabled=True))
    visit.page.wait_for_selector("#new-battle:visible")
    visit.page.click("#new-battle")
    assert visit.state == "idle"


def test_same_question_is_asked_of_another_pair(site, open_site):
    visit = open_site(site).ask("Which way is north?").vote()
    visit.page.click("#rematch")
    visit.until("votable")
    assert visit.page.locator("#chat-a .question").inner_text().endswith("Which way is north?")


def test_notice_is_accepted_once_and_the_waiting_question_goes_out_then(site, open_site):
    visit = open_site(site, accepts=False)
    assert "stored" in visit.page.inner_text("#notice")
    visit.ask(until=None)
    assert visit.state == "idle"
    visit.page.keyboard.press("Enter")  # the focus is on its button
    visit.until("votable")
    assert not visit.page.locator("#notice").is_visible()
    visit.page.reload()
    visit.drawn()
    assert not visit.page.locator("#notice").is_visible()


def test_whole_battle_with_the_keyboard_alone(site, open_site):
    visit = open_site(site)
    page = visit.page
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#prompt') !== null"):
            break
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    visit.until("votable")
    assert page.locator("#chat-a .question-text").inner_text() == "first line\nsecond line"
    page.keyboard.type("1 is typed here and votes for nobody")
    assert visit.state == "votable"
    page.keyboard.press("Alt+4")
    visit.until("voted")
    assert page.evaluate("document.activeElement.id") == "new-battle"
    page.keyboard.press("Enter")
    assert visit.state == "idle"


def test_enter_that_ends_a_composition_does_not_send(site, open_site):
    visit = open_site(site)
    visit.question.fill("にほん")
    enter = {"key": "Enter", "code": "Enter", "isComposing": True, "bubbles": True, "cancelable": True}
    visit.question.dispatch_event("keydown", enter)
    visit.page.wait_for_timeout(200)
    assert visit.state == "idle"


def test_blank_question_is_not_sent(site, open_site):
    visit = open_site(site)
    asked = []
    visit.page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    visit.ask("  \n ", until=None)
    visit.page.click("#send")
    visit.page.wait_for_timeout(200)
    assert visit.state == "idle"
    assert [url for url in asked if url.endswith("/api/battles")] == []


def test_counter_says_both_numbers_before_sending_and_keeps_the_question(site, open_site):
    visit = open_site(site)
    visit.question.fill("word " * 2_000)
    visit.page.wait_for_selector("#counter-text.over")
    said = visit.page.inner_text("#counter-text")
    assert said == "Too long: your message has 2,000 tokens and there is room for 750. Shorten it to send."
    assert visit.page.locator("#send").is_disabled()
    visit.question.press("Enter")
    assert visit.state == "idle"
    visit.question.fill("short")
    visit.eventually("!document.querySelector('#counter-text').classList.contains('over')")
    assert not visit.page.locator("#send").is_disabled()


PUT = "(area, text) => { area.value = text; area.dispatchEvent(new Event('input', { bubbles: true })); }"


@pytest.mark.parametrize(
    "text",
    ["many words " * 3_000, "many words " * 15_000, "a line of some words\n" * 9_000],
    ids=["long", "one line", "lines"],
)
@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_question_box_stays_a_box_however_much_is_in_it(site, open_site, text, phone):
    visit = open_site(site, phone=phone)
    visit.question.evaluate(PUT, text)
    visit.page.wait_for_selector("#counter-text.over")
    box, send = visit.question.bounding_box(), visit.page.locator("#send").bounding_box()
    lines = visit.question.evaluate("area => area.scrollHeight / parseFloat(getComputedStyle(area).lineHeight)")
    assert 30 < box["height"] <= 0.34 * visit.page.viewport_size["height"] + 1
    assert box["height"] < (lines + 2) * 24, "no more than is in it"
    assert box["x"] + box["width"] <= send["x"] + 1
    assert send["y"] + send["height"] <= visit.page.viewport_size["height"]
    assert visit.page.locator("#counter-text").bounding_box()["y"] >= box["y"] + box["height"]


PASTE = """async (area) => {
  const began = performance.now();
  area.value = "word ".repeat(200_000);
  area.dispatchEvent(new Event("input", { bubbles: true }));
  while (!document.querySelector("#counter-text.over")) await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""


def test_paste_of_a_megabyte_is_refused_before_sending_and_freezes_nothing(site, open_site):
    def is_refused_at_once() -> bool:
        visit = open_site(site)
        waited_ms = visit.question.evaluate(PASTE)
        assert visit.page.locator("#send").is_disabled()
        return waited_ms < 3_000  # 400 on an idle machine; 6,000 where the lines are wrapped

    assert any(is_refused_at_once() for _ in range(3))


def test_direction_is_of_the_text_unless_it_has_so_many_lines_that_finding_it_freezes_the_page(site, open_site):
    question = open_site(site).question
    directions = []
    for text in ("مرحبا", "\n" * 2_000 + "a", "line\n" * 990):
        question.evaluate(PUT, text)
        directions.append(question.get_attribute("dir"))
    assert directions == ["auto", "ltr", "auto"]


def test_paste_of_more_lines_than_a_browser_draws_is_refused_before_it_is_in_the_box(site, open_site):
    visit = open_site(site)
    paste = """(area, text) => {
      const clipboardData = new DataTransfer();
      clipboardData.setData("text/plain", text);
      return !area.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
    }"""
    assert not visit.question.evaluate(paste, "line\n" * 900)
    assert visit.question.evaluate(paste, "\n" * 1_000_000)
    assert "20,000 lines" in visit.page.inner_text("#counter-text")
    assert visit.question.input_value() == ""


def test_double_clicks_ask_once_and_vote_once(site, open_site):
    visit = open_site(site)
    posts = []
    visit.page.on("request", lambda request: request.method == "POST" and posts.append(request.url.split("/")[-1]))
    visit.question.fill(QUESTION)
    visit.page.locator("#send").evaluate(TWICE)
    visit.until("votable")
    before = votes_of(site)
    visit.page.locator("#vote-a").evaluate(TWICE)
    visit.until("voted")
    assert votes_of(site) == before + 1
    assert posts.count("battles") == posts.count("vote") == 1


@pytest.mark.parametrize("begun", ["Half an ans", ""], ids=["half", "before its first word"])
def test_side_that_failed_is_tried_again_and_is_no_answer(site, open_site, engine, begun):
    engine.say("alpha", Script.of(begun, end="break"), "A whole answer.")
    visit = open_site(site).ask(until="interrupted")
    failed = "a" if visit.page.locator("#chat-a .retry").count() else "b"
    assert visit.page.inner_text(f"#chat-{failed} .missing") == "This answer could not be finished."
    assert not visit.page.locator("#vote-a").is_visible()
    assert "missing" in visit.page.inner_text("#banner")
    visit.page.click(f"#chat-{failed} .retry")
    visit.until("votable")
    assert visit.answer(failed) == "A whole answer."
    assert visit.page.locator(".missing").count() == 0


def test_example_question_starts_a_battle(site, open_site):
    visit = open_site(site)
    visit.page.click("#hero .example >> nth=1")
    visit.until("votable")
    assert "palindrome" in visit.page.inner_text("#chat-a .question")


def test_reader_who_scrolls_up_is_left_alone_and_can_jump_to_the_end(site, open_site, engine):
    for name in ("alpha", "beta"):
        engine.say(name, Script.of("line\n" * 3000, size=30, pause_seconds=0.05))
    visit = open_site(site).ask(until="streaming")
    page = visit.page
    visit.eventually("document.querySelector('#chat-a .scroll').scrollTop > 100")
    page.evaluate(
        """() => {
            document.querySelector('#chat-a .scroll').scrollTop = 0;
            for (const end = performance.now() + 300; performance.now() < end; ); // more words come before the event
        }"""
    )
    page.wait_for_selector("#chat-a .to-end:visible")
    page.wait_for_timeout(400)
    assert page.evaluate("document.querySelector('#chat-a .scroll').scrollTop") == 0
    page.click("#chat-a .to-end")
    visit.eventually("document.querySelector('#chat-a .scroll').scrollTop > 100")
    page.click("#stop")
    visit.until("votable")


@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_newest_words_stay_in_view_when_the_vote_bar_and_the_names_take_their_room(site, open_site, engine, phone):
    for name in ("alpha", "beta"):
        engine.say(name, "line\n" * 80)
    visit = open_site(site, phone=phone).ask()
    at_the_end = (
        "[...document.querySelectorAll('.scroll')].every((s) => s.scrollHeight - s.scrollTop - s.clientHeight < 2)"
    )
    visit.eventually(f"document.querySelector('#vote-bar').offsetHeight > 0 && {at_the_end}")
    visit.vote("a").eventually(f"document.querySelector('#reveal').offsetHeight > 0 && {at_the_end}")


def test_reader_who_has_scrolled_up_stays_there_when_the_vote_bar_comes(site, open_site, engine):
    for name in ("alpha", "beta"):
        engine.say(name, Script.of("line\n" * 160, size=60, pause_seconds=0.02))
    visit = open_site(site).ask(until="streaming")
    visit.eventually("document.querySelector('#chat-a .scroll').scrollTop > 100")
    visit.page.evaluate("document.querySelector('#chat-a .scroll').scrollTop = 0")
    visit.until("votable").page.wait_for_timeout(300)
    assert visit.page.evaluate("document.querySelector('#chat-a .scroll').scrollTop") == 0
    assert visit.page.locator("#chat-a .to-end").is_visible()


def test_code_is_copied_as_it_was_written(site, open_site, engine):
    for name in ("alpha", "beta"):
        engine.say(name, "```python\nfor i in range(3):\n    print(i)\n```\n")
    visit = open_site(site, permissions=["clipboard-read", "clipboard-write"]).ask()
    assert visit.page.locator("#chat-a .code .k").first.inner_text() == "for"
    visit.page.click("#chat-a .code .copy")
    assert visit.page.evaluate("navigator.clipboard.readText()") == "for i in range(3):\n    print(i)\n"
