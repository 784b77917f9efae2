"""Every question the application asks of the database, by name. The session comes first; the caller owns the commit.

A change of state is one `UPDATE ... WHERE state IN (...)`: of several who try at once one succeeds and the others are
told so. Times and ids come from the caller, so that a test decides them. No savepoints: a full SQLite rolls the
whole transaction back by itself, and the error about the lost savepoint would hide the one about the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import and_, delete, func, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from db import vote_log
from db.decisions import REASONS
from db.errors import AlreadyVoted, NameTaken, NotFound, NotVotable
from db.tables import (
    BATTLE_STATES,
    SIDES,
    Answer,
    Battle,
    Decision,
    LogHead,
    Model,
    Rating,
    Turn,
    Visitor,
    Vote,
    storable,
)
from db.vote_kinds import VOTE_KINDS

LIMIT_LOCK = 0x4C494D54  # seed of the advisory locks of who counts battles against a limit
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
    sampling_weight: float = 1.0,
    organisation: str | None = None,
    licence: str | None = None,
    parameters: str | None = None,
    precision: str | None = None,
    adapter: str | None = None,
    kv_share: float = 0.0,
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
        sampling_weight=sampling_weight,
        organisation=organisation,
        licence=licence,
        parameters=parameters,
        precision=precision,
        adapter=adapter,
        kv_share=kv_share,
    )
    session.add(model)
    try:
        session.flush()
    except IntegrityError as error:
        raise NameTaken(f"the name {name!r} is taken") from error
    return model


def models(session: Session, *, retired: bool = False) -> list[Model]:
    """By name; with those that were retired if asked."""
    query = select(Model).order_by(Model.name)
    return list(session.scalars(query if retired else query.where(Model.retired_at.is_(None))))


def sampling_weights(session: Session) -> dict[int, float]:
    """By id, of the models that are not retired."""
    rows = session.execute(select(Model.id, Model.sampling_weight).where(Model.retired_at.is_(None)))
    return {model_id: weight for model_id, weight in rows}


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


def add_visitor(session: Session, visitor_id: str, now: datetime, *, public_id: str | None = None) -> Visitor:
    """`public_id` is what exports call the visitor; the id itself is the cookie, and never leaves."""
    visitor = Visitor(id=visitor_id, public_id=public_id, created_at=now)
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
    answers = {side: _new_answer(turn.id, side, 1, now) for side in SIDES}
    session.add_all(answers.values())
    session.flush()
    return turn, answers


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
    answer = _new_answer(turn_id, side, (before or 0) + 1, now)
    session.add(answer)
    session.flush()
    return answer


def _new_answer(turn_id: int, side: str, attempt: int, now: datetime) -> Answer:
    return Answer(turn_id=turn_id, side=side, attempt=attempt, state="streaming", text="", created_at=now)


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


def cast_vote(
    session: Session,
    *,
    battle_id: str,
    visitor_id: str,
    kind: str,
    now: datetime,
    sign: vote_log.Sign | None = None,
    counted: bool = True,
    reason: str = "",
    decided_by: str = "",
    note: str = "",
) -> Vote:
    """The battle's one vote and its place in the log, and its state with it. Raises NotFound, AlreadyVoted or
    NotVotable, and the session must end with it.

    Votes enter one at a time (`BEGIN IMMEDIATE` on SQLite, an advisory lock on PostgreSQL), so that the order of their
    ids is the order of their commits, a board up to a vote's id stays what it was, and the log is one chain.
    A vote that does not count from the start (`counted` False) comes with the decision that says why.
    """
    if kind not in VOTE_KINDS:
        raise ValueError(f"vote kind must be one of {', '.join(VOTE_KINDS)}, not {kind!r}")
    lock_votes(session)
    battle = find_battle(session, battle_id, visitor_id)
    if not advance_battle(session, battle_id, ("votable",), "voted", now):
        state = find_battle(session, battle_id).state
        if state == "voted":
            raise AlreadyVoted("this battle has its vote")
        raise NotVotable(f"a battle that is {state} cannot be voted on")
    try:
        vote = append_vote(session, battle, kind, now, sign)
    except IntegrityError as error:
        raise AlreadyVoted("this battle has its vote") from error
    if not counted:
        decide(session, [vote], False, reason, decided_by, now, note=note, sign=sign, retroactive=False)
    return vote


def lock_votes(session: Session) -> None:
    """From here to the session's end nobody else appends to the log; on SQLite every writer has this already."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(VOTE_LOCK)))


