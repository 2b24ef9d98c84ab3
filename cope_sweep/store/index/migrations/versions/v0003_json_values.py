"""Parts have their values by dotted key, and the tables of single values are dropped."""

import sqlalchemy as sa
from alembic import op

from cope_sweep.store.index.rows import part_values

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Flatten the content of each part, and drop the tables."""
    connection = op.get_bind()
    parts = sa.table("parts", sa.column("id"), sa.column("section"), sa.column("content", sa.JSON))
    flat = [
        {"part": part, "values": part_values(section, content)}
        for part, section, content in connection.execute(sa.select(parts))
    ]
    values = sa.bindparam("values", type_=sa.JSON)
    if flat:
        connection.execute(sa.update(parts).where(parts.c.id == sa.bindparam("part")).values(content=values), flat)
    op.drop_table("part_values")
    op.drop_table("run_values")
