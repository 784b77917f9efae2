"""What an answer may do to the page: be read."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.markdown import PARSER, GrowingMarkdown, highlight_css, render

PIECES = ["\n", "\n\n", "- ", "* ", "1. ", "> ", "```", "```py\n", "a|b", "-|-", "|", "---", "===", "# ", "    ", "  "]
PIECES += ["text ", "*b*", "`c`", "[x](http://y)", "<b>", "~~~", "\t", "\\", "- a\n", "1", "|\n", "🙂", "文", "é"]


def html(text: str) -> str:
    return "".join(render(text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)&gt;"),
        ("<think>hm</think> so", "&lt;think&gt;hm&lt;/think&gt; so"),
        ("costs $5 and $6", "costs $5 and $6"),
        ("[x](javascript:alert(1))", "[x](javascript:alert(1))"),
        ("[x](JaVaScRiPt:alert(1))", "[x](JaVaScRiPt:alert(1))"),
        ("[x](data:text/html;base64,AA)", "[x](data:text/html;base64,AA)"),
        ("[x](/admin)", "[x](/admin)"),
        ("<javascript:alert(1)>", "&lt;javascript:alert(1)&gt;"),
        ("![a *b*](https://evil.example/x.png)", "![a *b*](https://evil.example/x.png)"),
        ("![a](https://evil.example/x.png 't\"<')", "![a](https://evil.example/x.png &quot;t&quot;&lt;&quot;)"),
        ("<|im_end|><|im_start|>system", "&lt;|im_end|&gt;&lt;|im_start|&gt;system"),
        ("&lt;b&gt; &#0;", "&amp;lt;b&amp;gt; &amp;#0;"),
        ("[a]: https://x.example", "[a]: https://x.example"),
        ("line\nline", "line<br />\nline"),
        ("e\u0301 👩‍👩‍👧 中文 العربية", "e\u0301 👩‍👩‍👧 中文 العربية"),
    ],
)
def test_text_is_shown_as_it_was_written(text, shown):
    assert shown in html(text)


@pytest.mark.parametrize("tag", ["<script", "<img", "<iframe", "<style", "onerror=", "javascript:"])
def test_nothing_in_code_becomes_a_tag(tag):
    assert "<script" not in html(f"```html\n{tag} x>\n```") and "<img" not in html(f"    {tag} x>")


def test_a_fence_language_cannot_break_out_of_its_attribute():
    assert 'data-language="&quot;&gt;&lt;script&gt;"' in html('```"><script>\nx\n```')


def test_links_open_elsewhere_and_tell_nothing():
    assert 'rel="noopener noreferrer nofollow ugc"' in html("[x](https://x.example)")
    assert 'target="_blank"' in html("<https://x.example>")


def test_an_unclosed_fence_is_code_from_its_first_line():
    growing = GrowingMarkdown()
    growing.push("before\n\n```python\n")
    *_, block = growing.push("def f():\n    return '<b>'")
    assert 'data-language="python"' in block.html and "&lt;b&gt;" in block.html and not block.final


def test_code_is_coloured_by_classes():
    assert '<span class="k">def</span>' in html("```python\ndef f(): pass\n```")
    assert ".highlight .k" in highlight_css()
    assert "style=" not in html("```python\ndef f(): pass\n```")


@example(["- a\n", "*", "b*"], [1])
@example(["para\n", "a|b\n", "-|-", "|x"], [1])
@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_a_growing_answer_ends_as_if_it_had_come_at_once(pieces, sizes):
    """And a block that was called final is never told again."""
    text = "".join(pieces)
    growing, blocks, final = GrowingMarkdown(), {}, set()
    position = step = 0
    while position < len(text):
        size = sizes[step % len(sizes)]
        for block in growing.push(text[position : position + size]):
            assert block.number not in final
            blocks[block.number] = block.html
            final |= {block.number} if block.final else set()
        position, step = position + size, step + 1
    for block in growing.finish():
        assert block.number not in final
        blocks[block.number] = block.html
    assert "".join(blocks[number] for number in sorted(blocks)) == PARSER.render(text)


@example(["2)     1. 'a", "你好"])
@example(["# a #", " b"])
@example(["_b_", "c"])
@example(["- a\n\n      b", " c"])
@example(["> a\nb", ' "c" ', "d"])
@settings(max_examples=300)
@given(st.lists(st.sampled_from([*PIECES, "a", "word ", " and", "你好，", "7", ". "]), max_size=20))
def test_what_is_shown_is_at_every_moment_what_the_whole_text_would_show(pieces):
    """Also where plain words were put at the end of a block without parsing it again."""
    growing, blocks = GrowingMarkdown(), {}
    for end, piece in enumerate(pieces, 1):
        blocks |= {block.number: block.html for block in growing.push(piece)}
        assert "".join(blocks[number] for number in sorted(blocks)) == PARSER.render("".join(pieces[:end]))


def test_plain_words_are_not_parsed_again(monkeypatch):
    growing = GrowingMarkdown()
    growing.push("- **Bold** one\n- two")
    monkeypatch.setattr("app.markdown.PARSER", None)
    (block,) = growing.push(" and some more, it's fine")
    assert block.html == "<ul>\n<li><strong>Bold</strong> one</li>\n<li>two and some more, it's fine</li>\n</ul>\n"


def test_only_what_changed_is_told():
    growing = GrowingMarkdown()
    growing.push("one\n\ntwo")
    assert [block.number for block in growing.push(" more")] == [1]
    assert growing.push("") == []


def test_a_block_that_was_no_block_after_all_is_emptied():
    growing = GrowingMarkdown()
    told = {block.number: block.html for block in growing.push("- a\n*")}
    told |= {block.number: block.html for block in growing.push("b*")}
    assert told[1] == "" and "<em>b</em>" in told[0]
