"""The website over HTTP: what a browser, a script and the admin may ask. Shapes in, shapes out; the rules are below.

Errors are {"error": {"code", "message"}} with the status of their `ArenaError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from app import admin as admin_session
from app import visitors as visitor_cookie
from app.battles import Begun
from app.errors import BadInput, PromptTooLong
from app.leaderboard.boards import sheet
from app.leaderboard.exports import EXPORTS
from app.leaderboard.votes import Selection
from app.security import client_address, is_https
from app.services import Services
from app.sockets import peer_silence_seconds
from app.visitors import VisitorView
from app.votes import audit


class ErrorDetail(BaseModel):
    code: str
    message: str


class ErrorBody(BaseModel):
    """What every answer of 400 and above holds; `tokens` and `limit` too where a prompt is too long."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": "An error."} for status in ("4XX", "5XX")
}
router = APIRouter(prefix="/api", responses=ERRORS)
admin_router = APIRouter(prefix="/api/admin", tags=["admin"], responses=ERRORS)

SERVER_SENT_EVENTS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def services_of(request: Request) -> Services:  # async, or FastAPI would send each request through a thread
    return request.app.state.services


App = Annotated[Services, Depends(services_of)]


async def accepted_visitor(request: Request, app: App) -> VisitorView:
    return await app.visitors.accepted(request)


async def known_visitor(request: Request, app: App) -> VisitorView | None:
    return await app.visitors.of(request)


Visitor = Annotated[VisitorView, Depends(accepted_visitor)]
Somebody = Annotated[VisitorView | None, Depends(known_visitor)]


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Prompt(Schema):
    prompt: str


class PromptToCount(Prompt):
    battle: str | None = None


class VoteCast(Schema):
    kind: str


class BegunTurn(Schema):
    battle: str
    turn: int
    state: str

    @classmethod
    def of(cls, begun: Begun) -> BegunTurn:
        return cls(battle=begun.battle, turn=begun.turn, state=begun.state)


# The notice


@router.get("/notice")
async def notice(visitor: Somebody) -> dict[str, bool]:
    return {"accepted": visitor is not None and visitor.accepted}


@router.post("/notice")
async def accept_notice(request: Request, response: Response, app: App) -> dict[str, bool]:
    visitor = await app.visitors.accept_notice(request)
    visitor_cookie.set_cookie(response, visitor, secure=_secure(request, app))
    return {"accepted": True}


def _secure(request: Request, app: Services) -> bool:
    return app.config.secure_cookies or is_https(request, app.config.proxy_networks)


# Battles


@router.post("/battles", status_code=201)
async def start_battle(body: Prompt, request: Request, visitor: Visitor, app: App) -> BegunTurn:
    address = client_address(request, app.config.proxy_networks)
    return BegunTurn.of(await app.battles.start(visitor.id, app.secret.address_hash(address), body.prompt))


@router.get("/battles/current", responses={204: {"description": "There is none."}})
async def current_battle(visitor: Somebody, app: App) -> Response:
    battle = await app.battles.current(visitor.id) if visitor else None
    if battle is None:
        return Response(status_code=204)
    return JSONResponse({"battle": battle.id, "state": battle.state})


@router.get("/battles/{battle_id}")
async def battle_snapshot(battle_id: str, visitor: Visitor, app: App) -> dict[str, Any]:
    return await app.battles.snapshot(visitor.id, battle_id)


@router.post("/battles/{battle_id}/turns", status_code=201)
async def next_turn(battle_id: str, body: Prompt, visitor: Visitor, app: App) -> BegunTurn:
    return BegunTurn.of(await app.battles.next_turn(visitor.id, battle_id, body.prompt))


@router.post("/battles/{battle_id}/regenerate", status_code=202)
async def regenerate(battle_id: str, visitor: Visitor, app: App) -> BegunTurn:
    return BegunTurn.of(await app.battles.regenerate(visitor.id, battle_id))


@router.post("/battles/{battle_id}/sides/{side}/retry", status_code=202)
async def retry_side(battle_id: str, side: str, visitor: Visitor, app: App) -> BegunTurn:
    return BegunTurn.of(await app.battles.retry(visitor.id, battle_id, side))