def append_vote(
    session: Session,
    battle: Battle,
    kind: str,
    now: datetime,
    sign: vote_log.Sign | None,
    *,
    salt: str | None = None,
    private_digest: str | None = None,
    imported_from: str | None = None,
    details: dict[str, Any] | None = None,
) -> Vote:
    """The next vote of the log, whose lock the session holds. Raises IntegrityError where the battle has one.

    `private_digest` is that of a vote whose visitor was forgotten elsewhere: nothing is left to compute it from.
    """
    if private_digest is None:
        salt = salt or uuid4().hex
        public_id = session.get(Visitor, battle.visitor_id).public_id
        private = vote_log.private_digest(salt, public_id, conversation_of(session, battle.id), details)
    else:
        salt, private = None, private_digest
    names = {side: model.name for side, model in models_of(session, battle).items()}
    body = vote_log.vote_body(
        battle=battle.id,
        model_a=names["a"],
        model_b=names["b"],
        kind=kind,
        created_at=now,
        private_digest=private,
    )
    entry = _append_to_log(session, vote_log.VOTES, body, sign)
    vote = Vote(
        battle_id=battle.id,
        visitor_id=battle.visitor_id,
        kind=kind,
        created_at=now,
        number=entry.number,
        counted=True,
        previous_hash=entry.previous_hash,
        chain_hash=entry.chain_hash,
        private_digest=private,
        private_salt=salt,
        imported_from=imported_from,
        details=details,
    )
    session.add(vote)
    session.flush()
    return vote


def conversation_of(session: Session, battle_id: str) -> list[dict[str, str]]:
    """One {"prompt", "a", "b"} a turn: what was voted on, as the log's digests cover it."""
    texts: dict[int, dict[str, str]] = {turn.number: {"prompt": turn.prompt} for turn in turns_of(session, battle_id)}
    for (number, side), answer in current_answers(session, battle_id).items():
        texts[number][side] = answer.text
    return list(texts.values())


def decide(
    session: Session,
    votes: Sequence[Vote],
    counted: bool,
    reason: str,
    decided_by: str,
    now: datetime,
    *,
    note: str = "",
    sign: vote_log.Sign | None = None,
    retroactive: bool = True,
) -> None:
    """Whether these votes count from now on, logged. Boards that were cached before are forgotten: a recount."""
    if reason not in REASONS:
        raise ValueError(f"a reason is one of {', '.join(REASONS)}, not {reason!r}")
    note, decided_by = storable(note), storable(decided_by)  # the log's hash is of what is stored
    lock_votes(session)
    for vote in votes:
        body = vote_log.decision_body(
            vote=vote.number, counted=counted, reason=reason, decided_by=decided_by, note=note, created_at=now
        )
        entry = _append_to_log(session, vote_log.DECISIONS, body, sign)
        session.add(
            Decision(
                number=entry.number,
                vote_id=vote.id,
                counted=counted,
                reason=reason,
                decided_by=decided_by,
                note=note,
                retroactive=retroactive,
                created_at=now,
                previous_hash=entry.previous_hash,
                chain_hash=entry.chain_hash,
            )
        )
        vote.counted, vote.not_counted_reason = counted, None if counted else reason
    session.flush()
    if votes and retroactive:
        session.execute(delete(Rating))


def _append_to_log(session: Session, name: str, body: dict[str, Any], sign: vote_log.Sign | None) -> vote_log.Entry:
    row = _head_row(session, name)
    entry, after = vote_log.append(head_of(row), body, sign)
    row.entries, row.chain_hash, row.signed_from = after.entries, after.chain_hash, after.signed_from
    row.signature = after.signature
    return entry


def _head_row(session: Session, name: str) -> LogHead:
    row = session.get(LogHead, name, populate_existing=True)
    if row is None:
        raise NotFound(f"the log has no head of its {name}: the database was not migrated by this program")
    return row


def head_of(row: LogHead) -> vote_log.Head:
    return vote_log.Head(row.name, row.entries, row.chain_hash, row.signed_from, row.signature)


def log_head(session: Session, name: str) -> vote_log.Head:
    """`name`: vote_log.VOTES or vote_log.DECISIONS."""
    return head_of(_head_row(session, name))


def last_decision(session: Session) -> int:
    """Number of the last decision that changed votes already on boards; 0 where there is none."""
    return session.scalar(select(func.coalesce(func.max(Decision.number), 0)).where(Decision.retroactive))


