"""What every page owes its visitors: a strict policy, names on controls, contrast, narrow screens, light and dark."""

from __future__ import annotations

import re

import httpx
import pytest

from app.views import VIEWS
from tests.app.running import ADMIN_PASSWORD
from tests.browser.conftest import PHONE
from tests.waiting import until

PATHS = [view.path for view in VIEWS]
READABLE = 4.5  # WCAG 2.2, AA, text
TEXT_ON_GROUND = [
    *((ink, ground) for ink in ("ink", "ink-2", "ink-3") for ground in ("bg", "surface")),
    ("ink-2", "sunken"), ("a", "a-soft"), ("b", "b-soft"), ("surface", "a"), ("surface", "b"), ("bg", "ink"),
    ("good", "good-soft"), ("warn", "warn-soft"), ("bad", "bad-soft"), ("bad", "surface"), ("link", "bg"), ("a", "bg"),
]  # fmt: skip
CUT_OFF = """[...document.querySelectorAll("header.site a, header.site button")].filter((each) => {
  const { left, right } = each.getBoundingClientRect();
  const around = (each.closest("nav") ?? document.body).getBoundingClientRect();
  return left < around.left - 1 || right > around.right + 1;
}).map((each) => each.textContent)"""
CONTRAST = """(pairs) => {
  const probe = document.body.appendChild(document.createElement("i"));
  const light = (token) => {
    probe.style.color = `var(--${token})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((value) => value / 255);
    const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  };
  return pairs.map(([ink, ground]) => Math.max(light(ink), light(ground)) / Math.min(light(ink), light(ground)));
}"""


@pytest.mark.parametrize("path", PATHS)
def test_policy_allows_no_script_but_our_own(site, path):
    client = httpx.Client(base_url=site.url)
    client.post("/api/admin/login", json={"password": ADMIN_PASSWORD})
    policies = client.get(path).headers.get_list("content-security-policy")
    assert len(policies) == 1
    rules = dict(rule.split(" ", 1) for rule in policies[0].split("; "))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'self' 'nonce-[\w-]{20,}'", rules["script-src"])
    assert rules["connect-src"] == rules["font-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"


@pytest.mark.parametrize("path", PATHS)
def test_controls_have_names_and_nothing_is_too_wide_for_a_phone(site, open_site, path):
    visit = open_site(site, "/admin/login", phone=True).signed_in(ADMIN_PASSWORD).go(path)
    assert visit.nameless_controls() == []
    assert visit.overflow() == 0
    assert visit.page.evaluate(CUT_OFF) == []
    assert visit.page.title()
    assert visit.page.locator("html").get_attribute("lang") == "en"
    assert visit.page.locator("h1").count() == 1
    assert visit.page.locator("footer:visible, .built-with, .show-api").count() == 0


def test_battle_fits_a_phone_in_every_state(site, open_site, engine):
    wide = "a" * 300 + "\n\n```\n" + "code " * 60 + "\n```\n\n| a | b |\n|---|---|\n| " + "x" * 200 + " | y |\n"
    for name in ("alpha", "beta"):
        engine.say(name, wide)
    visit = open_site(site, phone=True)
    visit.ask("q" * 300)
    assert visit.overflow() == 0
    assert visit.nameless_controls() == []
    seen = visit.page.locator("#chat-b .panel-head")
    assert not is_in_window(seen)
    visit.page.click('#side-tabs [data-side="b"]')
    visit.eventually("document.querySelector('#side-tabs [data-side=b]').getAttribute('aria-pressed') === 'true'")
    until(lambda: is_in_window(seen))
    visit.vote("b")
    assert visit.overflow() == 0
    assert is_in_window(visit.page.locator("#new-battle"))


def is_in_window(locator) -> bool:
    box = locator.bounding_box()
    return box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"] and box["y"] + box["height"] <= PHONE["height"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(site, open_site, scheme):
    visit = open_site(site, "/leaderboard", color_scheme=scheme)
    ratios = visit.page.evaluate(CONTRAST, TEXT_ON_GROUND)
    too_faint = {pair: round(ratio, 2) for pair, ratio in zip(TEXT_ON_GROUND, ratios, strict=True) if ratio < READABLE}
    assert too_faint == {}


def test_dark_follows_the_system_until_the_visitor_chooses(site, open_site):
    visit = open_site(site, "/leaderboard", color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = visit.page.evaluate(ground)
    visit.page.click("#look")
    light = visit.page.evaluate(ground)
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 150 < 600 < sum(map(int, re.findall(r"\d+", light)[:3]))
    visit.page.reload()
    assert visit.page.evaluate(ground) == light


def test_focus_is_visible_on_every_control(site, open_site):
    visit = open_site(site, "/leaderboard")
    for _ in range(6):
        visit.page.keyboard.press("Tab")
        style = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid", visit.page.evaluate("document.activeElement.outerHTML.slice(0, 120)")


def test_page_speaks_chinese_when_the_browser_does_and_english_when_asked(site, open_site):
    visit = open_site(site, locale="zh-CN")
    assert visit.page.locator("html").get_attribute("lang") == "zh"
    assert visit.page.inner_text("#send") == "发送"
    visit.ask("你好").vote("tie")
    assert "平局" in visit.page.inner_text("#reveal")
    visit.page.click(".language")
    visit.drawn()
    assert visit.page.inner_text("#send") == "Send"
    visit.go("/leaderboard")
    assert visit.page.locator("html").get_attribute("lang") == "en"


def test_gradio_serves_no_route_that_the_product_has_no_use_for(site):
    client = httpx.Client(base_url=site.url)
    assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 404
    for path in ("/gradio_api/queue/join", "/zh/leaderboard/gradio_api/run/predict", "/gradio_api/call/x"):
        for body in (b"hello", b"[]", b'{"data": [], "fn_index": 9, "session_hash": "x"}'):
            assert client.post(path, content=body).status_code == 404
    for path in ("/gradio_api/file=/etc/passwd", "/gradio_api/proxy=https://example.com", "/gradio_api/runs"):
        assert client.get(path).status_code == 404


def test_address_without_a_page_says_so_to_a_browser_and_stays_json_for_programs(site):
    answer = httpx.get(f"{site.url}/nowhere", headers={"Accept": "text/html,*/*"})
    assert answer.status_code == 404
    assert "Nothing here" in answer.text
    assert "content-security-policy" in answer.headers
    assert httpx.get(f"{site.url}/api/nowhere").headers["content-type"] == "application/json"
