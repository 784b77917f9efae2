"""Markdown to HTML that is safe to show, a block at a time while an answer grows. Knows no model and no stream.

Nothing a model or a visitor writes runs, is fetched or vanishes: HTML, images, entities and links to anything but
http, https and mailto come out as the text that was typed. Code is coloured by Pygments with classes, not styles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

LINKS_TO = ("http://", "https://", "mailto:")
MOST_COLOURED_CHARACTERS = 20_000  # a longer block of code stays black: some lexers are slow
FORMATTER = HtmlFormatter(nowrap=True)
# Words that only lengthen the text they are added to, and a line that has shown by a letter what kind of line it is.
PLAIN = re.compile(r"""(?:[^\W_]|[ ,.;:!?'"，。、：；！？])+""")
PLAIN_LINE = re.compile(r"""\s*(?:(?:[-*+>]|\d+[.)]|#{1,6}) +)*[*_`"'(\[]{0,3}[^\W\d_]""")
TEXT_ENDS = re.compile(r"(?:</(?:p|li|ul|ol|blockquote|h[1-6])>\n)+\Z")


@dataclass(frozen=True)
class Block:
    """One top-level block of an answer. A final one is never changed again."""

    number: int
    html: str
    final: bool


class Renderer(RendererHTML):
    def fence(self, tokens: Sequence[Token], index: int, options, env) -> str:
        return code_html(tokens[index].content, tokens[index].info.strip().split(" ")[0])

    def code_block(self, tokens: Sequence[Token], index: int, options, env) -> str:
        return code_html(tokens[index].content, "")

    def image(self, tokens: Sequence[Token], index: int, options, env) -> str:
        """As it was typed: an image would be fetched from another host."""
        token = tokens[index]
        title = f' "{token.attrs["title"]}"' if "title" in token.attrs else ""
        return escapeHtml(f"![{token.content}]({token.attrs['src']}{title})")

    def link_open(self, tokens: Sequence[Token], index: int, options, env) -> str:
        tokens[index].attrSet("target", "_blank")
        tokens[index].attrSet("rel", "noopener noreferrer nofollow ugc")
        return self.renderToken(tokens, index, options, env)


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=Renderer)
    parser.enable(["table", "strikethrough"]).disable(["reference", "entity"])
    parser.validateLink = lambda url: url.strip().lower().startswith(LINKS_TO)
    return parser


PARSER = _parser()


def code_html(code: str, language: str) -> str:
    lexer = _lexer(language) if len(code) <= MOST_COLOURED_CHARACTERS else None
    body = highlight(code, lexer, FORMATTER) if lexer else escapeHtml(code)
    return f'<pre class="highlight" data-language="{escapeHtml(language)}"><code>{body}</code></pre>\n'


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound:
        return None


def highlight_css(selector: str = ".highlight", style: str = "default") -> str:
    """The colours of code, for the style sheet."""
    return HtmlFormatter(style=style).get_style_defs(selector)


def render(text: str) -> list[str]:
    """The HTML of each top-level block of a whole text."""
    growing = GrowingMarkdown()
    blocks = {block.number: block.html for block in [*growing.push(text), *growing.finish()]}
    return [blocks[number] for number in sorted(blocks)]


class GrowingMarkdown:
    """An answer that grows at its end. Only what follows its last final block is parsed again.

    A block is final when the one after it has two whole lines: no line to come can then be drawn into it, since a
    block's start is decided by its first line or, for a table, by its second.
    """

    def __init__(self) -> None:
        self._tail = ""
        self._first = 0  # number of the block that the tail begins with
        self._known: dict[int, Block] = {}  # of the tail, as they were last told

    def push(self, text: str) -> list[Block]:
        """What `text` changed: blocks grown, added, made final, or emptied where two became one. Drops '\\r'."""
        text = text.replace("\r", "")
        grown = self._grown(text)
        self._tail += text
        if grown is None:
            return self._changes(finished=False)
        self._known[grown.number] = grown
        return [grown]

    def finish(self) -> list[Block]:
        """The blocks that are not final yet, now final."""
        return self._changes(finished=True)

    def _grown(self, text: str) -> Block | None:
        """The last block with plain words put at the end of its text: what parsing it anew would come to.

        Most of what a model says is that, and parsing takes a hundred times as long. None where it has to be parsed.
        """
        said = self._tail.rstrip(" ")
        if not (self._known and text.strip(" ") and PLAIN.fullmatch(text) and PLAIN.fullmatch(said[-1:])):
            return None
        last = self._known[max(self._known)]
        ends = TEXT_ENDS.search(last.html)
        if not ends or not last.html.endswith(escapeHtml(said[-1]), 0, ends.start()):
            return None
        if not PLAIN_LINE.match(said, said.rfind("\n") + 1):
            return None
        words = escapeHtml(self._tail[len(said) :] + text.rstrip(" "))
        return replace(last, html=last.html[: ends.start()] + words + ends[0])

    def _changes(self, finished: bool) -> list[Block]:
        groups = list(_top_level(PARSER.parse(self._tail)))
        starts = [group[0].map[0] for group in groups]
        whole_lines = self._tail.count("\n")
        now: dict[int, Block] = {}
        for index, group in enumerate(groups):
            final = finished or (index + 1 < len(groups) and starts[index + 1] + 1 < whole_lines)
            html = PARSER.renderer.render(group, PARSER.options, {})
            now[self._first + index] = Block(self._first + index, html, final)
        gone = {number: Block(number, "", finished) for number in self._known.keys() - now.keys()}
        changed = [block for block in (now | gone).values() if self._known.get(block.number) != block]
        final_count = sum(block.final for block in now.values())
        if 0 < final_count < len(groups):
            self._tail = "\n".join(self._tail.split("\n")[starts[final_count] :])
        elif finished:
            self._tail = ""
        self._first += final_count
        self._known = {number: block for number, block in now.items() if not block.final}
        return changed


def _top_level(tokens: list[Token]) -> Iterator[list[Token]]:
    """The tokens of each block at level 0, from its opening to its closing."""
    start = 0
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0 and token.type != "inline":
            yield tokens[start : index + 1]
            start = index + 1
