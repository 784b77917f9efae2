"""The adapter over a model's checkpoint, where it has one."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("adapter", sa.Text(), nullable=True))
