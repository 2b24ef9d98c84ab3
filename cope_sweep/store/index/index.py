"""The index: what is asked of many runs, in SQL. It can be made again from the run folders.

A run whose lease has expired, or whose owner is known to be dead, reads as interrupted, not as running.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, Table, and_, case, delete, func, insert, literal, select, update
from sqlalchemy.sql import ColumnElement

from cope_sweep.store.event import Event, Status
from cope_sweep.store.index.database import Database
from cope_sweep.store.index.filters import COLUMNS, check_keys, conditions, counted, order_of
from cope_sweep.store.index.model import (
    Lease,
    Refusal,
    RunPage,
    RunQuery,
    RunRecord,
    SweepSummary,
    Value,
)
from cope_sweep.store.index.owners import is_gone, owner_name
from cope_sweep.store.index.rows import among, insert_into, next_revision, replace_row, write_runs
from cope_sweep.store.index.tables import SECTIONS, counters, locks, parts, runs, sweep_runs, sweeps

FETCHED_ROWS = 10_000
"""Rows that a query takes from the database at a time."""
STOP_REQUEST_S = 30 * 86400.0
"""The time for which a request to stop is kept that nobody has taken notice of."""


class Index:
    """The index of a store. Every method raises StoreError, and IndexUnavailable where the database does not answer."""

    def __init__(self, url: str) -> None:
        """Open the database at `url` (see `Database`), and create its tables if they are missing."""
        self.database = Database(url)

    @property
    def url(self) -> str:
        """The URL of the database."""
        return self.database.url

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def revision(self) -> int:
        """The revision of the last change in the store."""
        with self.database.reading() as connection:
            return int(connection.execute(select(counters.c.value).where(counters.c.name == "revision")).scalar_one())

    def statuses(self, run_ids: Iterable[str] | None = None) -> dict[str, Status]:
        """Run id → status, of the runs that are in the index; those that are not are pending."""
        with self.database.reading() as connection:
            status = self.status_column(connection)
            return {row[0]: row[1] for row in self._selected(connection, select(runs.c.run_id, status), run_ids)}

    def records(self, run_ids: Iterable[str], *, values: bool = True) -> dict[str, RunRecord]:
        """Run id → record, of the runs that are in the index; without `values`, metrics and facts are left empty."""
        columns = record_columns(values=values)
        with self.database.reading() as connection:
            status = self.status_column(connection)
            names = [column.name for column in (*columns, status)]
            rows = self._selected(connection, select(*columns, status), run_ids)
            return {row[0]: record_of(names, row) for row in rows}

    def specs(self, run_ids: Iterable[str]) -> dict[str, dict[str, Value]]:
        """Run id → the values of its spec by dotted key (`model.layers`), of the runs that are in the index."""
        with self.database.reading() as connection:
            part_columns = [runs.c[f"{section}_part"] for section in SECTIONS]
            rows = list(self._selected(connection, select(runs.c.run_id, runs.c.seed, *part_columns), run_ids))
            values = part_values_of(connection, {part for row in rows for part in row[2:]})
        return {
            row[0]: {key: value for part in row[2:] for key, value in values.get(part, {}).items()} | {"seed": row[1]}
            for row in rows
        }

    def page(self, query: RunQuery, *, values: bool = True) -> RunPage:
        """The runs of the index that match a query, and their number. Raises QueryError.

        Without `values`, metrics and facts are left empty.
        """
        columns = record_columns(values=values)
        with self.database.reading() as connection:
            status = self.status_column(connection)
            where = conditions(connection, query, status)
            ids, count, order = counted(query, where, order_of(connection, query, status))
            ids = order.sorted(ids.add_columns(count.label("total")))
            if query.after is not None:
                ids = ids.where(order.after(query.after))
            found = list(connection.execute(ids.limit(query.limit + 1).offset(query.offset)))
            total = found[0].total if found else connection.execute(select(count)).scalar_one()
            more, found = len(found) > query.limit, found[: query.limit]
            wanted = [row[0] for row in found]
            rows = connection.execute(select(runs.c.id, *columns, status).where(runs.c.id.in_(wanted)))
            names = [column.name for column in (*columns, status)]
            records = {row[0]: record_of(names, row[1:]) for row in rows}
        return RunPage(int(total), [records[key] for key in wanted], tuple(found[-1][1:-1]) if more else None)

    def check_keys(self, names: Iterable[str]) -> None:
        """Raise QueryError with near names if a key is neither a column of runs nor a value of any run."""
        with self.database.reading() as connection:
            check_keys(connection, names)

    def finished_steps(self) -> list[int]:
        """The numbers of training steps of finished runs, each once."""
        query = select(runs.c.steps).where(runs.c.status == "finished").distinct()
        with self.database.reading() as connection:
            return list(connection.execute(query).scalars())

    def sweeps(self, statuses: Collection[Status] | None = None) -> list[SweepSummary]:
        """All sweeps, or those with one of these statuses, oldest first.

        One whose process died reads as interrupted.
        """
        query = select(sweeps).order_by(sweeps.c.started_ms, sweeps.c.sweep_id)
        if statuses is not None:
            query = query.where(sweeps.c.status.in_({"running", *statuses}))
        with self.database.reading() as connection:
            found = [summary_of(row) for row in connection.execute(query)]
        return [each for each in found if statuses is None or each.status in statuses]

    def sweep(self, sweep_id: str) -> SweepSummary | None:
        """One sweep, or None."""
        with self.database.reading() as connection:
            row = connection.execute(select(sweeps).where(sweeps.c.sweep_id == sweep_id)).one_or_none()
        return None if row is None else summary_of(row)

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, rows: Sequence[RunRecord]) -> None:
        """Insert or replace runs; their leases end."""
        with self.database.writing() as connection:
            write_runs(connection, rows)

    def write_sweep(self, summary: SweepSummary, members: Sequence[Mapping[str, Any]], owner: str | None) -> None:
        """Insert or replace a sweep.

        Args:
            summary: The sweep.
            members: Its runs in order: `{"run_id", "row", "seed", "labels", "reused"}`. Later calls may append to them.
            owner: The process that executes it, see `owners`.
        """
        with self.database.writing() as connection:
            values = {**summary.__dict__, "owner": owner, "revision": next_revision(connection)}
            known = connection.execute(
                select(sweeps.c.runs).where(sweeps.c.sweep_id == summary.sweep_id)
            ).scalar_one_or_none()
            replace_row(connection, sweeps, values)
            if known != len(members):
                connection.execute(delete(sweep_runs).where(sweep_runs.c.sweep_id == summary.sweep_id))
                entries = [
                    {"sweep_id": summary.sweep_id, "ordinal": ordinal, **member}
                    for ordinal, member in enumerate(members)
                ]
                if entries:
                    connection.execute(insert(sweep_runs), entries)

    def delete(self, run_ids: Iterable[str], *, owner: str | None = None) -> None:
        """Delete runs from the index; with `owner`, only those whose lease it holds."""
        with self.database.writing() as connection:
            next_revision(connection)  # readers that keep what they have read see that something has changed
            statement = delete(runs).where(among(connection, runs.c.run_id, run_ids))
            connection.execute(statement if owner is None else statement.where(runs.c.owner == owner))

    # -- leases --------------------------------------------------------------------------------------------------

    def acquire(self, row: RunRecord, owner: str, ttl_s: float) -> Lease | Refusal:
        """Lease a run to `owner` for `ttl_s`, by compare-and-swap: of several owners at once, one succeeds.

        `row` is written if the run is not in the index; else only its status, worker and attempt change. The sweep that
        has the run may lease it again as another owner: its process died, and a new one continues.
        """
        with self.database.writing() as connection:
            if self._stops(connection, owner_name(owner)).keys() & {"", "*"}:
                return Refusal("stopped")
            seen = connection.execute(
                select(
                    runs.c.id, runs.c.status, runs.c.attempt, runs.c.owner, (runs.c.expires_s > self.database.now_s())
                ).where(runs.c.run_id == row.run_id)
            ).one_or_none()
            lease = {
                "status": "running",
                "owner": owner,
                "expires_s": self.database.now_s() + ttl_s,
                "sweep_id": owner_name(owner),
                "message": None,
            }
            if seen is None:
                write_runs(connection, [row])
                connection.execute(update(runs).where(runs.c.run_id == row.run_id).values(**lease, attempt=1))
                return Lease(row.run_id, 1)
            if seen.status == "finished":
                return Refusal("finished")
            is_foreign = seen.owner is not None and owner_name(seen.owner) != owner_name(owner)
            if is_foreign and seen[4] and not is_gone(seen.owner):
                return Refusal("leased")
            same = and_(
                runs.c.id == seen.id,
                runs.c.attempt == seen.attempt,
                runs.c.owner.is_(None) if seen.owner is None else runs.c.owner == seen.owner,
            )
            changed = connection.execute(
                update(runs).where(same).values(**lease, attempt=seen.attempt + 1, revision=next_revision(connection))
            )
            if changed.rowcount != 1:
                return Refusal("leased")
            return Lease(row.run_id, seen.attempt + 1)

    def renew(self, owner: str, ttl_s: float, progress: Iterable[Event] = ()) -> tuple[frozenset[str], dict[str, str]]:
        """Prolong all leases of `owner` to `ttl_s` from now, and write the progress of its runs.

        Returns:
            The ids of the runs that it holds, and the requests to stop: of the sweep, as `""`, the start of runs, as
            `"*"`, or a run, by its id → why.
        """
        with self.database.writing() as connection:
            mine = runs.c.owner == owner
            connection.execute(update(runs).where(mine).values(expires_s=self.database.now_s() + ttl_s))
            held = set(connection.execute(select(runs.c.run_id).where(mine)).scalars())
            for each in progress:
                if each.run_id in held:
                    connection.execute(
                        update(runs)
                        .where(runs.c.run_id == each.run_id, mine)
                        .values(
                            step=each.step,
                            worker_id=each.worker_id,
                            metrics=dict(each.metrics),
                            revision=next_revision(connection),
                        )
                    )
            return frozenset(held), self._stops(connection, owner_name(owner))

    def end(self, row: RunRecord, owner: str) -> bool:
        """Write how a run ended and end its lease; False, without effect, if `owner` does not hold the lease."""
        with self.database.writing() as connection:
            held = select(runs.c.id).where(runs.c.run_id == row.run_id, runs.c.owner == owner)
            if connection.execute(held).one_or_none() is None:
                return False
            write_runs(connection, [row])
            return True

    def expired(self) -> list[tuple[str, str | None]]:
        """Run id and owner of the runs that are marked as running but whose lease expired or whose owner died."""
        with self.database.reading() as connection:
            dead = ~self.is_training(connection)
            query = select(runs.c.run_id, runs.c.owner).where(runs.c.status == "running", dead)
            return [(row.run_id, row.owner) for row in connection.execute(query)]

    def is_built(self) -> bool:
        """Whether the index holds what was in the store when it was made."""
        with self.database.reading() as connection:
            return connection.execute(select(counters.c.value).where(counters.c.name == "built")).scalar() is not None

    def mark_built(self) -> None:
        """Note that the index holds what is in the store, and when it was made: the value of the counter, in ms."""
        built = {"name": "built", "value": int(time.time() * 1000)}
        with self.database.writing() as connection:
            statement = insert_into(connection.dialect.name, counters).values(built)
            connection.execute(statement.on_conflict_do_nothing())

    # -- requests to stop ----------------------------------------------------------------------------------------

    def request_stop(self, sweep_id: str, run_id: str = "", reason: str = "") -> None:
        """Ask a sweep, or one of its runs, to end early, or to start no more runs (`"*"`).

        Whoever holds its leases sees it with the next renewal. No run of a sweep that has to stop is leased.
        """
        values = {
            "name": f"stop/{sweep_id}/{run_id}",
            "owner": reason,
            "expires_s": self.database.now_s() + STOP_REQUEST_S,
        }
        with self.database.writing() as connection:
            replace_row(connection, locks, values)

    def stop_requested(self, sweep_id: str) -> bool:
        """Whether a sweep was asked to stop."""
        with self.database.reading() as connection:
            return "" in self._stops(connection, sweep_id)

    def forget_stops(self, sweep_id: str, run_id: str | None = None) -> None:
        """Forget the requests to stop a sweep that has ended, or only that to stop a run."""
        with self.database.writing() as connection:
            connection.execute(delete(locks).where(self._stop_names(sweep_id, run_id)))

    def _stops(self, connection: Connection, sweep_id: str) -> dict[str, str]:
        """Requests to stop of a sweep: run id, or `""` for all of it → why."""
        query = select(locks.c.name, locks.c.owner).where(self._stop_names(sweep_id))
        return {name.rpartition("/")[2]: reason for name, reason in connection.execute(query)}

    @staticmethod
    def _stop_names(sweep_id: str, run_id: str | None = None) -> ColumnElement[bool]:
        if run_id is not None:
            return locks.c.name == f"stop/{sweep_id}/{run_id}"
        return locks.c.name.startswith(f"stop/{sweep_id}/", autoescape=True)

    # -- names that one owner of several holds -------------------------------------------------------------------

    def claim(self, name: str, owner: str, ttl_s: float) -> str:
        """Claim a name, and return who has it: `owner`, or another, whose claim has not expired and who may be alive.

        Of several owners at once, one succeeds. An owner's own claim is prolonged.
        """
        with self.database.writing() as connection:
            now = self.database.now_s()
            query = select(locks.c.owner).where(locks.c.name == name, locks.c.expires_s > now, locks.c.owner != owner)
            other: str | None = connection.execute(query).scalar()
            if other is not None and not is_gone(other):
                return other
            replace_row(connection, locks, {"name": name, "owner": owner, "expires_s": now + ttl_s})
            return owner

    def claimed(self, name: str) -> str | None:
        """The owner of a name; None: nobody has it."""
        with self.database.reading() as connection:
            query = select(locks.c.owner).where(locks.c.name == name, locks.c.expires_s > self.database.now_s())
            return connection.execute(query).scalar()

    def unlock(self, name: str, owner: str) -> None:
        """Give up a name, if `owner` has it."""
        with self.database.writing() as connection:
            connection.execute(delete(locks).where(locks.c.name == name, locks.c.owner == owner))

    # -- internals -----------------------------------------------------------------------------------------------

    def is_training(self, connection: Connection) -> ColumnElement[bool]:
        """Whether a run is running under a lease that holds."""
        gone = gone_owners(connection, runs)
        alive = and_(runs.c.status == "running", runs.c.expires_s > self.database.now_s())
        return func.coalesce(and_(alive, runs.c.owner.not_in(gone)) if gone else alive, False)

    def status_column(self, connection: Connection) -> ColumnElement[str]:
        dead = and_(runs.c.status == "running", ~self.is_training(connection))
        return case((dead, literal("interrupted")), else_=runs.c.status).label("status")

    def _selected(
        self, connection: Connection, query: Select[Any], run_ids: Iterable[str] | None
    ) -> Iterator[tuple[Any, ...]]:
        """The rows of `query`, of all runs or of those with these ids."""
        if run_ids is not None:
            query = query.where(among(connection, runs.c.run_id, run_ids))
        for rows in connection.execute(query).partitions(FETCHED_ROWS):  # row by row, fetching costs more
            yield from map(tuple, rows)


def gone_owners(connection: Connection, table: Table) -> list[str]:
    """The owners of running runs or sweeps whose processes are known to have ended."""
    query = select(table.c.owner).distinct().where(table.c.status == "running", table.c.owner.is_not(None))
    return [owner for owner in connection.execute(query).scalars() if is_gone(owner)]


def part_values_of(connection: Connection, ids: Iterable[int | None]) -> dict[int, dict[str, Value]]:
    """Part id → its values by dotted key."""
    known = among(connection, parts.c.id, (part for part in ids if part is not None))
    return {row.id: row.content for row in connection.execute(select(parts.c.id, parts.c.content).where(known))}


def record_columns(*, values: bool = True) -> list[Any]:
    """The columns of a record, without its status; without `values`, also without metrics and facts."""
    return [runs.c[name] for name in (*COLUMNS, *(("metrics", "facts") if values else ()))]


def record_of(names: Sequence[str], row: Sequence[Any]) -> RunRecord:
    """The record in a row of these columns."""
    return RunRecord(**dict(zip(names, row, strict=True)))


def summary_of(row: Row[Any]) -> SweepSummary:
    status: Status = "interrupted" if row.status == "running" and row.owner and is_gone(row.owner) else row.status
    names = SweepSummary.__dataclass_fields__
    return SweepSummary(**{name: getattr(row, name) for name in names if name != "status"}, status=status)
