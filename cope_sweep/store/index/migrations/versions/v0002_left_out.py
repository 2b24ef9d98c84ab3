"""Sweeps know how many nodes they have left out."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column."""
    op.add_column("sweeps", sa.Column("left_out", sa.Integer(), nullable=False, server_default="0"))