@router.post("/battles/{battle_id}/stop", status_code=202)
async def stop(battle_id: str, visitor: Visitor, app: App) -> dict[str, str]:
    await app.battles.stop(visitor.id, battle_id)
    return {"battle": battle_id}


@router.post("/battles/{battle_id}/vote")
async def vote(battle_id: str, body: VoteCast, visitor: Visitor, app: App) -> dict[str, Any]:
    """The names, and whether the vote counts; where not, why."""
    return {"battle": battle_id, **asdict(await app.battles.vote(visitor.id, battle_id, body.kind))}


@router.get(
    "/battles/{battle_id}/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}, 204: {"description": "There is nothing to follow."}},
)
async def events(battle_id: str, request: Request, visitor: Visitor, app: App, after: int = 0) -> Response:
    """Server-sent events of the last turn: `block`, `side`, `state`. 204 where none will follow."""
    seen = request.headers.get("last-event-id", "")
    after = int(seen) if seen.isdecimal() and len(seen) < 16 else after
    silence_seconds: Callable[[], float] = partial(peer_silence_seconds, request.scope["state"].get("socket"))
    stream = await app.battles.events(visitor.id, battle_id, after, silence_seconds)
    if stream is None:
        return Response(status_code=204)
    return StreamingResponse(stream, media_type="text/event-stream", headers=SERVER_SENT_EVENTS)


@router.post("/count")
async def count(body: PromptToCount, request: Request, visitor: Somebody, app: App) -> dict[str, Any]:
    """How long a prompt is and how long it may be, before it is sent."""
    if body.battle is not None:
        visitor = await app.visitors.accepted(request)
    found = await app.battles.count(visitor.id if visitor else None, body.battle, body.prompt)
    message = None if found.fits else PromptTooLong(found.tokens, found.limit, about=found.about).message
    return {"tokens": found.tokens, "limit": found.limit, "ok": found.fits, "message": message}


# Memory


class Way(BaseModel):
    """One way to hold the running requests: pages, percent of allocated slots without a token, room for more."""

    pages: int
    waste_percent: float
    more_battles: int


class Pool(BaseModel):
    """The pool of pages, naming no model. `estimated`: a battle waits for its vote, so its pages are reckoned from the
    text that was shown, at the mean size of all models. The admin is told `models` too, and never an estimate."""

    total: int
    page_bytes: int
    stride: int
    pages: dict[str, int]
    running: int
    waiting: int
    tokens: int
    cached_tokens_served: int
    ways: dict[str, Way]
    means: dict[str, Any]
    estimated: bool = False
    models: dict[str, dict[str, int]] | None = None


@router.get("/memory", response_model_exclude_none=True)
async def memory(request: Request, app: App) -> Pool:
    """What the pool holds now, beside what contiguous reservation (`max`, `pow2`) would take for the same requests."""
    return Pool(**await app.memory.snapshot(exact=_sees_exactly(request, app)))


@router.get("/memory/frames", response_class=Response, responses={200: {"content": {"application/octet-stream": {}}}})
async def memory_frames(request: Request, app: App) -> Response:
    """The pool page by page, live: binary messages as docs/engine.md tells them, at most 20 a second."""
    frames = app.memory.watch(exact=_sees_exactly(request, app))
    return StreamingResponse(frames, media_type="application/octet-stream", headers=SERVER_SENT_EVENTS)


def _sees_exactly(request: Request, app: Services) -> bool:
    return app.admin.auth_dependency(request) is not None


# The arena as a whole


@router.get("/status")
async def status(app: App) -> dict[str, Any]:
    await app.registry.look()
    ready, message = app.battles.readiness()
    return {"ready_models": ready, "enough": message is None, "message": message}


@router.get(
    "/leaderboard",
    response_class=Response,
    responses={200: {"content": {export.media_type: {} for export in EXPORTS.values()}}},
)
async def leaderboard(request: Request, app: App, format: str = "json") -> Response:
    """The board that the page shows for the same query (`method`, `ci`, `category`, `style`, `since` ...), as `json`,
    `csv`, `md` or `svg`."""
    if format not in EXPORTS:
        raise BadInput(f"no format {format!r}; there are {', '.join(EXPORTS)}")
    selection = Selection.of_query(request.query_params)
    async with app.boards:  # however many ask, the others go on: a board may take seconds after a vote
        made = await asyncio.to_thread(sheet, app.database, selection)
        body = await asyncio.to_thread(EXPORTS[format].write, made)
    saved = {"Content-Disposition": f'attachment; filename="leaderboard.{format}"'} if format != "json" else None
    return Response(body, media_type=EXPORTS[format].media_type, headers=saved)


