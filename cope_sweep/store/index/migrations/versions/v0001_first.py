"""The first version of the tables. New databases are made from `tables.py`, so that nothing is upgraded to it."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Never called."""
