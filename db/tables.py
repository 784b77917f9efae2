"""The tables. One class a table, one object a row; without relationships, so that reading an attribute never runs SQL.

All times are aware and UTC. A battle's state and an answer's are checked by the database as well; which change of
state is allowed is in `db.queries`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import DateTime, TypeDecorator

BATTLE_STATES = ("streaming", "votable", "voted", "interrupted", "void")
ANSWER_STATES = ("streaming", "done", "failed", "stopped", "interrupted")
SIDES = ("a", "b")


class UTCDateTime(TypeDecorator):
    """Aware in, aware UTC out, on databases with and without time zones. A naive time is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"time without a zone: {value!r}")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def storable(text: str) -> str:
    """PostgreSQL cannot hold NUL, so its symbol is kept instead, on every database."""
    return text.replace("\0", "\N{SYMBOL FOR NULL}")


class StorableText(TypeDecorator):
    """Made storable on its way in, also where it is only asked for: no NUL of a visitor's makes a query fail."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect) -> str | None:
        return value if value is None else storable(value)


class Id(StorableText):
    """uuid4 in hex."""

    impl = String
    cache_ok = True


class Table(DeclarativeBase):
    """Constraints are named by rule, so that later migrations can address them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  (read by SQLAlchemy as it is)
        datetime: UTCDateTime,
        str: StorableText,
        float: Double,
        dict[str, Any]: JSON,
    }

    def __repr__(self) -> str:
        named = ", ".join(f"{column.key}={getattr(self, column.key)!r}" for column in self.__table__.primary_key)
        return f"<{type(self).__name__} {named}>"


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


class Model(Table):
    """An entry of the arena. Never deleted: a retired one keeps its battles, votes and rating."""

    __tablename__ = "models"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    source: Mapped[str]
    system_prompt: Mapped[str]
    sampling: Mapped[dict[str, Any]]
    chat_template: Mapped[str | None]
    context_length: Mapped[int | None]
    endpoint_key_env: Mapped[str | None]  # name of the environment variable that holds a remote endpoint's key
    enabled: Mapped[bool]
    retired_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    sampling_weight: Mapped[float] = mapped_column(server_default=text("1.0"))  # how often it is drawn, 1 the usual
    organisation: Mapped[str | None]
    licence: Mapped[str | None]
    parameters: Mapped[str | None]  # how many, as people write it: 135M
    precision: Mapped[str | None]  # of the weights; NULL: the engine's own
    adapter: Mapped[str | None]  # source of a LoRA adapter over the checkpoint
    kv_share: Mapped[float] = mapped_column(server_default=text("0.0"))  # of the pool, that it may count on


class Visitor(Table):
    """A browser with our cookie, or whoever an imported file calls one visitor."""

    __tablename__ = "visitors"
    __table_args__ = (Index(None, "public_id", unique=True), Index(None, "quarantined_at"))

    id: Mapped[str] = mapped_column(Id(32), primary_key=True)
    created_at: Mapped[datetime]
    notice_accepted_at: Mapped[datetime | None]
    public_id: Mapped[str | None]  # what exports call the visitor; None where a file told of none
    quarantined_at: Mapped[datetime | None]  # since then no vote is counted
    quarantine_reason: Mapped[str | None]
    forgotten_at: Mapped[datetime | None]  # texts and cookie are gone; this row only keeps the votes together