def vote_of(session: Session, battle_id: str) -> Vote | None:
    return session.scalar(select(Vote).where(Vote.battle_id == battle_id))


# Limits


def count_in_turn(session: Session, *who: str) -> None:
    """Until this transaction ends nobody else's counts for any of these; each takes them in the same order.

    SQLite has one writer anyway; on PostgreSQL two who begin at once would both find room for the last one.
    """
    if session.get_bind().dialect.name == "postgresql":
        for each in who:
            session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(each, LIMIT_LOCK))))


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


def undecided_battles(session: Session, since: datetime) -> int:
    """Battles that may still be voted on, and that something has happened to since then."""
    undecided = [state for state in BATTLE_STATES if state not in ("voted", "void")]
    query = select(func.count()).select_from(Battle)
    return session.scalar(query.where(Battle.state.in_(undecided), Battle.updated_at >= since))


# Ratings


@dataclass(frozen=True)
class VotedPair:
    """A vote as the ratings need it: who met whom, and how it ended."""

    vote_id: int
    model_a_id: int
    model_b_id: int
    kind: str


def votes_in_order(session: Session, after: int = 0) -> list[VotedPair]:
    """Every counted vote on a battle between two models, in the order of commit; models retired since included."""
    query = (
        select(Vote.id, Battle.model_a_id, Battle.model_b_id, Vote.kind)
        .join(Battle, Battle.id == Vote.battle_id)
        .where(Battle.state == "voted", Vote.counted, Vote.id > after)
        .order_by(Vote.id)
    )
    return [VotedPair(*row) for row in session.execute(query)]


def last_vote_id(session: Session, before: int | None = None) -> int:
    """Of those that count; 0 where there is none."""
    query = select(func.coalesce(func.max(Vote.id), 0)).where(Vote.counted)
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
    """Caches rows, each with all columns of Rating; a row that has seen later votes or decisions stays as it is."""
    if not rows:
        return
    insert = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[session.get_bind().dialect.name](Rating)
    key = [column.name for column in Rating.__table__.primary_key]
    session.execute(
        insert.on_conflict_do_update(
            index_elements=key,
            set_={column.name: column for column in insert.excluded if column.name not in key},
            where=tuple_(Rating.last_decision, Rating.last_vote_id)
            <= tuple_(insert.excluded.last_decision, insert.excluded.last_vote_id),
        ),
        rows,
    )


def advance_ratings(session: Session, method: str, ci: str, last_vote_id: int, now: datetime) -> None:
    """Marks all rows of a board as right up to that vote: for methods where a vote moves only the two it is about."""
    statement = update(Rating).where(Rating.method == method, Rating.ci == ci)
    session.execute(statement.values(last_vote_id=last_vote_id, updated_at=now))


# Votes of others


def import_vote(
    session: Session,
    *,
    battle_id: str,
    visitor_id: str,
    model_ids: tuple[int, int],
    kind: str,
    created_at: datetime,
    conversation: Sequence[dict[str, str]],
    sign: vote_log.Sign | None,
    salt: str | None = None,
    private_digest: str | None = None,
    pair_probability: float | None = None,
    side_coin: bool | None = None,
    imported_from: str | None = None,
    details: dict[str, Any] | None = None,
) -> Vote:
    """A voted battle of a file, appended to the log whose lock the session holds. `conversation` as in
    `conversation_of`; `private_digest` stands in for that of a conversation which its file no longer had."""
    battle = Battle(
        id=battle_id,
        visitor_id=visitor_id,
        model_a_id=model_ids[0],
        model_b_id=model_ids[1],
        pair_probability=pair_probability or 0.0,
        side_coin=bool(side_coin),
        state="voted",
        created_at=created_at,
        updated_at=created_at,
    )
    session.add(battle)
    session.flush()
    for number, said in enumerate(conversation, 1):
        turn = Turn(battle_id=battle_id, number=number, prompt=said["prompt"], created_at=created_at)
        session.add(turn)
        session.flush()
        session.add_all(
            Answer(turn_id=turn.id, side=side, attempt=1, state="done", text=said[side], created_at=created_at)
            for side in SIDES
        )
    session.flush()
    return append_vote(
        session,
        battle,
        kind,
        created_at,
        sign,
        salt=salt,
        private_digest=private_digest,
        imported_from=imported_from,
        details=details,
    )


def battle_exists(session: Session, battle_id: str) -> bool:
    return session.scalar(select(Battle.id).where(Battle.id == battle_id)) is not None


