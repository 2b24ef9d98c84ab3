"""Brings an index of an earlier version to the present tables. New databases are made from `tables.py`."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import JSON, Connection, bindparam, column, select, table, text, update

from cope_sweep.store.index.rows import part_values


def add_nodes_left_out(connection: Connection) -> None:
    """Sweeps know how many nodes they have left out."""
    connection.execute(text("ALTER TABLE sweeps ADD COLUMN left_out INTEGER NOT NULL DEFAULT 0"))


def flatten_parts(connection: Connection) -> None:
    """Parts have their values by dotted key, and the tables of single values are dropped."""
    parts = table("parts", column("id"), column("section"), column("content", JSON))
    flat = [
        {"part": part, "values": part_values(section, content)}
        for part, section, content in connection.execute(select(parts.c.id, parts.c.section, parts.c.content))
    ]
    if flat:
        values = bindparam("values", type_=JSON)
        connection.execute(update(parts).where(parts.c.id == bindparam("part")).values(content=values), flat)
    for name in ("part_values", "run_values"):
        connection.execute(text(f"DROP TABLE {name}"))


MIGRATIONS: dict[str, Callable[[Connection], None]] = {"0002": add_nodes_left_out, "0003": flatten_parts}
"""Version → what makes it of the one before, in order. `tables.py` declares the last one."""


def upgrade(connection: Connection, version: str) -> None:
    """Migrate the tables from a version to the last one."""
    for name, migration in MIGRATIONS.items():
        if name > version:
            migration(connection)