class Battle(Table):
    """Two hidden models on one conversation of one visitor."""

    __tablename__ = "battles"
    __table_args__ = (
        _one_of("state", BATTLE_STATES),
        CheckConstraint("model_a_id <> model_b_id", name="two_models"),
        Index(None, "visitor_id", "created_at"),
        Index(None, "address_hash", "created_at"),
        Index(None, "state", "updated_at"),
    )

    id: Mapped[str] = mapped_column(Id(32), primary_key=True)  # cannot be guessed
    visitor_id: Mapped[str] = mapped_column(ForeignKey("visitors.id"))
    model_a_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    model_b_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    pair_probability: Mapped[float]  # chance of this unordered pair when it was drawn; 0: unknown
    side_coin: Mapped[bool]  # True: the pair, in order of model id, was swapped
    state: Mapped[str]
    address_hash: Mapped[str | None]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class Turn(Table):
    """One question of a battle."""

    __tablename__ = "turns"
    __table_args__ = (UniqueConstraint("battle_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    battle_id: Mapped[str] = mapped_column(ForeignKey("battles.id"))
    number: Mapped[int]  # from 1
    prompt: Mapped[str]
    created_at: Mapped[datetime]


class Answer(Table):
    """One side's attempt at a turn; the highest attempt is the current one."""

    __tablename__ = "answers"
    __table_args__ = (
        UniqueConstraint("turn_id", "side", "attempt"),
        _one_of("side", SIDES),
        _one_of("state", ANSWER_STATES),
        Index(None, "state"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    turn_id: Mapped[int] = mapped_column(ForeignKey("turns.id"))
    side: Mapped[str] = mapped_column(String(1))
    attempt: Mapped[int]  # from 1
    state: Mapped[str]
    text: Mapped[str]
    finish_reason: Mapped[str | None]
    error: Mapped[str | None]  # for the admin; never shown to the visitor
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]
    first_token_ms: Mapped[float | None]
    duration_ms: Mapped[float | None]
    created_at: Mapped[datetime]


class Vote(Table):
    """A fact. Ids rise in the order of commit and are never used twice: votes are inserted one at a time.

    `counted` and its reason are what the last `Decision` on the vote says; all else never changes but by forgetting.
    """

    __tablename__ = "votes"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    battle_id: Mapped[str] = mapped_column(ForeignKey("battles.id"), unique=True)
    visitor_id: Mapped[str] = mapped_column(ForeignKey("visitors.id"), index=True)
    kind: Mapped[str]  # a key of db.vote_kinds.VOTE_KINDS
    created_at: Mapped[datetime]
    number: Mapped[int] = mapped_column(unique=True)  # from 1, without a gap: its place in the vote log
    counted: Mapped[bool]
    not_counted_reason: Mapped[str | None] = mapped_column(index=True)  # a key of db.decisions.REASONS
    previous_hash: Mapped[str]
    chain_hash: Mapped[str]
    private_digest: Mapped[str]  # of visitor, texts and details, under the salt
    private_salt: Mapped[str | None]  # None once the visitor was forgotten: the digest then tells nothing
    imported_from: Mapped[str | None]  # format and sha256 of the file
    details: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # what else that file said of it


class Decision(Table):
    """Whether a vote counts from now on, and why: the second chain of the log. The last one on a vote holds."""

    __tablename__ = "decisions"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(unique=True)  # from 1, without a gap
    vote_id: Mapped[int] = mapped_column(ForeignKey("votes.id"), index=True)
    counted: Mapped[bool]
    reason: Mapped[str]  # a key of db.decisions.REASONS
    decided_by: Mapped[str]
    note: Mapped[str]  # for the admin
    retroactive: Mapped[bool]  # the vote stood on boards before: those are out of date
    created_at: Mapped[datetime]
    previous_hash: Mapped[str]
    chain_hash: Mapped[str]


class LogHead(Table):
    """Where a chain of the log ends, signed: what makes a removed end show."""

    __tablename__ = "log_heads"

    name: Mapped[str] = mapped_column(primary_key=True)  # votes or decisions
    entries: Mapped[int]
    chain_hash: Mapped[str]
    signed_from: Mapped[int]  # entries that were there when a head was first signed, or had lost its signature
    signature: Mapped[str | None]


class Rating(Table):
    """A cache, replayable from the votes up to `last_vote_id`: a row of the board of one method with its intervals.

    `ci`, `input_sha256` and `notes` belong to the board as a whole and stand on each of its rows, so that a restart
    finds the board whole.
    """

    __tablename__ = "ratings"

    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"), primary_key=True)
    method: Mapped[str] = mapped_column(primary_key=True)
    ci: Mapped[str] = mapped_column(primary_key=True)  # kind of interval; "none" where the method has none
    rating: Mapped[float]
    lower: Mapped[float | None]
    upper: Mapped[float | None]
    rank_best: Mapped[int | None]
    rank_worst: Mapped[int | None]
    votes: Mapped[int]
    wins: Mapped[int]
    elo: Mapped[float]
    last_vote_id: Mapped[int]
    input_sha256: Mapped[str | None]
    notes: Mapped[dict[str, Any]]
    updated_at: Mapped[datetime]
    last_decision: Mapped[int] = mapped_column(server_default=text("0"))  # number of the last decision it has seen
