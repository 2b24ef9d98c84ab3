"""The part of a store that a tracker has received, and the part that it lacks.

A row of `mirrored` holds the revision at which a tracker received a run or a sweep. What is still trained or executed
is sent, too, but noted with revision 0: it is complete in the tracker only after its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, func, or_, select

from cope_sweep.store.index.index import Index, gone_owners
from cope_sweep.store.index.rows import among, replace_row
from cope_sweep.store.index.tables import mirrored, runs, sweep_runs, sweeps


@dataclass(frozen=True)
class Membership:
    """A run's place in a sweep."""

    sweep_id: str
    ablation: str
    started_ms: int
    row: str
    seed: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Backlog:
    """The part that a tracker lacks: id → revision, oldest change first."""

    runs: dict[str, int]
    sweeps: dict[str, int]


class Mirrored:
    """The part that one tracker has received. Its methods raise StoreError and IndexUnavailable, as the index does."""

    def __init__(self, index: Index, tracker: str) -> None:
        """`tracker` names the tracker in this store's index."""
        self._index, self._database, self.tracker = index, index.database, tracker

    def backlog(self) -> Backlog:
        """The runs and sweeps that have ended and that the tracker does not have as they are."""
        with self._database.reading() as connection:
            run_query = self._runs_behind(connection, runs.c.run_id, runs.c.revision)
            sweep_query = self._sweeps_behind(connection, sweeps.c.sweep_id, sweeps.c.revision)
            return Backlog(
                {row[0]: int(row[1]) for row in connection.execute(run_query.order_by(runs.c.revision))},
                {row[0]: int(row[1]) for row in connection.execute(sweep_query.order_by(sweeps.c.revision))},
            )

    def count(self) -> int:
        """The number of runs and sweeps in the backlog."""
        with self._database.reading() as connection:
            queries = (
                self._runs_behind(connection, func.count(runs.c.id)),
                self._sweeps_behind(connection, func.count(sweeps.c.sweep_id)),
            )
            return sum(int(connection.execute(query).scalar_one()) for query in queries)

    def running(self) -> list[str]:
        """The ids of the runs that are trained at the moment."""
        with self._database.reading() as connection:
            query = select(runs.c.run_id).where(self._index.is_training(connection))
            return list(connection.execute(query.order_by(runs.c.revision)).scalars())

    def running_sweeps(self) -> list[str]:
        """The ids of the sweeps that are executed at the moment, oldest first."""
        with self._database.reading() as connection:
            query = select(sweeps.c.sweep_id).where(_is_executing(connection))
            return list(connection.execute(query.order_by(sweeps.c.started_ms)).scalars())

    def begun(self) -> set[str]:
        """The ids of the runs and sweeps of which the tracker has a part: there they are running."""
        query = select(mirrored.c.item).where(
            mirrored.c.tracker == self.tracker, mirrored.c.revision == 0, mirrored.c.tracked_id.is_not(None)
        )
        with self._database.reading() as connection:
            return set(connection.execute(query).scalars())

    def memberships(self, run_ids: Iterable[str]) -> dict[str, list[Membership]]:
        """Run id → its places in all sweeps that contain it, oldest sweep first."""
        query = (
            select(
                sweep_runs.c.run_id, sweeps.c.sweep_id, sweeps.c.ablation, sweeps.c.started_ms,
                sweep_runs.c.row, sweep_runs.c.seed, sweep_runs.c.labels,
            )
            .join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
            .order_by(sweeps.c.started_ms, sweeps.c.sweep_id)
        )  # fmt: skip
        found: dict[str, list[Membership]] = {}
        with self._database.reading() as connection:
            for run_id, *place in connection.execute(query.where(among(connection, sweep_runs.c.run_id, run_ids))):
                found.setdefault(run_id, []).append(Membership(*place))
        return found

    def last_ms(self, sweep_id: str) -> int | None:
        """The time of the last change of a run of a sweep, in milliseconds since 1970."""
        last = func.max(func.coalesce(runs.c.ended_ms, runs.c.updated_ms))
        query = select(last).join(sweep_runs, sweep_runs.c.run_id == runs.c.run_id)
        with self._database.reading() as connection:
            return connection.execute(query.where(sweep_runs.c.sweep_id == sweep_id)).scalar()

    def finished_ms(self, sweep_id: str) -> list[int]:
        """The times at which the runs were finished that a sweep trained itself, in order; milliseconds since 1970."""
        query = (
            select(runs.c.ended_ms)
            .join(sweep_runs, sweep_runs.c.run_id == runs.c.run_id)
            .where(sweep_runs.c.sweep_id == sweep_id, ~sweep_runs.c.reused, runs.c.status == "finished")
            .order_by(runs.c.ended_ms)
        )
        with self._database.reading() as connection:
            return [ended_ms for ended_ms in connection.execute(query).scalars() if ended_ms is not None]

    def tracked_ids(self, items: Iterable[str]) -> dict[str, str]:
        """Run or sweep id → its id in the tracker, of those that it has."""
        query = select(mirrored.c.item, mirrored.c.tracked_id).where(
            mirrored.c.tracker == self.tracker, mirrored.c.tracked_id.is_not(None)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query.where(among(connection, mirrored.c.item, items)))
            return {row.item: row.tracked_id for row in rows}

    def newest_tracked_id(self) -> str | None:
        """The tracker's id of what it received last, or None."""
        query = select(mirrored.c.tracked_id).where(
            mirrored.c.tracker == self.tracker, mirrored.c.tracked_id.is_not(None)
        )
        with self._database.reading() as connection:
            return connection.execute(query.order_by(mirrored.c.revision.desc()).limit(1)).scalar()

    def mark(self, received: Mapping[str, tuple[int, str | None]]) -> None:
        """Note what the tracker has received: run or sweep id → its revision, and its id in the tracker."""
        with self._database.writing() as connection:
            for item, (revision, tracked_id) in received.items():
                values = {"tracker": self.tracker, "item": item, "revision": revision, "tracked_id": tracked_id}
                replace_row(connection, mirrored, values)

    def forget(self) -> None:
        """Note that the tracker has nothing: its database was deleted or replaced."""
        with self._database.writing() as connection:
            connection.execute(delete(mirrored).where(mirrored.c.tracker == self.tracker))

    def _runs_behind(self, connection: Connection, *columns: ColumnElement[Any]) -> Select[Any]:
        joined = runs.outerjoin(mirrored, and_(mirrored.c.tracker == self.tracker, mirrored.c.item == runs.c.run_id))
        behind = or_(mirrored.c.revision.is_(None), mirrored.c.revision < runs.c.revision)
        return select(*columns).select_from(joined).where(behind, ~self._index.is_training(connection))

    def _sweeps_behind(self, connection: Connection, *columns: ColumnElement[Any]) -> Select[Any]:
        same = and_(mirrored.c.tracker == self.tracker, mirrored.c.item == sweeps.c.sweep_id)
        behind = or_(mirrored.c.revision.is_(None), mirrored.c.revision < sweeps.c.revision)
        return (
            select(*columns)
            .select_from(sweeps.outerjoin(mirrored, same))
            .where(behind, sweeps.c.status != "pending", ~_is_executing(connection))
        )


def _is_executing(connection: Connection) -> ColumnElement[bool]:
    """Whether a sweep is running and its process may be alive."""
    may_be_alive = or_(sweeps.c.owner.is_(None), sweeps.c.owner.not_in(gone_owners(connection, sweeps)))
    return and_(sweeps.c.status == "running", may_be_alive)
