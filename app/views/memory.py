"""The memory view: the pool page by page, live, beside what the older way would take.

The words and the empty places are here; static/js/memory.js fills them from /api/memory/frames, and what visitors may
see there is decided by app/memory/watch.py. There is no control that changes anything, and so nothing of Gradio's.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.views.templates import templates

STATES = ("free", "cached", "used", "shared", "pinned", "pinned_in_use")
WAYS = ("paged", "pow2", "max")
QUESTIONS = ("page", "shared", "older")


async def slots(_request, _services, words: Mapping[str, str]) -> dict[str, str]:
    html = templates.get_template("memory.jinja").render(words=words, states=STATES, ways=WAYS, questions=QUESTIONS)
    return {"memory": html}
