"""A visitor is a browser with our cookie, which it gets when it accepts the notice. Knows no battle."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import HTTPConnection
from starlette.responses import Response

from app.errors import NoticeRequired
from db import queries
from db.connect import Database

COOKIE = "arena_visitor"
COOKIE_SECONDS = 400 * 24 * 3600  # the longest that browsers keep one
ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class VisitorView:
    id: str
    accepted: bool


class Visitors:
    def __init__(self, database: Database):
        self._database = database

    async def of(self, connection: HTTPConnection) -> VisitorView | None:
        """Whoever holds this cookie; None without one, or with one that we never gave."""
        value = connection.cookies.get(COOKIE, "")
        if not ID.fullmatch(value):
            return None
        visitor = await self._database.run(queries.find_visitor, value, read_only=True)
        return visitor and VisitorView(visitor.id, visitor.notice_accepted_at is not None)

    async def accepted(self, connection: HTTPConnection) -> VisitorView:
        """Raises NoticeRequired."""
        visitor = await self.of(connection)
        if visitor is None or not visitor.accepted:
            raise NoticeRequired("Please read and accept the notice first.")
        return visitor

    async def accept_notice(self, connection: HTTPConnection) -> VisitorView:
        """Makes a visitor of a browser that is none yet; ids are ours to give, never the browser's."""
        known = await self.of(connection)
        visitor_id = known.id if known else uuid.uuid4().hex
        await self._database.run(_accept, visitor_id, known is None, datetime.now(UTC))
        return VisitorView(visitor_id, True)


def _accept(session, visitor_id: str, is_new: bool, now: datetime) -> None:
    if is_new:
        queries.add_visitor(session, visitor_id, now, public_id=uuid.uuid4().hex)
    queries.accept_notice(session, visitor_id, now)


def set_cookie(response: Response, visitor: VisitorView, *, secure: bool) -> None:
    response.set_cookie(
        COOKIE, visitor.id, max_age=COOKIE_SECONDS, path="/", httponly=True, samesite="lax", secure=secure
    )
