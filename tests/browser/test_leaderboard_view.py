"""The leaderboard shows what /api/leaderboard says, and goes with the votes."""

from __future__ import annotations

import re

import httpx
import pytest

from app.errors import BadInput
from app.leaderboard.cli import as_text
from app.leaderboard.exports import as_markdown, as_svg
from app.leaderboard.sheet import Sheet, make_sheet
from app.leaderboard.votes import RULES, Selection, Votes
from app.ratings import METHODS, Games
from app.views.leaderboard import Offered, render
from app.views.words import LANGUAGES, said_in, words_for


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


def test_few_votes_are_not_spoken_of_with_confidence():
    early, later = drawn([("a", "b", 1.0)]), drawn([("a", "b", 1.0)] * 15 + [("a", "b", 0.0)] * 10)
    html = render(early, words_for("en"))
    assert "far too early to say" in html and "a has 1 and b 1" in html
    assert "leads" not in html and "points" not in html.replace("100 points more", "").replace("In rating points", "")
    beside = make_sheet(Votes.of_games(Games.of([("a", "b", 1.0), ("b", "a", 1.0)])), Selection(position=True))
    assert "too few votes to tell" in render(beside, words_for("en"))
    assert "far too early" not in render(later, words_for("en"))
    assert "leads" in render(later, words_for("en"))


@pytest.mark.parametrize("votes", [1, 2])
def test_one_vote_is_one_vote(votes):
    found = drawn([("a", "b", 1.0)] * votes)
    html = render(found, words_for("en"))
    told = html + as_text(found) + as_markdown(found) + as_svg(found) + " ".join(found.board.notes)
    assert re.search(rf"(?<![\d,]){votes} votes?\b", told)
    assert not re.search(r"(?<![\d,])1 (?:votes|models|rows)\b", told)


def test_category_says_its_rule_in_the_language_of_the_page():
    found = drawn([("a", "b", 1.0)])
    for language in LANGUAGES:
        html = render(found, words_for(language))
        assert words_for(language)["rule_of_multi_turn"] in html
    assert "The conversation has two" not in html


def test_view_that_there_is_not_is_refused_in_every_language():
    with pytest.raises(BadInput) as refused:
        Selection(method="elo", style=True)
    assert said_in(words_for("en"), refused.value) == "Elo cannot hold style or position constant"
    assert said_in(words_for("zh"), refused.value) == "Elo 无法固定风格或位置的影响。"
    assert all(f"rule_{rule}" in words_for("zh") for rule in RULES)


@pytest.mark.parametrize(
    ("selection", "offered"),
    [
        (Selection(), {"bt", "davidson", "elo"}),
        (Selection(position=True), {"bt", "davidson"}),
        (Selection(propensity=True), {"bt", "davidson"}),
        (Selection(ci="sandwich"), {"bt", "davidson"}),
        (Selection(cluster=True), {"bt", "davidson"}),
        (Selection(method="elo"), {"bt", "davidson", "elo"}),
    ],
)
def test_form_offers_only_methods_that_go_with_the_rest(selection, offered):
    html = render(make_sheet(Votes.of_games(Games.of([("a", "b", 1.0)])), Selection()), words_for("en"))
    assert " disabled" not in html
    found = {name for name in METHODS if Offered.of(name, selection, words_for("en")).not_here is None}
    assert found == offered


def test_filters_never_lead_to_a_view_that_there_is_not(site, open_site):
    visitor = site.visitor()
    visitor.vote(visitor.battle()[0])
    visit = open_site(site, "/leaderboard?style=1")
    option = visit.page.locator("select[name=method] option[value=elo]")
    assert option.is_disabled()
    assert "cannot hold style" in option.get_attribute("title")
    visit.page.click(".switch")
    visit.drawn().page.select_option("select[name=method]", "elo")
    visit.page.click("form button")
    visit.drawn()
    assert visit.page.locator(".note.bad").count() == 0
    assert "method=elo" in visit.page.url


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
