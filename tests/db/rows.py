"""Rows for tests: two models, a visitor, battles between them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from sqlalchemy.orm import Session

from db import queries
from db.tables import Battle

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def add_models(session: Session, *names: str) -> list[int]:
    return [queries.add_model(session, name=name, source=f"path:/{name}", now=NOW).id for name in names]


def add_visitor(session: Session) -> str:
    return queries.add_visitor(session, uuid4().hex, NOW).id


def add_battle(session: Session, visitor_id: str, model_ids: tuple[int, int], now: datetime = NOW, **columns) -> Battle:
    columns = {
        "pair_probability": 1.0,
        "side_coin": False,
        "address_hash": None,
        "prompt": "Why is the sky blue?",
    } | columns
    battle, _, _ = queries.add_battle(
        session,
        battle_id=uuid4().hex,
        visitor_id=visitor_id,
        model_a_id=model_ids[0],
        model_b_id=model_ids[1],
        now=now,
        **columns,
    )
    return battle


def answer_all(session: Session, battle: Battle) -> None:
    """Both sides answer all that is asked; the battle becomes votable."""
    for answer in queries.current_answers(session, battle.id).values():
        queries.end_answer(session, answer.id, "done", text="Because.", finish_reason="stop")
    assert queries.make_votable(session, battle.id, NOW)


def add_votable_battle(session: Session, visitor_id: str, model_ids: tuple[int, int], **columns) -> Battle:
    battle = add_battle(session, visitor_id, model_ids, **columns)
    answer_all(session, battle)
    return battle
