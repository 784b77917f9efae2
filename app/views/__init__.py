"""The pages that people see. `VIEWS` lists them; `mount` puts them on the application. To add one: a file and a line.

Each view lays out Gradio controls and says what HTML goes into its slots; app/views/frame.py makes the page around it.
Knows the services only as what it is given: battles, votes and rules are elsewhere.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.staticfiles import StaticFiles

from app.quick_gradio import gradio as gr
from app.views import admin, arena, frame, leaderboard, memory
from app.views.frame import Frame, View, mounted_at
from app.views.theme import theme
from app.views.words import LANGUAGES, words_for

VIEWS = (
    View("/", "arena", arena.build, arena.slots, styles=("arena", "markdown")),
    View("/leaderboard", "leaderboard", leaderboard.build, leaderboard.slots, styles=("leaderboard",)),
    View("/memory", "memory", None, memory.slots, styles=("memory",)),
    View("/admin", "admin", admin.build, admin.slots, styles=("admin",), admin=True, events=True),
    View("/admin/login", "login", None, admin.login_slots, styles=("admin",), in_navigation=False),
)
LOST = View("", "lost", None, frame.lost_slots, in_navigation=False)
STATIC = Path(__file__).resolve().parents[2] / "static"


def mount(app: FastAPI, services: Any, *, signed_in: Callable[[Request], bool]) -> None:
    """Adds every view in every language, the files of static/ below /files, and the frame around them.

    The longest paths come first: what is mounted at / would swallow them.
    """
    mimetypes.add_type("application/manifest+json", ".webmanifest")
    app.mount("/files", StaticFiles(directory=STATIC), name="files")
    mounts = [(mounted_at(view, language), view, language) for view in VIEWS for language in LANGUAGES if view.build]
    for path, view, language in sorted(mounts, key=lambda each: len(each[0]), reverse=True):
        gr.mount_gradio_app(
            app,
            view.build(words_for(language), services),
            path,
            auth_dependency=(lambda request: "admin" if signed_in(request) else None) if view.admin else None,
            theme=theme(),
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            mcp_server=False,
            show_error=False,
        )
    app.add_middleware(Frame, views=VIEWS, lost=LOST, services=services, signed_in=signed_in)