# Admin


def signed_in(request: Request, app: App) -> None:
    app.admin.require(request)


SignedIn = [Depends(signed_in)]


class Password(Schema):
    password: str = Field(max_length=1024)


class NewModel(Schema):
    name: str
    source: str
    system_prompt: str = ""
    sampling: dict[str, Any] = {}
    chat_template: str | None = None
    context_length: int | None = None
    endpoint_key_env: str | None = None
    sampling_weight: float = 1.0
    precision: str | None = None
    adapter: str | None = None
    kv_share: float = 0.0
    organisation: str | None = None
    licence: str | None = None
    parameters: str | None = None


class ModelChanges(Schema):
    source: str | None = None
    system_prompt: str | None = None
    sampling: dict[str, Any] | None = None
    chat_template: str | None = None
    context_length: int | None = None
    endpoint_key_env: str | None = None
    sampling_weight: float | None = None
    precision: str | None = None
    adapter: str | None = None
    kv_share: float | None = None
    organisation: str | None = None
    licence: str | None = None
    parameters: str | None = None
    enabled: bool | None = None


class Quarantine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    why: Annotated[str, Field(min_length=1, max_length=500)] = "the admin decided so"


@admin_router.post("/login", status_code=204)
def login(body: Password, request: Request, response: Response, app: App) -> None:
    value = app.admin.sign_in(request, body.password)
    admin_session.set_cookie(response, value, secure=_secure(request, app))


@admin_router.post("/logout", status_code=204)
def logout(response: Response) -> None:
    admin_session.clear_cookie(response)


@admin_router.get("/models", dependencies=SignedIn)
async def list_models(app: App) -> dict[str, Any]:
    return {"models": [asdict(model) for model in await app.registry.models()]}


@admin_router.post("/models", status_code=201, dependencies=SignedIn)
async def add_model(body: NewModel, app: App) -> dict[str, Any]:
    return asdict(await app.registry.add(**body.model_dump()))


@admin_router.get("/models/{name}", dependencies=SignedIn)
async def one_model(name: str, app: App) -> dict[str, Any]:
    return asdict(await app.registry.model(name))


@admin_router.patch("/models/{name}", dependencies=SignedIn)
async def change_model(name: str, body: ModelChanges, app: App) -> dict[str, Any]:
    return asdict(await app.registry.change(name, **body.model_dump(exclude_unset=True)))


@admin_router.delete("/models/{name}", dependencies=SignedIn)
async def retire_model(name: str, app: App) -> dict[str, Any]:
    return asdict(await app.registry.retire(name))


@admin_router.get("/votes", dependencies=SignedIn)
async def list_votes(app: App, limit: Annotated[int, Query(ge=1, le=500)] = 20) -> dict[str, Any]:
    """The newest votes with whether they count and why not; `alarm` where suddenly fewer count than before."""
    return asdict(await app.database.run(audit.newest_votes, limit, read_only=True))


@admin_router.get("/suspects", dependencies=SignedIn)
async def list_suspects(app: App) -> dict[str, Any]:
    """Looks at every vote cast here, which takes seconds where there are many. Changes nothing."""
    return asdict(await app.database.run(partial(audit.audit, seed=app.sign("audit")), read_only=True))


@admin_router.post("/visitors/{visitor}/quarantine", dependencies=SignedIn)
async def quarantine_visitor(visitor: str, body: Quarantine, app: App) -> dict[str, int]:
    """None of this visitor's votes counts, past or future; can be taken back. How many stopped counting."""
    return {"votes": await app.database.run(audit.quarantine, [visitor], body.why, "admin", app.sign)}


@admin_router.post("/visitors/{visitor}/release", dependencies=SignedIn)
async def release_visitor(visitor: str, app: App) -> dict[str, int]:
    """How many votes count again."""
    return {"votes": await app.database.run(audit.release, [visitor], "admin", app.sign)}
