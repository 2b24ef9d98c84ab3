"""The first version of the tables."""

from alembic import op

from cope_sweep.store.index.tables import counters, metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    metadata.create_all(op.get_bind())
    op.get_bind().execute(counters.insert().values(name="revision", value=0))
