"""The page around a Gradio view: head, header, language, and what the page may load.

Gradio renders its own document; the frame takes from it the scripts that start Gradio and puts them into ours, with a
nonce for each inline script. It also answers /leaderboard and /admin without their trailing slash, chooses the
language, keeps visitors out of the admin view, and closes the routes of Gradio that this product has no use for.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from markupsafe import Markup
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.views.templates import templates
from app.views.words import LANGUAGES, choose_language, words_for
from db.errors import DatabaseUnavailable

log = logging.getLogger(__name__)

Words = Mapping[str, str]
LANGUAGE_COOKIE = "arena_language"
YEAR_SECONDS = 365 * 24 * 3600
NOT_KEPT = {"Cache-Control": "no-store"}
KEPT = {"/assets/": "public, max-age=31536000, immutable", "/files/": "no-cache"}  # Gradio's carry a hash, ours do not

# What Gradio's page calls; its uploads, proxies, files and run history are not served at all, nor its events where a
# view has none: there they could only fail.
OPEN_GRADIO_ROUTES = frozenset({"app_id", "heartbeat", "info", "startup-events"})
GRADIO_EVENT_ROUTES = frozenset({"call", "cancel", "queue", "run"})
GRADIO_ROUTE = re.compile(r"/gradio_api/(?P<name>[^/]*)")
INLINE_SCRIPT = re.compile(r"<script>(window\.gradio_\w+ = .*?;)</script>", re.DOTALL)
LINKED = re.compile(r'<script type="module"[^>]*></script>|<link rel="stylesheet"[^>]*>')


@dataclass(frozen=True)
class View:
    """One page. `build` lays out its Gradio controls (None: it has none); `slots` renders the HTML that is put into
    the columns of those elem_ids, and shown until Gradio has started. `name` begins its words, scripts and styles."""

    path: str
    name: str
    build: Callable[[Words, Any], gr.Blocks] | None
    slots: Callable[[Request, Any, Words], Awaitable[dict[str, str]]]
    styles: tuple[str, ...] = ()
    admin: bool = False
    events: bool = False  # whether its controls have events of Gradio's
    in_navigation: bool = True


def policy(nonce: str) -> str:
    """Gradio sets style attributes, hence unsafe-inline for styles; no script runs but ours and Gradio's own files."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'self' 'nonce-{nonce}'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "manifest-src 'self'",
            "base-uri 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


def mounted_at(view: View, language: str) -> str:
    """English at the address itself, so that Gradio's own clients find it; other languages below /<language>."""
    prefix = "" if language == "en" else f"/{language}"
    return prefix + view.path if view.path != "/" else prefix or "/"