def visitor_called(session: Session, public_id: str) -> Visitor | None:
    return session.scalar(select(Visitor).where(Visitor.public_id == public_id))


# The vote log


def verify_log(session: Session, sign: vote_log.Sign | None) -> vote_log.Report:
    """Reads the whole log. Without `sign` no signature is looked at."""
    votes = (
        vote_log.KeptVote(
            entry,
            vote.private_salt,
            private_part(session, vote) if vote.private_salt else None,
            vote.counted,
            vote.not_counted_reason,
        )
        for entry, vote in logged_votes(session)
    )
    heads = {name: log_head(session, name) for name in (vote_log.VOTES, vote_log.DECISIONS)}
    return vote_log.verify(votes, (entry for entry, _ in logged_decisions(session)), heads, sign)


def sign_log(session: Session, sign: vote_log.Sign) -> None:
    """Signs heads that nobody has signed yet, as after an upgrade; they say that they vouch from here on only."""
    lock_votes(session)
    for row in session.scalars(select(LogHead).where(LogHead.signature.is_(None), LogHead.entries > 0)):
        row.signed_from = row.entries
        row.signature = sign(head_of(row).text)


def logged_votes(session: Session) -> Iterator[tuple[vote_log.Entry, Vote]]:
    """The chain of the votes as it is stored, by id: an entry of the log with the row it was read from."""
    a, b = aliased(Model), aliased(Model)
    query = (
        select(Vote, a.name, b.name)
        .join(Battle, Battle.id == Vote.battle_id)
        .join(a, a.id == Battle.model_a_id)
        .join(b, b.id == Battle.model_b_id)
        .order_by(Vote.id)
        .execution_options(yield_per=1000, populate_existing=True)
    )
    for vote, model_a, model_b in session.execute(query):
        body = vote_log.vote_body(
            battle=vote.battle_id,
            model_a=model_a,
            model_b=model_b,
            kind=vote.kind,
            created_at=vote.created_at,
            private_digest=vote.private_digest,
        )
        yield vote_log.Entry(vote.number, vote.previous_hash, vote.chain_hash, body), vote


def logged_decisions(session: Session) -> Iterator[tuple[vote_log.Entry, Decision]]:
    """The chain of the decisions as it is stored, by id."""
    query = (
        select(Decision, Vote.number)
        .join(Vote, Vote.id == Decision.vote_id)
        .order_by(Decision.id)
        .execution_options(yield_per=1000, populate_existing=True)
    )
    for decision, vote_number in session.execute(query):
        body = vote_log.decision_body(
            vote=vote_number,
            counted=decision.counted,
            reason=decision.reason,
            decided_by=decision.decided_by,
            note=decision.note,
            created_at=decision.created_at,
        )
        yield vote_log.Entry(decision.number, decision.previous_hash, decision.chain_hash, body), decision


def private_part(session: Session, vote: Vote) -> dict[str, Any]:
    """What the vote's private digest covers, as it is stored now: the arguments of `vote_log.private_digest`."""
    return {
        "visitor": session.get(Visitor, vote.visitor_id).public_id,
        "conversation": conversation_of(session, vote.battle_id),
        "details": vote.details,
    }


# Honesty


def casts(session: Session) -> list[tuple[Vote, Battle]]:
    """Every vote with its battle, in the order of the log."""
    query = select(Vote, Battle).join(Battle, Battle.id == Vote.battle_id).order_by(Vote.id)
    return [(vote, battle) for vote, battle in session.execute(query)]


def first_prompts(session: Session) -> dict[int, str]:
    """By vote (id) what its battle began with, of those that count or that only their prompt keeps from it; the
    forgotten left out."""
    held = Visitor.quarantined_at.is_not(None)
    query = (
        select(Vote.id, Turn.prompt)
        .join(Turn, Turn.battle_id == Vote.battle_id)
        .join(Visitor, Visitor.id == Vote.visitor_id)
        .where(Turn.number == 1, Vote.private_salt.is_not(None))
        .where(or_(Vote.counted, and_(Vote.not_counted_reason == "frequent_prompt", ~held)))
    )
    return {vote_id: prompt for vote_id, prompt in session.execute(query)}


def votes_with(session: Session, vote_ids: Sequence[int]) -> list[Vote]:
    """In the order of the log; asked for in parts, since a database takes only so many at once."""
    found: list[Vote] = []
    for start in range(0, len(vote_ids), 500):
        found += session.scalars(select(Vote).where(Vote.id.in_(vote_ids[start : start + 500])))
    return sorted(found, key=lambda vote: vote.id)


