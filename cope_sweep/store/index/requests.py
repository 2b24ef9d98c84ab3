"""Names that one owner of several holds until they expire: keys of requests that may be repeated."""

from __future__ import annotations

from sqlalchemy import delete, select

from cope_sweep.store.index.index import Index
from cope_sweep.store.index.rows import upsert
from cope_sweep.store.index.tables import locks


def claim(index: Index, name: str, owner: str, ttl_s: float) -> str:
    """Who has a name from now on: `owner`, or another that claimed it before and whose claim has not expired.

    Of several owners at once, one succeeds. `Index.unlock` gives the name up. Raises StoreError.
    """
    with index.database.writing() as connection:
        now = index.database.now_s()
        connection.execute(delete(locks).where(locks.c.name == name, locks.c.expires_s <= now))
        values = {"name": name, "owner": owner, "expires_s": now + ttl_s}
        connection.execute(upsert(connection, locks).values(values).on_conflict_do_nothing())
        return str(connection.execute(select(locks.c.owner).where(locks.c.name == name)).scalar_one())


def claimed(index: Index, name: str) -> str | None:
    """Who has a name; None for nobody. Raises StoreError."""
    with index.database.reading() as connection:
        query = select(locks.c.owner).where(locks.c.name == name, locks.c.expires_s > index.database.now_s())
        return connection.execute(query).scalar_one_or_none()
