"""The leaderboard shows what /api/leaderboard says, and goes with the votes."""

from __future__ import annotations

import httpx

from app.leaderboard_sheet import Sheet, make_sheet
from app.leaderboard_votes import Selection, Votes
from app.ratings import Games
from app.views.leaderboard import render
from app.views.words import LANGUAGES, words_for


def drawn(played) -> Sheet:
    return make_sheet(Votes.of_games(Games.of(played)), Selection())


def test_leaderboard_leads_to_the_first_battle_while_there_is_no_vote():
    html = render(drawn([]), words_for("en"))
    assert "No votes yet" in html
    assert 'href="/"' in html


def test_leaderboard_that_cannot_be_read_says_so():
    assert "cannot be read just now" in render(None, words_for("en"))


def test_name_of_a_model_is_text():
    html = render(drawn([("<script>", "plain", 1.0)]), words_for("en"))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_notes_of_the_board_are_shown_in_both_languages():
    apart = drawn([("a", "b", 1.0), ("c", "d", 0.5)])
    for language in LANGUAGES:
        assert "a, b; c, d" in render(apart, words_for(language))


def test_open_leaderboard_goes_with_the_votes(site, open_site):
    visitor = site.visitor()
    battles = [visitor.battle()[0] for _ in range(2)]
    visitor.vote(battles[0])
    board = open_site(site, "/leaderboard")
    before = board.page.inner_text(".meta span >> nth=0")
    visitor.vote(battles[1])
    board.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    board.eventually(f"document.querySelector('.meta span').textContent !== '{before}'")


def test_rows_are_those_of_the_api(site, open_site):
    visitor = site.visitor()
    for kind in ("a", "b", "tie", "both_bad", "a"):
        battle, _ = visitor.battle()
        visitor.vote(battle, kind)
    board = httpx.get(f"{site.url}/api/leaderboard").json()
    visit = open_site(site, "/leaderboard")
    shown = visit.page.locator("table.board tbody tr")
    assert shown.count() == len(board["rows"]) == 2
    for row, expected in zip(shown.all(), board["rows"], strict=True):
        best, worst = expected["rank_best"], expected["rank_worst"]
        cells = row.locator("td, th").all_inner_texts()
        assert cells[0] == (f"{best}" if best == worst else f"{best}–{worst}")
        assert cells[1] == expected["model"] + " provisional" * expected["provisional"]
        assert cells[2] == f"{expected['rating']:,.0f}"
        assert cells[3].strip().startswith(f"{expected['lower']:,.0f} to {expected['upper']:,.0f}")
        assert cells[4] == f"{expected['votes']:,}"
        assert cells[6] == f"{expected['elo']:,.0f}"


def test_columns_are_explained_to_pointer_and_keyboard(site, open_site):
    visitor = site.visitor()
    visitor.vote(visitor.battle()[0])
    visit = open_site(site, "/leaderboard")
    tip = visit.page.locator("#why-rating")
    assert not tip.is_visible()
    visit.page.hover("th.rating .why")
    assert tip.is_visible()
    visit.page.mouse.move(0, 0)
    visit.page.focus("th.rank .why")
    assert visit.page.locator("#why-rank").is_visible()


def test_view_is_said_by_its_address_and_kept_by_language_and_refresh(site, open_site):
    visitor = site.visitor()
    for kind in ("a", "b"):
        visitor.vote(visitor.battle()[0], kind)
    visit = open_site(site, "/leaderboard?style=1&min_votes=1")
    page = visit.page
    assert page.get_attribute(".switch", "aria-checked") == "true"
    assert page.input_value("input[name=min_votes]") == "1"
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(300)
    assert page.get_attribute(".switch", "aria-checked") == "true"
    page.click(".language")
    visit.drawn()
    assert page.locator("html").get_attribute("lang") == "zh"
    assert page.get_attribute(".switch", "aria-checked") == "true"
    assert page.get_attribute(".permalink", "href") == "?style=1&min_votes=1"


def test_view_that_there_is_not_says_why_and_leads_back(site, open_site):
    visit = open_site(site, "/leaderboard?category=nonsense")
    assert "no category 'nonsense'" in visit.page.inner_text(".note.bad")
    visit.page.click("a.button >> nth=0")
    visit.drawn()
    assert visit.page.locator(".note.bad").count() == 0


def test_every_download_is_the_board_of_the_view(site):
    visitor = site.visitor()
    visitor.vote(visitor.battle()[0])
    for name, kind in (
        ("json", "application/json"),
        ("csv", "text/csv"),
        ("md", "text/markdown"),
        ("svg", "image/svg"),
    ):
        answer = httpx.get(f"{site.url}/api/leaderboard?format={name}")
        assert answer.headers["content-type"].startswith(kind)
        assert "alpha" in answer.text and "beta" in answer.text
    assert httpx.get(f"{site.url}/api/leaderboard?format=exe").status_code == 400
