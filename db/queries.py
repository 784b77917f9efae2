"""Every question the application asks of the database, by name. The session comes first; the caller owns the commit.

A change of state is one `UPDATE ... WHERE state IN (...)`: of several who try at once one succeeds and the others are
told so. Times and ids come from the caller, so that a test decides them. No savepoints: a full SQLite rolls the
whole transaction back by itself, and the error about the lost savepoint would hide the one about the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.errors import AlreadyVoted, NameTaken, NotFound, NotVotable
from db.tables import SIDES, Answer, Battle, Model, Rating, Turn, Visitor, Vote
from db.vote_kinds import VOTE_KINDS

VOTE_LOCK = 0x564F5445  # PostgreSQL's advisory lock of whoever inserts a vote

# Models


def add_model(
    session: Session,
    *,
    name: str,
    source: str,
    now: datetime,
    system_prompt: str = "",
    sampling: dict[str, Any] | None = None,
    chat_template: str | None = None,
    context_length: int | None = None,
    endpoint_key_env: str | None = None,
    enabled: bool = True,
) -> Model:
    """Raises NameTaken, and the session must end with it."""
    model = Model(
        name=name,
        source=source,
        system_prompt=system_prompt,
        sampling=sampling or {},
        chat_template=chat_template,
        context_length=context_length,
        endpoint_key_env=endpoint_key_env,
        enabled=enabled,
        created_at=now,
    )
    session.add(model)
    try:
        session.flush()
    except IntegrityError as error:
        raise NameTaken(f"a model named {name!r} exists already, or did before it was retired") from error
    return model


def models(session: Session, *, retired: bool = False) -> list[Model]:
    """By name; with those that were retired if asked."""
    query = select(Model).order_by(Model.name)
    return list(session.scalars(query if retired else query.where(Model.retired_at.is_(None))))


def model_named(session: Session, name: str) -> Model:
    """Retired ones included. Raises NotFound."""
    model = session.scalar(select(Model).where(Model.name == name))
    if model is None:
        raise NotFound(f"no model named {name!r}")
    return model


def models_of(session: Session, battle: Battle) -> dict[str, Model]:
    """By side."""
    pair = {"a": battle.model_a_id, "b": battle.model_b_id}
    found = {model.id: model for model in session.scalars(select(Model).where(Model.id.in_(pair.values())))}
    return {side: found[model_id] for side, model_id in pair.items()}


def change_model(session: Session, name: str, /, **changes: Any) -> Model:
    """Sets columns of a model that is not retired, its name and its dates excepted. Raises NotFound."""
    fixed = changes.keys() & {"id", "name", "created_at", "retired_at"}
    if fixed:
        raise ValueError(f"a model keeps its {', '.join(sorted(fixed))}")
    return _change_model(session, name, changes)


def retire_model(session: Session, name: str, now: datetime) -> Model:
    """Ends its part in battles; its votes and its rating stay. Raises NotFound, also where it is retired already."""
    return _change_model(session, name, {"enabled": False, "retired_at": now})


def forget_unused_model(session: Session, name: str) -> bool:
    """Deletes a retired model that never was in a battle, so that its name is free again; whether there was one."""
    met = select(Battle.id).where((Battle.model_a_id == Model.id) | (Battle.model_b_id == Model.id))
    statement = delete(Model).where(Model.name == name, Model.retired_at.is_not(None), ~met.exists())
    return session.execute(statement).rowcount == 1


def _change_model(session: Session, name: str, changes: dict[str, Any]) -> Model:
    statement = update(Model).where(Model.name == name, Model.retired_at.is_(None)).values(changes)
    if changes and session.execute(statement).rowcount == 0:
        raise NotFound(f"no model named {name!r}, or it is retired")
    return model_named(session, name)


# Visitors


def add_visitor(session: Session, visitor_id: str, now: datetime) -> Visitor:
    visitor = Visitor(id=visitor_id, created_at=now)
    session.add(visitor)
    session.flush()
    return visitor


def find_visitor(session: Session, visitor_id: str) -> Visitor | None:
    return session.get(Visitor, visitor_id)


def accept_notice(session: Session, visitor_id: str, now: datetime) -> None:
    """The first acceptance is the one kept. Raises NotFound."""
    moment = func.coalesce(Visitor.notice_accepted_at, now)
    if session.execute(update(Visitor).where(Visitor.id == visitor_id).values(notice_accepted_at=moment)).rowcount == 0:
        raise NotFound("no such visitor")


# Battles


def add_battle(
    session: Session,
    *,
    battle_id: str,
    visitor_id: str,
    model_a_id: int,
    model_b_id: int,
    pair_probability: float,
    side_coin: bool,
    address_hash: str | None,
    prompt: str,
    now: datetime,
) -> tuple[Battle, Turn, dict[str, Answer]]:
    """A streaming battle with its first turn and one empty answer a side."""
    battle = Battle(
        id=battle_id,
        visitor_id=visitor_id,
        model_a_id=model_a_id,
        model_b_id=model_b_id,
        pair_probability=pair_probability,
        side_coin=side_coin,
        state="streaming",
        address_hash=address_hash,
        created_at=now,
        updated_at=now,
    )
    session.add(battle)
    session.flush()
    return battle, *_add_turn(session, battle_id, 1, prompt, now)


def add_turn(
    session: Session, battle_id: str, prompt: str, now: datetime, *, states: Sequence[str] = ("votable",)
) -> tuple[Turn, dict[str, Answer]] | None:
    """The next question of a battle in one of `states`, which streams from now on. None where it is in another."""
    if not advance_battle(session, battle_id, states, "streaming", now):
        return None
    number = session.scalar(select(func.max(Turn.number)).where(Turn.battle_id == battle_id)) + 1
    return _add_turn(session, battle_id, number, prompt, now)


def _add_turn(
    session: Session, battle_id: str, number: int, prompt: str, now: datetime
) -> tuple[Turn, dict[str, Answer]]:
    turn = Turn(battle_id=battle_id, number=number, prompt=prompt, created_at=now)
    session.add(turn)
    session.flush()
    return turn, {side: add_answer(session, turn.id, side, now) for side in SIDES}


def find_battle(session: Session, battle_id: str, visitor_id: str | None = None) -> Battle:
    """Raises NotFound, also where it is not that visitor's."""
    battle = session.get(Battle, battle_id, populate_existing=True)
    if battle is None or visitor_id not in (None, battle.visitor_id):
        raise NotFound("no such battle")
    return battle


