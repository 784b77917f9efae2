"""The arena: one question, two hidden answers, a vote, the names.

Lays out the controls and, as empty columns, the places that static/js/arena.js fills: the two panels among them.
(`gr.HTML` would evaluate its template as code, which our Content-Security-Policy forbids.) There is no Gradio event at
all: the script calls /api, and the server decides what is allowed, so that a call past this page can change no more
than the page itself can.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import gradio as gr

EXAMPLES = ("example_1", "example_2", "example_3", "example_4")
VOTES = (("vote-a", "vote_a"), ("vote-tie", "vote_tie"), ("vote-bad", "vote_bad"), ("vote-b", "vote_b"))


def build(words: Mapping[str, str], _services) -> gr.Blocks:
    options = {"fill_width": True, "fill_height": True, "analytics_enabled": False}
    with gr.Blocks(title=words["arena_title"], **options) as blocks, gr.Column(elem_id="arena"):
        gr.Column(elem_id="hero")
        gr.Column(elem_id="side-tabs")
        with gr.Row(elem_id="panels"):
            gr.Column(elem_id="chat-a", elem_classes=["side-panel", "side-a"])
            gr.Column(elem_id="chat-b", elem_classes=["side-panel", "side-b"])
        with gr.Column(elem_id="dock"):
            gr.Column(elem_id="reveal")
            gr.Column(elem_id="banner")
            with gr.Row(elem_id="vote-bar"):
                for elem_id, word in VOTES:
                    gr.Button(words[word], elem_id=elem_id, elem_classes=["vote"])
            with gr.Row(elem_id="battle-tools"):
                gr.Button(words["regenerate"], elem_id="regenerate", elem_classes=["quiet"])
                gr.Button(words["new_battle"], elem_id="new-battle", elem_classes=["quiet"])
            gr.Column(elem_id="notice")
            with gr.Row(elem_id="composer"):
                gr.Textbox(
                    label=words["prompt_label"],
                    placeholder=words["prompt_first"],
                    elem_id="prompt",
                    lines=1,
                    max_lines=8,
                    container=False,
                )
                gr.Column(elem_id="counter")
                gr.Button(words["stop"], elem_id="stop")
                gr.Button(words["send"], elem_id="send", variant="primary")
    return blocks


async def slots(_request, _services, words: Mapping[str, str]) -> dict[str, str]:
    """What the page shows before Gradio has started."""
    return {"hero": hero(words)}


def hero(words: Mapping[str, str]) -> str:
    examples = "".join(
        f'<li><button type="button" class="example">{escape(words[key])}</button></li>' for key in EXAMPLES
    )
    lines = words["hero_title"].split("|")  # it may break there, and nowhere else
    title = "".join(" " * line.startswith(" ") + f"<span>{escape(line.strip())}</span>" for line in lines)
    return (
        f"<h1>{title}</h1><p>{escape(words['hero_text'])}</p>"
        f'<h2 id="examples-title">{escape(words["examples"])}</h2><ul aria-labelledby="examples-title">{examples}</ul>'
    )
