"""Indexes for what is asked every second or few: undecided battles, votes that do not count, visitors in quarantine."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index(op.f("ix_battles_state"), table_name="battles")
    op.create_index(op.f("ix_battles_state_updated_at"), "battles", ["state", "updated_at"], unique=False)
    op.create_index(op.f("ix_votes_not_counted_reason"), "votes", ["not_counted_reason"], unique=False)
    op.create_index(op.f("ix_visitors_quarantined_at"), "visitors", ["quarantined_at"], unique=False)
