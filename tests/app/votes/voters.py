"""Two honest visitors and one who votes in bursts, as rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from sqlalchemy.orm import Session

from db import queries
from tests.db.rows import add_votable_battle

NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def add_voters(session: Session, models: tuple[int, int]) -> None:
    """`slow`, `steady` and `burst`, with 12 votes each; slow asks the same every time."""
    for name, pause in (("slow", 600), ("steady", 400), ("burst", 2)):
        visitor = queries.add_visitor(session, uuid4().hex, NOON, public_id=name).id
        for number in range(12):
            prompt = "Hello" if name == "slow" else f"{name} asks {number}"
            battle = add_votable_battle(session, visitor, models, prompt=prompt, address_hash=name)
            when = NOON + timedelta(seconds=pause * number)
            queries.cast_vote(session, battle_id=battle.id, visitor_id=visitor, kind="ab"[number % 2], now=when)
