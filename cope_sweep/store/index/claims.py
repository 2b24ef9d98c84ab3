"""Rows that sweeps of one ablation suggest at the same time. Each is an entry of `sweep_runs`, claimed one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from cope_sweep.store.index.index import Index
from cope_sweep.store.index.rows import next_revision
from cope_sweep.store.index.tables import sweep_runs, sweeps


@dataclass(frozen=True)
class ClaimedRow:
    """A row of another sweep."""

    sweep_id: str
    ordinal: int
    run_id: str
    labels: dict[str, str]


def claim_row(index: Index, sweep_id: str, member: Mapping[str, Any], seen: Mapping[str, int]) -> list[ClaimedRow]:
    """Add a row to a sweep if no other sweep of its ablation has rows that it has not seen, by compare-and-swap.

    Args:
        index: The index.
        sweep_id: The sweep, which the index has.
        member: The row: `{"run_id", "row", "seed", "labels", "reused"}`.
        seen: Id of each other sweep → how many of its rows were seen.

    Returns:
        The rows that were not seen, and then nothing is added; or nothing, and the row is added.
    """
    with index.database.writing() as connection:
        revision = next_revision(connection)  # other writers wait until this transaction ends
        unseen = _unseen(connection, sweep_id, seen)
        if not unseen:
            _append(connection, sweep_id, member, revision)
        return unseen


def append_row(index: Index, sweep_id: str, member: Mapping[str, Any]) -> None:
    """Add a row that another sweep has claimed to a sweep, which the index has."""
    with index.database.writing() as connection:
        _append(connection, sweep_id, member, next_revision(connection))


def _unseen(connection: Connection, sweep_id: str, seen: Mapping[str, int]) -> list[ClaimedRow]:
    ablation = select(sweeps.c.ablation).where(sweeps.c.sweep_id == sweep_id).scalar_subquery()
    others = select(sweeps.c.sweep_id, sweeps.c.runs).where(
        sweeps.c.ablation == ablation, sweeps.c.sweep_id != sweep_id
    )
    found = []
    for other, count in connection.execute(others).all():
        if count > seen.get(other, 0):
            columns = (sweep_runs.c.sweep_id, sweep_runs.c.ordinal, sweep_runs.c.run_id, sweep_runs.c.labels)
            new = select(*columns).where(sweep_runs.c.sweep_id == other, sweep_runs.c.ordinal >= seen.get(other, 0))
            found += [ClaimedRow(*row) for row in connection.execute(new.order_by(sweep_runs.c.ordinal))]
    return found


def _append(connection: Connection, sweep_id: str, member: Mapping[str, Any], revision: int) -> None:
    ordinal = connection.execute(select(sweeps.c.runs).where(sweeps.c.sweep_id == sweep_id)).scalar_one()
    connection.execute(insert(sweep_runs).values(sweep_id=sweep_id, ordinal=ordinal, **member))
    changes = {"runs": ordinal + 1, "revision": revision}
    if member["reused"]:
        changes["reused"] = sweeps.c.reused + 1
    connection.execute(update(sweeps).where(sweeps.c.sweep_id == sweep_id).values(changes))
