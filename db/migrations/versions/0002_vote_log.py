"""The vote log, quarantine and forgetting; what a model's maker says of it. Votes of before are chained as they stand.

Tables that others refer to only get columns: SQLite would have to build them anew.
"""

import uuid
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

from db import vote_log

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("sampling_weight", sa.Double(), server_default=sa.text("1.0"), nullable=False))
    for name in ("organisation", "licence", "parameters"):
        op.add_column("models", sa.Column(name, sa.Text(), nullable=True))
    op.add_column("visitors", sa.Column("public_id", sa.Text(), nullable=True))
    op.add_column("visitors", sa.Column("quarantined_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("visitors", sa.Column("quarantine_reason", sa.Text(), nullable=True))
    op.add_column("visitors", sa.Column("forgotten_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index(op.f("ix_visitors_public_id"), "visitors", ["public_id"], unique=True)
    op.add_column("ratings", sa.Column("last_decision", sa.Integer(), server_default=sa.text("0"), nullable=False))
    heads = op.create_table(
        "log_heads",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("entries", sa.Integer(), nullable=False),
        sa.Column("chain_hash", sa.Text(), nullable=False),
        sa.Column("signed_from", sa.Integer(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_log_heads")),
    )
    _name_visitors()
    _add_vote_columns()
    entries, last = _chain_votes()
    _require_vote_columns()
    op.create_table(
        "decisions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("vote_id", sa.Integer(), nullable=False),
        sa.Column("counted", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("retroactive", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("previous_hash", sa.Text(), nullable=False),
        sa.Column("chain_hash", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["vote_id"], ["votes.id"], name=op.f("fk_decisions_vote_id_votes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decisions")),
        sa.UniqueConstraint("number", name=op.f("uq_decisions_number")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_decisions_vote_id"), "decisions", ["vote_id"], unique=False)
    op.bulk_insert(
        heads,
        [
            {"name": vote_log.VOTES, "entries": entries, "chain_hash": last, "signed_from": entries},
            {"name": vote_log.DECISIONS, "entries": 0, "chain_hash": vote_log.START, "signed_from": 0},
        ],
    )


def _name_visitors() -> None:
    connection = op.get_bind()
    for (visitor_id,) in connection.execute(sa.text("SELECT id FROM visitors")).all():
        connection.execute(
            sa.text("UPDATE visitors SET public_id = :public WHERE id = :id"),
            {"public": uuid.uuid4().hex, "id": visitor_id},
        )


COLUMNS = {
    "number": sa.Integer(),
    "counted": sa.Boolean(),
    "not_counted_reason": sa.Text(),
    "previous_hash": sa.Text(),
    "chain_hash": sa.Text(),
    "private_digest": sa.Text(),
    "private_salt": sa.Text(),
    "imported_from": sa.Text(),
    "details": sa.JSON(),
}
REQUIRED = ("number", "counted", "previous_hash", "chain_hash", "private_digest")


def _add_vote_columns() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("votes", sa.Column(name, kind, nullable=True))


def _require_vote_columns() -> None:
    with op.batch_alter_table("votes", table_kwargs={"sqlite_autoincrement": True}) as batch:
        for name in REQUIRED:
            batch.alter_column(name, existing_type=COLUMNS[name], nullable=False)
        batch.create_unique_constraint(op.f("uq_votes_number"), ["number"])


VOTES = """
SELECT votes.id, votes.battle_id, votes.kind, votes.created_at, visitors.public_id, a.name, b.name
FROM votes JOIN battles ON battles.id = votes.battle_id JOIN visitors ON visitors.id = votes.visitor_id
JOIN models a ON a.id = battles.model_a_id JOIN models b ON b.id = battles.model_b_id ORDER BY votes.id
"""
TEXTS = """
SELECT turns.number, turns.prompt, answers.side, answers.text
FROM turns JOIN answers ON answers.turn_id = turns.id WHERE turns.battle_id = :battle
ORDER BY turns.number, answers.side, answers.attempt
"""
FILL = """
UPDATE votes SET number = :number, counted = :counted, previous_hash = :previous, chain_hash = :hash,
private_digest = :private, private_salt = :salt WHERE id = :id
"""


def _chain_votes() -> tuple[int, str]:
    """How many votes there are, and the hash of the last."""
    connection = op.get_bind()
    head = vote_log.Head(vote_log.VOTES)
    for vote_id, battle, kind, created_at, visitor, model_a, model_b in connection.execute(sa.text(VOTES)).all():
        turns: dict[int, dict[str, str]] = {}
        for number, prompt, side, answer in connection.execute(sa.text(TEXTS), {"battle": battle}):
            turns.setdefault(number, {"prompt": prompt})[side] = answer
        salt = uuid.uuid4().hex
        private = vote_log.private_digest(salt, visitor, list(turns.values()), None)
        body = vote_log.vote_body(
            battle=battle,
            model_a=model_a,
            model_b=model_b,
            kind=kind,
            created_at=_aware(created_at),
            private_digest=private,
        )
        entry, head = vote_log.append(head, body, None)
        values = {"number": entry.number, "counted": True, "previous": entry.previous_hash, "hash": entry.chain_hash}
        connection.execute(sa.text(FILL), {**values, "private": private, "salt": salt, "id": vote_id})
    return head.entries, head.chain_hash


def _aware(moment: datetime | str) -> datetime:
    """SQLite tells a time as text, in UTC without a zone."""
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
