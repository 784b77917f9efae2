"""The web application: routes, views, middleware, and which error becomes which answer. Never imports torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import api, views
from app.api_docs import api_page
from app.errors import ArenaError, BodyTooLarge, ForeignOrigin, NotFound, StorageUnavailable
from app.security import refuse_foreign_origin
from app.services import Services
from db import errors as db_errors

log = logging.getLogger(__name__)

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
REFUSED_UNREAD = (ForeignOrigin.status, BodyTooLarge.status)
DRAINED_BODIES = 8  # how many times the largest allowed body is read and dropped
NOT_SAVED = "This could not be saved just now, and nothing was recorded. Please try again."


def create_app(services: Services, *, mount_views: Callable[..., None] = views.mount) -> FastAPI:
    """Serves what `services` are; whoever started them ends them."""
    app = FastAPI(title="Paged Arena", docs_url=None, redoc_url=None)  # FastAPI's own pages come from another host
    app.state.services = services
    app.include_router(api.router)
    app.include_router(api.admin_router)
    app.add_route("/api/{rest:path}", answer_unknown_path, methods=METHODS, include_in_schema=False)
    app.add_route("/docs", lambda request: HTMLResponse(api_page(app.openapi())))
    app.add_exception_handler(ArenaError, answer_arena_error)
    app.add_exception_handler(db_errors.DatabaseUnavailable, answer_database_unavailable)
    app.add_exception_handler(db_errors.NotFound, answer_not_found)
    app.add_exception_handler(RequestValidationError, answer_invalid_request)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(Exception, answer_bug)
    mount_views(app, services, signed_in=lambda request: services.admin.auth_dependency(request) is not None)
    app.add_middleware(Guard, max_body_bytes=services.config.max_body_bytes)
    return app


# Errors


async def answer_arena_error(request: Request, error: ArenaError) -> Response:
    headers = {"Retry-After": str(round(error.retry_after_seconds))} if error.retry_after_seconds else None
    return JSONResponse(error.as_dict(), error.status, headers)


async def answer_database_unavailable(request: Request, error: db_errors.DatabaseUnavailable) -> Response:
    log.error("database unavailable", extra={"path": request.url.path, "reason": str(error)})
    return await answer_arena_error(request, StorageUnavailable(NOT_SAVED, retry_after_seconds=2))


async def answer_not_found(request: Request, error: db_errors.NotFound) -> Response:
    return await answer_unknown_path(request)


async def answer_unknown_path(request: Request) -> Response:
    return await answer_arena_error(request, NotFound("There is nothing here by that name."))


async def answer_invalid_request(request: Request, error: RequestValidationError) -> Response:
    """Which field is wrong and why, and nothing of what it held."""
    wrong = "; ".join(f"{'.'.join(str(part) for part in each['loc'][1:])}: {each['msg']}" for each in error.errors())
    return JSONResponse({"error": {"code": "bad_input", "message": wrong}}, 422)


async def answer_http_exception(request: Request, error: HTTPException) -> Response:
    """Of Starlette and FastAPI: an unknown path, a body that is no JSON, or ours, met while they read the body."""
    if isinstance(error.__cause__, ArenaError):
        return await answer_arena_error(request, error.__cause__)
    body = {"error": {"code": "not_found" if error.status_code == 404 else "bad_input", "message": str(error.detail)}}
    return JSONResponse(body, error.status_code, error.headers)


async def answer_bug(request: Request, error: Exception) -> Response:
    log.error("bug", exc_info=error, extra={"path": request.url.path})
    return await answer_arena_error(request, ArenaError("Something went wrong on our side."))


# Middleware


class Guard:
    """Before everything else: no change for another site's page, no body beyond the limit; headers on every answer."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int):
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        read, unread = 0, True

        async def receive_limited() -> Message:
            nonlocal read, unread
            message = await receive()
            unread = message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self._max_body_bytes:
                raise self._too_large()
            return message

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                if unread and message["status"] in REFUSED_UNREAD:
                    await self._drain(receive)
                answered = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    answered.setdefault(name, value)
                if scope["path"].startswith("/api/"):
                    answered.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            refuse_foreign_origin(scope["method"], headers)
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > self._max_body_bytes:
                raise self._too_large()
        except ArenaError as refusal:
            response = await answer_arena_error(Request(scope), refusal)
            await response(scope, receive, send_guarded)
        else:
            await self._app(scope, receive_limited, send_guarded)

    async def _drain(self, receive: Receive) -> None:
        """Takes in the rest of a refused body, within reason: a closed connection would hide the answer."""
        read = 0
        while read < DRAINED_BODIES * self._max_body_bytes:
            message = await receive()
            read += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"This is too large: at most {self._max_body_bytes:,} bytes can be sent.")
