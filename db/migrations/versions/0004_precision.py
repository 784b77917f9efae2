"""The precision of a model's weights, where it is not the engine's own."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("precision", sa.Text(), nullable=True))
