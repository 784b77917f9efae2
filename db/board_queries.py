"""What the leaderboard asks of the database beyond who won: who voted, when, on which conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.tables import Answer, Battle, Turn, Vote

CHUNK = 500  # battles a query


@dataclass(frozen=True)
class VotedBattle:
    """A counted vote with its battle; `turns` is (prompt, answer of a, answer of b) each."""

    vote_id: int
    model_a_id: int
    model_b_id: int
    kind: str
    visitor_id: str
    created_at: datetime
    pair_probability: float  # 0: unknown
    turns: tuple[tuple[str, str, str], ...]


def voted_battles(session: Session, after: int = 0) -> Iterator[VotedBattle]:
    """Counted votes in the order of their commit, after that vote."""
    query = (
        select(
            Vote.id,
            Battle.model_a_id,
            Battle.model_b_id,
            Vote.kind,
            Vote.visitor_id,
            Vote.created_at,
            Battle.pair_probability,
            Vote.battle_id,
        )
        .join(Battle, Battle.id == Vote.battle_id)
        .where(Battle.state == "voted", Vote.counted, Vote.id > after)
        .order_by(Vote.id)
    )
    rows = session.execute(query).all()
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        turns = _turns(session, [row.battle_id for row in part])
        for *columns, battle_id in part:
            yield VotedBattle(*columns, turns=turns.get(battle_id, ()))


def _turns(session: Session, battle_ids: Sequence[str]) -> dict[str, tuple[tuple[str, str, str], ...]]:
    """By battle; of each side the last attempt."""
    query = (
        select(Turn.battle_id, Turn.number, Turn.prompt, Answer.side, Answer.text)
        .join(Answer, Answer.turn_id == Turn.id)
        .where(Turn.battle_id.in_(battle_ids))
        .order_by(Turn.battle_id, Turn.number, Answer.attempt)
    )
    said: dict[str, dict[int, dict[str, str]]] = {}
    for battle_id, number, prompt, side, text in session.execute(query):
        said.setdefault(battle_id, {}).setdefault(number, {"prompt": prompt, "a": "", "b": ""})[side] = text
    return {
        battle_id: tuple((turn["prompt"], turn["a"], turn["b"]) for _, turn in sorted(turns.items()))
        for battle_id, turns in said.items()
    }
