"""The share of the pool that a model may count on."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("kv_share", sa.Double(), server_default=sa.text("0.0"), nullable=False))
