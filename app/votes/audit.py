"""Audit: which votes should count. Runs the tests of `honesty` on the database and carries out what is decided.

Every decision is in the log and makes the boards be computed anew; those made here can be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy.orm import Session

from app.errors import NotFound
from app.votes.honesty import anomalous, frequent, rules, share
from app.votes.honesty.casts import Cast
from db import errors as db_errors
from db import queries, vote_log
from db.connect import Database
from db.tables import Visitor


@dataclass(frozen=True)
class Suspect:
    """`visitor` is the public id; `why` a sentence for each rule that was broken."""

    visitor: str
    votes: int
    why: tuple[str, ...]
    quarantined: bool


@dataclass
class Audit:
    votes: int = 0
    visitors: int = 0
    suspects: list[Suspect] = field(default_factory=list)
    alarm: share.Alarm | None = None


def audit(
    session: Session,
    *,
    alpha: float = anomalous.ALPHA,
    seed: int | str = 0,
    limits: rules.Limits = rules.Limits(),  # noqa: B008  (frozen)
) -> Audit:
    """Looks at every vote cast here; imported ones are the business of whoever published them. Changes nothing."""
    rows = [(vote, battle) for vote, battle in queries.casts(session) if vote.imported_from is None]
    casts = [
        Cast.of(
            vote.id,
            vote.visitor_id,
            battle.address_hash,
            vote.created_at,
            battle.model_a_id,
            battle.model_b_id,
            vote.kind,
        )
        for vote, battle in rows
    ]
    why: dict[str, list[str]] = {}
    for found in anomalous.find(casts, alpha=alpha, seed=seed):
        why.setdefault(found.visitor, []).append(
            f"votes unlike all others: p = {found.p:.2g} after {found.votes} votes"
        )
    for visitor, most in rules.bursts(casts, limits).items():
        why.setdefault(visitor, []).append(f"{most} votes within {limits.burst.total_seconds():.0f} s")
    for visitor, most in rules.crowded(casts, limits).items():
        why.setdefault(visitor, []).append(f"{most} visitors voted from its address within a day")
    counts: dict[str, int] = {}
    for cast in casts:
        counts[cast.visitor] = counts.get(cast.visitor, 0) + 1
    suspects = [_suspect(session, visitor, counts[visitor], tuple(each)) for visitor, each in why.items()]
    newest = queries.newest_votes(session, share.NEWEST + share.BEFORE)
    return Audit(
        len(casts),
        len(counts),
        sorted(suspects, key=lambda each: -each.votes),
        share.alarm([v.counted for v in newest]),
    )


def _suspect(session: Session, visitor_id: str, votes: int, why: tuple[str, ...]) -> Suspect:
    visitor = queries.find_visitor(session, visitor_id)
    return Suspect(visitor.public_id or visitor.id, votes, why, visitor.quarantined_at is not None)


@dataclass(frozen=True)
class VotesView:
    """For the admin: how many votes count, the newest with their reasons, and the alarm where the share fell."""

    total: int
    counted: int
    quarantined: int
    alarm: share.Alarm | None
    votes: tuple[dict[str, Any], ...]  # the newest first


def newest_votes(session: Session, limit: int = 20) -> VotesView:
    newest = queries.newest_votes(session, share.NEWEST + share.BEFORE)
    shown = [
        {
            "number": vote.number,
            "visitor": queries.find_visitor(session, vote.visitor_id).public_id,
            "kind": vote.kind,
            "created_at": vote.created_at.isoformat(),
            "counted": vote.counted,
            "reason": vote.not_counted_reason,
        }
        for vote in newest[::-1][:limit]
    ]
    total, counted, quarantined = queries.vote_totals(session)
    return VotesView(total, counted, quarantined, share.alarm([vote.counted for vote in newest]), tuple(shown))


def visitor_called(session: Session, public_id: str) -> Visitor:
    """By the id that exports and lists show, or by the cookie's. Raises NotFound."""
    visitor = queries.visitor_called(session, public_id) or queries.find_visitor(session, public_id)
    if visitor is None:
        raise NotFound(f"there is no visitor {public_id}")
    return visitor


def quarantine(session: Session, public_ids: Sequence[str], why: str, by: str, sign: vote_log.Sign) -> int:
    """How many votes stopped counting."""
    now = datetime.now(UTC)
    return sum(queries.quarantine(session, visitor_called(session, each).id, why, by, now, sign) for each in public_ids)


def release(session: Session, public_ids: Sequence[str], by: str, sign: vote_log.Sign) -> int:
    """How many votes count again."""
    now = datetime.now(UTC)
    return sum(queries.release(session, visitor_called(session, each).id, by, now, sign) for each in public_ids)


def forget(database: Database, public_id: str) -> int:
    """How many votes stayed, without anything that tells whose they are; `Database.empty_journal` is the caller's.
    Raises NotFound."""
    with database.session() as session:
        try:
            kept = queries.forget_visitor(
                session, visitor_called(session, public_id).id, uuid4().hex, datetime.now(UTC)
            )
        except db_errors.NotFound as error:
            raise NotFound(str(error)) from error
    return kept


def deduplicate(database: Database, sign: vote_log.Sign, *, percentile: float, seed: int) -> tuple[int, int]:
    """Counts only a sample of votes on prompts that are asked too often; how many stopped, how many count again.

    Votes whose prompt is forgotten stay as they are, and those of visitors in quarantine do not come back.
    """
    with database.session(read_only=True) as session:  # it takes a while, and nobody who votes must wait for it
        prompts = queries.first_prompts(session)
    chosen = set(frequent.too_frequent(prompts, percentile=percentile, seed=seed))
    spared = prompts.keys() - chosen
    now = datetime.now(UTC)
    note = f"beyond the {percentile:g}th percentile of prompts, seed {seed}"
    with database.session() as session:
        queries.lock_votes(session)
        held = {visitor.id for visitor in queries.visitors_in_quarantine(session)}
        excess = [vote for vote in queries.votes_with(session, sorted(chosen)) if vote.counted]
        out = queries.votes_not_counted_for(session, "frequent_prompt")
        back = [vote for vote in out if vote.id in spared and vote.visitor_id not in held]
        queries.decide(session, excess, False, "frequent_prompt", "deduplication", now, note=note, sign=sign)
        queries.decide(session, back, True, "recount", "deduplication", now, note=note, sign=sign)
    return len(excess), len(back)