class Frame:
    """ASGI middleware around the application that the views are mounted on."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        views: Sequence[View],
        lost: View,
        services: Any,
        signed_in: Callable[[Request], bool],
    ):
        """`lost` is what a browser sees at an address where there is nothing."""
        self.app = app
        self.views = views
        self.lost = lost
        self.services = services
        self.signed_in = signed_in
        self.with_events = {mounted_at(view, language) for view in views for language in LANGUAGES if view.events}
        self.pages = {mounted_at(view, language): view for view in views for language in LANGUAGES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.is_closed(scope["path"]):
            return await PlainTextResponse("Not found", status_code=404)(scope, receive, send)
        request = Request(scope, receive)
        view = self.pages.get(scope["path"].rstrip("/") or "/")
        if view is not None and scope["method"] in ("GET", "HEAD"):
            response = await self.answer(view, request)
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, self.sent_by_others(request, send))

    def is_closed(self, path: str) -> bool:
        """Whether it is a route of Gradio's that is not served."""
        route = GRADIO_ROUTE.search(path)
        if route is None or route["name"] in OPEN_GRADIO_ROUTES:
            return False
        return route["name"] not in GRADIO_EVENT_ROUTES or path[: route.start()] not in self.with_events

    def sent_by_others(self, request: Request, send: Send) -> Send:
        """`send` for what is no page of ours: says how long a file may be kept; shows `lost` for a page not found."""
        path = request.url.path
        rule = next((rule for part, rule in KEPT.items() if part in path), None)
        wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        is_lost = False

        async def send_on(message: Message) -> None:
            nonlocal is_lost
            if message["type"] == "http.response.start":
                is_lost = wants_page and message["status"] == 404
                if rule and message["status"] in (200, 304):
                    MutableHeaders(scope=message)["Cache-Control"] = rule
            if not is_lost:
                await send(message)
            elif not message.get("more_body") and message["type"] == "http.response.body":
                response = await self.answer(self.lost, request)
                response.status_code = 404
                await response(request.scope, request.receive, send)

        return send_on

    async def answer(self, view: View, request: Request) -> Response:
        if view.admin and not self.signed_in(request):
            return RedirectResponse("/admin/login", status_code=303)
        language = language_of(request)
        words = words_for(language)
        try:
            slots = await view.slots(request, self.services, words)
        except DatabaseUnavailable as error:
            log.error("database unavailable", extra={"path": request.url.path, "reason": str(error)})
            return PlainTextResponse(words["no_database"], 503, headers=NOT_KEPT | {"Retry-After": "2"})
        if "part" in request.query_params:
            part = slots.get(request.query_params["part"])
            return HTMLResponse(part or "", 404 if part is None else 200, headers=NOT_KEPT)
        gradio = await self.gradio(view, language, request) if view.build else None
        page = self.render(view, language, words, slots=slots, gradio=gradio, signed_in=self.signed_in(request))
        remember_language(page, request)
        return page

    async def gradio(self, view: View, language: str, request: Request) -> str:
        """The tags that start Gradio, from the page that it would have served."""
        path = mounted_at(view, language).rstrip("/") + "/"
        scope = {**request.scope, "path": path, "raw_path": path.encode(), "method": "GET", "query_string": b""}
        return gradio_parts(await body_of(self.app, scope, request.receive), path)

    def render(
        self, view: View, language: str, words: Words, *, slots: Mapping[str, str], gradio: str | None, signed_in: bool
    ) -> Response:
        nonce = secrets.token_urlsafe(16)
        shown = [each for each in self.views if each.in_navigation and (signed_in or not each.admin)]
        html = templates.get_template("page.jinja").render(
            view=view,
            words=words,
            language=language,
            other_language=next(code for code in LANGUAGES if code != language),
            navigation=[(each.path, words[f"nav_{each.name}"]) for each in shown],
            data=as_script_data({"language": language, "words": words}),
            slots={slot: Markup(content) for slot, content in slots.items()},
            gradio=Markup((gradio or "").replace("<script>", f'<script nonce="{nonce}">')),
        )
        return HTMLResponse(html, headers={**NOT_KEPT, "Content-Security-Policy": policy(nonce)})


async def lost_slots(_request, _services, words: Words) -> dict[str, str]:
    return {"lost": templates.get_template("lost.jinja").render(words=words)}


def language_of(request: Request) -> str:
    return choose_language(
        request.query_params.get("lang"),
        request.cookies.get(LANGUAGE_COOKIE),
        request.headers.get("accept-language"),
    )


def remember_language(response: Response, request: Request) -> None:
    asked = request.query_params.get("lang")
    if asked in LANGUAGES:
        response.set_cookie(LANGUAGE_COOKIE, asked, max_age=YEAR_SECONDS, samesite="lax", httponly=True)


def as_script_data(value: Any) -> Markup:
    """JSON that no text in it can end: "</script>" inside is written with escapes."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))


def gradio_parts(document: str, path: str) -> str:
    """The tags that start Gradio, of its own page at `path`. Raises LookupError where that page is not what we know."""
    inline, linked = INLINE_SCRIPT.findall(document), LINKED.findall(document)
    if len(inline) < 1 or len(linked) < 2:
        raise LookupError("Gradio's page has changed: its config or its script was not found")
    mode = 'window.__gradio_mode__ = "app";'
    return "\n".join(
        [
            *(f"<script>{script}</script>" for script in [*inline, mode]),
            *(tag.replace('"./', f'"{path}') for tag in linked),
        ]
    )


async def body_of(app: ASGIApp, scope: Scope, receive: Receive) -> str:
    """What `app` answers to a request without a body. Raises LookupError where that is no page."""
    status = 0
    body = bytearray()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))

    await app(scope, receive, send)
    if status != 200:
        raise LookupError(f"Gradio answered {status} to {scope['path']}")
    return body.decode()