def votes_by(session: Session, visitor_id: str) -> list[Vote]:
    return list(session.scalars(select(Vote).where(Vote.visitor_id == visitor_id).order_by(Vote.id)))


def votes_not_counted_for(session: Session, reason: str) -> list[Vote]:
    return list(session.scalars(select(Vote).where(Vote.not_counted_reason == reason).order_by(Vote.id)))


def newest_votes(session: Session, limit: int) -> list[Vote]:
    """In the order of the log."""
    return list(session.scalars(select(Vote).order_by(Vote.id.desc()).limit(limit)))[::-1]


def vote_totals(session: Session) -> tuple[int, int, int]:
    """How many votes there are, how many count, and how many visitors are in quarantine."""
    total = session.scalar(select(func.count()).select_from(Vote))
    out = session.scalar(select(func.count()).select_from(Vote).where(Vote.not_counted_reason.is_not(None)))
    held = session.scalar(select(func.count()).select_from(Visitor).where(Visitor.quarantined_at.is_not(None)))
    return total, total - out, held


def visitors_in_quarantine(session: Session) -> list[Visitor]:
    return list(session.scalars(select(Visitor).where(Visitor.quarantined_at.is_not(None))))


def quarantine(
    session: Session, visitor_id: str, why: str, decided_by: str, now: datetime, sign: vote_log.Sign | None
) -> int:
    """No vote of the visitor counts from now on, nor any given before; how many stopped counting. Raises NotFound."""
    lock_votes(session)
    visitor = find_visitor(session, visitor_id)
    if visitor is None:
        raise NotFound("no such visitor")
    visitor.quarantined_at, visitor.quarantine_reason = now, why
    votes = [vote for vote in votes_by(session, visitor_id) if vote.counted]
    decide(session, votes, False, "quarantine", decided_by, now, note=why, sign=sign)
    return len(votes)


def release(session: Session, visitor_id: str, decided_by: str, now: datetime, sign: vote_log.Sign | None) -> int:
    """Takes a quarantine back; how many votes count again: those that only the quarantine kept from it."""
    lock_votes(session)
    visitor = find_visitor(session, visitor_id)
    if visitor is None:
        raise NotFound("no such visitor")
    visitor.quarantined_at = visitor.quarantine_reason = None
    votes = [vote for vote in votes_by(session, visitor_id) if vote.not_counted_reason == "quarantine"]
    decide(session, votes, True, "recount", decided_by, now, sign=sign)
    return len(votes)


def forget_visitor(session: Session, visitor_id: str, anonymous_id: str, now: datetime) -> int:
    """Takes away who a visitor was and what was said: texts, cookie, address, and the salts under which the log's
    digests cover them. The votes stay, under a row that nobody can find again; how many. What is still under way ends,
    so that no text is saved later. Raises NotFound.

    The log still verifies: its hashes cover digests, and without its salt a digest tells nothing.
    """
    lock_votes(session)
    visitor = find_visitor(session, visitor_id)
    if visitor is None:
        raise NotFound("no such visitor")
    session.add(
        Visitor(
            id=anonymous_id,
            created_at=now,
            quarantined_at=visitor.quarantined_at,
            quarantine_reason=visitor.quarantine_reason,
            forgotten_at=now,
        )
    )
    session.flush()
    battles = select(Battle.id).where(Battle.visitor_id == visitor_id)
    turns = select(Turn.id).where(Turn.battle_id.in_(battles))
    under_way = Answer.turn_id.in_(turns), Answer.state == "streaming"
    session.execute(update(Answer).where(*under_way).values(state="interrupted"))
    session.execute(update(Battle).where(Battle.visitor_id == visitor_id, Battle.state != "voted").values(state="void"))
    session.execute(update(Answer).where(Answer.turn_id.in_(turns)).values(text="", error=None))
    session.execute(update(Turn).where(Turn.battle_id.in_(battles)).values(prompt=""))
    session.execute(
        update(Battle).where(Battle.visitor_id == visitor_id).values(visitor_id=anonymous_id, address_hash=None)
    )
    changed = session.execute(
        update(Vote)
        .where(Vote.visitor_id == visitor_id)
        .values(visitor_id=anonymous_id, private_salt=None, details=None)
        .execution_options(synchronize_session=False)
    )
    session.execute(delete(Visitor).where(Visitor.id == visitor_id).execution_options(synchronize_session=False))
    return changed.rowcount