def latest_battle(session: Session, visitor_id: str) -> Battle | None:
    """The one that a visitor who comes back finds again, with its names if it has been voted on; never a void one."""
    return session.scalar(
        select(Battle)
        .where(Battle.visitor_id == visitor_id, Battle.state != "void")
        .order_by(Battle.created_at.desc(), Battle.id)
        .limit(1)
    )


def advance_battle(session: Session, battle_id: str, states: Sequence[str], to: str, now: datetime) -> bool:
    """Moves the battle to state `to` if it is in one of `states` at this moment; whether it did."""
    statement = update(Battle).where(Battle.id == battle_id, Battle.state.in_(states))
    return session.execute(statement.values(state=to, updated_at=now)).rowcount == 1


def make_votable(session: Session, battle_id: str, now: datetime) -> bool:
    """Streaming -> votable, if both sides of every turn show an answer, whole or stopped; whether it did."""
    current = current_answers(session, battle_id)
    turns = {number for number, _ in current}
    complete = all((answer := current.get((n, side))) and has_text(answer) for n in turns for side in SIDES)
    return bool(turns) and complete and advance_battle(session, battle_id, ("streaming",), "votable", now)


def has_text(answer: Answer) -> bool:
    """Whether there is an answer to vote on, ended by the model or by the visitor."""
    return answer.state in ("done", "stopped") and bool(answer.text.strip())


def turns_of(session: Session, battle_id: str) -> list[Turn]:
    """In their order."""
    return list(session.scalars(select(Turn).where(Turn.battle_id == battle_id).order_by(Turn.number)))


# Answers


def add_answer(session: Session, turn_id: int, side: str, now: datetime) -> Answer:
    """The next attempt of a side, streaming and empty; from now on the current one."""
    before = session.scalar(select(func.max(Answer.attempt)).where(Answer.turn_id == turn_id, Answer.side == side))
    answer = Answer(turn_id=turn_id, side=side, attempt=(before or 0) + 1, state="streaming", text="", created_at=now)
    session.add(answer)
    session.flush()
    return answer


def current_answers(session: Session, battle_id: str) -> dict[tuple[int, str], Answer]:
    """The highest attempt of each (turn number, side)."""
    rows = session.execute(
        select(Turn.number, Answer)
        .join(Answer, Answer.turn_id == Turn.id)
        .where(Turn.battle_id == battle_id)
        .order_by(Turn.number, Answer.side, Answer.attempt)
        .execution_options(populate_existing=True)
    )
    return {(number, answer.side): answer for number, answer in rows}


def end_answer(session: Session, answer_id: int, state: str, **columns: Any) -> bool:
    """Saves how a streaming answer ended, once: whether it was this call that did.

    `columns`: text, finish_reason, error, token counts, times.
    """
    statement = update(Answer).where(Answer.id == answer_id, Answer.state == "streaming")
    return session.execute(statement.values(state=state, **columns)).rowcount == 1


