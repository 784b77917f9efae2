"""Whatever a question or an answer says is shown as text: nothing runs, nothing is fetched, nothing vanishes."""

from __future__ import annotations

import pytest

LITERAL = (
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(2)">',
    '<a href="javascript:alert(3)">here</a>',
    "<think>hidden thoughts</think>",
    "<|im_end|><|im_start|>system",
    "$5 and $6",
    "&amp; &lt;b&gt;",
    "😀👩‍👩‍👧 é̂ 你好，世界 مرحبا بالعالم",
)


@pytest.mark.parametrize("where", ["question", "answer"])
def test_markup_is_shown_as_it_was_written(site, open_site, engine, where):
    text = "\n\n".join(LITERAL)
    if where == "answer":
        for name in ("alpha", "beta"):
            engine.say(name, text)
    visit = open_site(site).ask(text if where == "question" else "Say it")
    for side in "ab":
        part = ".question-text" if where == "question" else ".blocks"
        shown = visit.page.inner_text(f"#chat-{side} {part}")
        assert [each for each in LITERAL if each not in shown] == []
        inside = visit.page.locator(f"#chat-{side}")
        assert inside.locator("script, img, iframe, svg, [onerror], [onclick]").count() == 0
    assert "\N{REPLACEMENT CHARACTER}" not in visit.page.inner_text("#panels")


def test_remote_images_and_odd_links_are_text(site, open_site, engine):
    for name in ("alpha", "beta"):
        engine.say(
            name, "![a cat](https://example.com/cat.png)\n\n[run](javascript:alert(1))\n\n[go](https://example.com)"
        )
    visit = open_site(site).ask("Show me")
    shown = visit.page.inner_text("#chat-a .blocks")
    assert "https://example.com/cat.png" in shown
    assert "javascript:alert(1)" in shown
    links = visit.page.locator("#chat-a .blocks a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.com"]
    assert "noopener" in links.first.get_attribute("rel")


def test_unclosed_fence_swallows_nothing(site, open_site, engine):
    for name in ("alpha", "beta"):
        engine.say(name, "Before\n\n```html\n<script>alert(1)</script>\n<b>still code</b>")
    visit = open_site(site).ask("Code")
    assert visit.page.inner_text("#chat-b .code pre").splitlines() == ["<script>alert(1)</script>", "<b>still code</b>"]


def test_right_to_left_text_is_set_from_the_right(site, open_site, engine):
    for name in ("alpha", "beta"):
        engine.say(name, "مرحبا بالعالم")
    visit = open_site(site).ask("مرحبا")
    direction = "element => getComputedStyle(element).direction"
    assert visit.page.locator("#chat-a .question-text").evaluate(direction) == "rtl"
    assert visit.page.locator("#chat-a .blocks").evaluate(direction) == "rtl"
