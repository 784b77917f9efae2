"""First tables: models, visitors, battles, turns, answers, votes, ratings."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("system_prompt", sa.Text(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("chat_template", sa.Text(), nullable=True),
        sa.Column("context_length", sa.Integer(), nullable=True),
        sa.Column("endpoint_key_env", sa.Text(), nullable=True),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint("name", name=op.f("uq_models_name")),
    )
    op.create_table(
        "visitors",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("notice_accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_visitors")),
    )
    op.create_table(
        "battles",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("visitor_id", sa.String(length=32), nullable=False),
        sa.Column("model_a_id", sa.Integer(), nullable=False),
        sa.Column("model_b_id", sa.Integer(), nullable=False),
        sa.Column("pair_probability", sa.Double(), nullable=False),
        sa.Column("side_coin", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("address_hash", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "state IN ('streaming', 'votable', 'voted', 'interrupted', 'void')", name=op.f("ck_battles_state")
        ),
        sa.CheckConstraint("model_a_id <> model_b_id", name=op.f("ck_battles_two_models")),
        sa.ForeignKeyConstraint(["model_a_id"], ["models.id"], name=op.f("fk_battles_model_a_id_models")),
        sa.ForeignKeyConstraint(["model_b_id"], ["models.id"], name=op.f("fk_battles_model_b_id_models")),
        sa.ForeignKeyConstraint(["visitor_id"], ["visitors.id"], name=op.f("fk_battles_visitor_id_visitors")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_battles")),
    )
    op.create_index(op.f("ix_battles_address_hash_created_at"), "battles", ["address_hash", "created_at"], unique=False)
    op.create_index(op.f("ix_battles_state"), "battles", ["state"], unique=False)
    op.create_index(op.f("ix_battles_visitor_id_created_at"), "battles", ["visitor_id", "created_at"], unique=False)
    op.create_table(
        "ratings",
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("ci", sa.Text(), nullable=False),
        sa.Column("rating", sa.Double(), nullable=False),
        sa.Column("lower", sa.Double(), nullable=True),
        sa.Column("upper", sa.Double(), nullable=True),
        sa.Column("rank_best", sa.Integer(), nullable=True),
        sa.Column("rank_worst", sa.Integer(), nullable=True),
        sa.Column("votes", sa.Integer(), nullable=False),
        sa.Column("wins", sa.Integer(), nullable=False),
        sa.Column("elo", sa.Double(), nullable=False),
        sa.Column("last_vote_id", sa.Integer(), nullable=False),
        sa.Column("input_sha256", sa.Text(), nullable=True),
        sa.Column("notes", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_ratings_model_id_models")),
        sa.PrimaryKeyConstraint("model_id", "method", "ci", name=op.f("pk_ratings")),
    )
    op.create_table(
        "turns",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("battle_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["battle_id"], ["battles.id"], name=op.f("fk_turns_battle_id_battles")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_turns")),
        sa.UniqueConstraint("battle_id", "number", name=op.f("uq_turns_battle_id_number")),
    )
    op.create_table(
        "votes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("battle_id", sa.String(length=32), nullable=False),
        sa.Column("visitor_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["battle_id"], ["battles.id"], name=op.f("fk_votes_battle_id_battles")),
        sa.ForeignKeyConstraint(["visitor_id"], ["visitors.id"], name=op.f("fk_votes_visitor_id_visitors")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_votes")),
        sa.UniqueConstraint("battle_id", name=op.f("uq_votes_battle_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_votes_visitor_id"), "votes", ["visitor_id"], unique=False)
    op.create_table(
        "answers",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("turn_id", sa.Integer(), nullable=False),
        sa.Column("side", sa.String(length=1), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("cached_tokens", sa.Integer(), nullable=True),
        sa.Column("first_token_ms", sa.Double(), nullable=True),
        sa.Column("duration_ms", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("side IN ('a', 'b')", name=op.f("ck_answers_side")),
        sa.CheckConstraint(
            "state IN ('streaming', 'done', 'failed', 'stopped', 'interrupted')", name=op.f("ck_answers_state")
        ),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_answers_turn_id_turns")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_answers")),
        sa.UniqueConstraint("turn_id", "side", "attempt", name=op.f("uq_answers_turn_id_side_attempt")),
    )
    op.create_index(op.f("ix_answers_state"), "answers", ["state"], unique=False)