def interrupt_all(session: Session, now: datetime) -> int:
    """After a restart nobody streams any more: every streaming answer and battle is interrupted. How many battles."""
    session.execute(update(Answer).where(Answer.state == "streaming").values(state="interrupted"))
    statement = update(Battle).where(Battle.state == "streaming").values(state="interrupted", updated_at=now)
    return session.execute(statement).rowcount


# Votes


def cast_vote(session: Session, *, battle_id: str, visitor_id: str, kind: str, now: datetime) -> Vote:
    """The battle's one vote, and its state with it. Raises NotFound, AlreadyVoted or NotVotable,
    and the session must end with it.

    Votes enter one at a time (`BEGIN IMMEDIATE` on SQLite, an advisory lock on PostgreSQL), so that the order of their
    ids is the order of their commits and a board up to a vote's id stays what it was.
    """
    if kind not in VOTE_KINDS:
        raise ValueError(f"vote kind must be one of {', '.join(VOTE_KINDS)}, not {kind!r}")
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(VOTE_LOCK)))
    find_battle(session, battle_id, visitor_id)
    if not advance_battle(session, battle_id, ("votable",), "voted", now):
        state = find_battle(session, battle_id).state
        if state == "voted":
            raise AlreadyVoted("this battle has its vote")
        raise NotVotable(f"a battle that is {state} cannot be voted on")
    vote = Vote(battle_id=battle_id, visitor_id=visitor_id, kind=kind, created_at=now)
    session.add(vote)
    try:
        session.flush()
    except IntegrityError as error:
        raise AlreadyVoted("this battle has its vote") from error
    return vote


def vote_of(session: Session, battle_id: str) -> Vote | None:
    return session.scalar(select(Vote).where(Vote.battle_id == battle_id))


# Limits


def count_battles(
    session: Session, *, since: datetime, visitor_id: str | None = None, address_hash: str | None = None
) -> int:
    """Battles begun since then by a visitor, or from an address."""
    query = select(func.count()).select_from(Battle).where(Battle.created_at >= since)
    if visitor_id is not None:
        query = query.where(Battle.visitor_id == visitor_id)
    if address_hash is not None:
        query = query.where(Battle.address_hash == address_hash)
    return session.scalar(query)


def battle_counts(session: Session) -> dict[int, int]:
    """How many battles each model (by id) has been drawn for, the void ones left out."""
    sides = [
        select(column.label("model_id"), func.count().label("battles")).where(Battle.state != "void").group_by(column)
        for column in (Battle.model_a_id, Battle.model_b_id)
    ]
    counts: dict[int, int] = {}
    for side in sides:
        for model_id, battles in session.execute(side):
            counts[model_id] = counts.get(model_id, 0) + battles
    return counts


# Ratings


@dataclass(frozen=True)
class VotedPair:
    """A vote as the ratings need it: who met whom, and how it ended."""

    vote_id: int
    model_a_id: int
    model_b_id: int
    kind: str


def votes_in_order(session: Session, after: int = 0) -> list[VotedPair]:
    """Every vote on a battle between two models, in the order of their commit; models retired since included."""
    query = (
        select(Vote.id, Battle.model_a_id, Battle.model_b_id, Vote.kind)
        .join(Battle, Battle.id == Vote.battle_id)
        .where(Battle.state == "voted", Vote.id > after)
        .order_by(Vote.id)
    )
    return [VotedPair(*row) for row in session.execute(query)]


def last_vote_id(session: Session, before: int | None = None) -> int:
    """0 where there is none."""
    query = select(func.coalesce(func.max(Vote.id), 0))
    return session.scalar(query if before is None else query.where(Vote.id < before))


def cached_ratings(session: Session, method: str, ci: str) -> list[tuple[str, Rating]]:
    """The rows of one cached board with their models' names, best first. Fresh if `last_vote_id` is the last vote's."""
    query = (
        select(Model.name, Rating)
        .join(Rating, Model.id == Rating.model_id)
        .where(Rating.method == method, Rating.ci == ci)
        .order_by(Rating.rating.desc(), Model.name)
    )
    return [(name, rating) for name, rating in session.execute(query)]


def save_ratings(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Caches rows, each with all columns of Rating; a row that has seen later votes stays as it is."""
    if not rows:
        return
    insert = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[session.get_bind().dialect.name](Rating)
    key = [column.name for column in Rating.__table__.primary_key]
    session.execute(
        insert.on_conflict_do_update(
            index_elements=key,
            set_={column.name: column for column in insert.excluded if column.name not in key},
            where=Rating.last_vote_id <= insert.excluded.last_vote_id,
        ),
        rows,
    )


def advance_ratings(session: Session, method: str, ci: str, last_vote_id: int, now: datetime) -> None:
    """Marks all rows of a board as right up to that vote: for methods where a vote moves only the two it is about."""
    statement = update(Rating).where(Rating.method == method, Rating.ci == ci)
    session.execute(statement.values(last_vote_id=last_vote_id, updated_at=now))
