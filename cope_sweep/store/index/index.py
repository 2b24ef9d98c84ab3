"""The index: what is asked of many runs, in SQL. It can be made again from the run folders.

A run or a sweep that is running, and whose lease has expired, reads as interrupted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from sqlalchemy import (
    Connection,
    Row,
    Select,
    String,
    Table,
    Text,
    and_,
    case,
    cast,
    delete,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.sql import ColumnElement

from cope_sweep.config.keys import named_by_kind
from cope_sweep.records import (
    ACTIVE,
    ENDED,
    Event,
    FailedMember,
    RunPage,
    RunRecord,
    Status,
    SweepPage,
    SweepProgress,
    SweepSummary,
    Value,
)
from cope_sweep.store.errors import StoreError
from cope_sweep.store.index.database import ADDING_LOCK, Database, is_current, replace_tables, waiting
from cope_sweep.store.index.filters import COLUMNS, check_keys, check_unmatched, conditions, has_name, sort_columns
from cope_sweep.store.index.model import (
    REPORTED_COLUMNS,
    Activity,
    Lease,
    Refusal,
    Renewal,
    RunQuery,
    SweepPlace,
    Variant,
)
from cope_sweep.store.index.rows import among, next_revision, write_counters, write_members, write_runs, write_sweep
from cope_sweep.store.index.tables import FORMAT, counters, has_expired, runs, status_of, sweep_runs, sweeps


class InTrainingError(StoreError):
    """A sweep trains the run, or has trained it since it was looked at, so its files stay."""

    default_code = "in_training"


def in_training(run_id: str, sweep_id: str | None) -> InTrainingError:
    """The error about a run that cannot be deleted."""
    return InTrainingError(
        f"run {run_id} is in training by the sweep {sweep_id}, and cannot be deleted; end that first: "
        f"cope-sweep stop {sweep_id}",
        run_id=run_id,
        sweep=sweep_id,
    )


class Fill(Protocol):
    """Fills an empty index, in a writing transaction."""

    def __call__(self, connection: Connection, *, replaces: bool) -> None:
        """`replaces`: there was an index of an older version before."""


class Index:
    """The index of a store. Every method raises StoreError, and IndexUnavailable where the database does not answer."""

    def __init__(self, url: str, fill: Fill = lambda connection, *, replaces: None) -> None:
        """Open the database at `url` (see `Database`).

        Where it is empty or of an older version, its tables are made again and filled by `fill`, in one transaction:
        other processes that open it wait, and one that dies leaves what was there before.

        Raises OtherFormatError where programs of another version may be using the database.
        """
        self.database = Database(url)

        def make_tables() -> None:
            # Most often there is nothing to do, and reading waits for no writer.
            with self.database.reading() as connection:
                if is_current(connection):
                    return
            with self.database.writing(idle_s=0) as connection:  # reading the run folders may take minutes
                if not is_current(connection):  # else another process was faster
                    replaces = replace_tables(connection, url, self.database.now_s())
                    write_counters(connection, revision=0)
                    fill(connection, replaces=replaces)
                    self.database.measure_tables(connection)
                    write_counters(connection, format=FORMAT, built=int(time.time() * 1000))

        # Another process may be filling the tables. SQLite then refuses writers after its own time limit, so they try
        # again for 15 minutes. In PostgreSQL they wait for the lock, and an error is an error.
        waiting(make_tables, lambda waited_s: not self.database.is_sqlite or waited_s > 900)

    @property
    def url(self) -> str:
        """The URL of the database."""
        return self.database.url

    def close(self) -> None:
        """Close the connections."""
        self.database.close()

    # -- runs ----------------------------------------------------------------------------------------------------

    def revision(self) -> int:
        """The revision of the last change in the store."""
        with self.database.reading() as connection:
            return revision_of(connection)

    def state(self) -> tuple[object, ...]:
        """A value that changes with every change of what the index says, also where a lease expires."""
        with self.database.reading() as connection:
            values = {row.name: row.value for row in connection.execute(select(counters))}
            expired = [
                self._expired(connection, table.c[name]) for table, name in ((runs, "run_id"), (sweeps, "sweep_id"))
            ]
        return values["built"], values["revision"], *map(tuple, expired)

    def statuses(self, run_ids: Iterable[str] | None = None, *, counted: bool = False) -> dict[str, Status]:
        """Run id → status, of the runs that are in the index; those that are not are pending.

        A leased run is running; with `counted`, as in answers, it is pending while it waits for its worker.
        """
        query = select(runs.c.run_id, self._counted() if counted else self._status(runs))
        with self.database.reading() as connection:
            return {row[0]: row[1] for row in self._selected(connection, query, run_ids)}

    def status_counts(self, run_ids: Sequence[str]) -> dict[Status, int]:
        """Status → number of the runs with these ids; those that are not in the index are pending."""
        status = self._counted()
        query: Any = select(status, func.count()).group_by(status)
        with self.database.reading() as connection:
            rows = self._selected(connection, query, run_ids)
            counts: Counter[Status] = Counter({row[0]: int(row[1]) for row in rows})
        counts["pending"] += len(run_ids) - sum(counts.values())
        return +counts  # without the statuses that no run has

    def records(self, run_ids: Iterable[str], *, values: bool = True) -> dict[str, RunRecord]:
        """Run id → record, of the runs that are in the index; without `values`, metrics and facts are left empty."""
        columns = [*_record_columns(values=values), self._status(runs)]
        names = [column.name for column in columns]
        with self.database.reading() as connection:
            rows = self._selected(connection, select(*columns), run_ids)
            return {row[0]: _record(names, row) for row in rows}

    def specs(self, run_ids: Iterable[str]) -> dict[str, dict[str, Value]]:
        """Run id → the values of its spec by dotted key (`model.layers`), of the runs that are in the index."""
        query = select(runs.c.run_id, runs.c.seed, runs.c.spec)
        with self.database.reading() as connection:
            return {
                run_id: named_by_kind(spec) | {"seed": seed}
                for run_id, seed, spec in self._selected(connection, query, run_ids)
            }

    def facts(self, run_ids: Iterable[str], names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        """Run id → its facts with these names; null for those that it lacks."""
        query = select(runs.c.run_id, *(runs.c.facts[name] for name in names))
        with self.database.reading() as connection:
            return {row[0]: row[1:] for row in self._selected(connection, query, run_ids)}

    def page(self, query: RunQuery, *, values: bool = True) -> RunPage:
        """A page of the runs that match a query. Raises QueryError.

        A query of run ids, and of statuses at most, has the order of the ids, and pending runs. Without `values`,
        metrics and facts are left empty.
        """
        read = self._page_of_ids if query.keeps_order else self._page_of_matches
        total, records = read(query, values=values)
        end = query.offset + len(records)
        return RunPage(
            total=total,
            limit=query.limit,
            offset=query.offset,
            next=end if records and end < total else None,
            runs=records,
        )

    def _page_of_ids(self, query: RunQuery, *, values: bool) -> tuple[int, list[RunRecord]]:
        matching: Sequence[str] = (query.run_ids or ())[:: -1 if query.descending else 1]
        if query.statuses:
            statuses = self.statuses(matching, counted=True)
            matching = [run_id for run_id in matching if statuses.get(run_id, "pending") in query.statuses]
        some = matching[query.offset : query.offset + query.limit]
        known = self.records(some, values=values)
        return len(matching), [(known.get(run_id) or RunRecord(run_id=run_id)).as_counted() for run_id in some]

    def _page_of_matches(self, query: RunQuery, *, values: bool) -> tuple[int, list[RunRecord]]:
        columns = [*_record_columns(values=values), self._counted()]
        names = [column.name for column in columns]
        with self.database.reading() as connection:
            # The page is chosen by number first: sorting whole rows would carry their JSON along.
            total, wanted = self._matching(connection, query, runs.c.id, limit=query.limit, offset=query.offset)
            rows = connection.execute(select(runs.c.id, *columns).where(runs.c.id.in_(wanted)))
            records = {row[0]: _record(names, row[1:]) for row in rows}
        return total, [records[key] for key in wanted if key in records]  # else it was deleted meanwhile

    def _matching(
        self,
        connection: Connection,
        query: RunQuery,
        column: ColumnElement[Any],
        *,
        limit: int | None = None,
        offset: int = 0,
    ) -> tuple[int, list[Any]]:
        """The number of the runs that match, and a column of some of them, in the order of the query.

        Raises QueryError.
        """
        status = self._counted()
        where = conditions(connection, query, status)
        sorted_by = [
            column.label(f"by_{number}") for number, column in enumerate(sort_columns(connection, query, status))
        ]
        # The inner query reads the JSON of each run once; the outer one counts and sorts what it has found.
        found = select(column.label("wanted"), runs.c.run_id.label("last"), *sorted_by).where(*where).subquery()
        keys = [found.c[label.name] for label in sorted_by]
        order = [(key.desc() if query.descending else key.asc()).nulls_last() for key in keys]
        order.append(found.c.last.desc() if query.descending and not keys else found.c.last.asc())
        statement = select(found.c.wanted, func.count().over(), *keys).order_by(*order)
        rows = connection.execute(statement.limit(limit).offset(offset)).all()
        if rows:
            total = int(rows[0][1])
        elif offset:  # beyond the last page
            total = int(connection.execute(select(func.count()).select_from(runs).where(*where)).scalar_one())
        else:
            total = 0
        if not total:
            check_unmatched(connection, query)
        has_value = bool(rows) and any(value is not None for value in rows[0][2:])  # runs without a value are last
        if query.sort is not None and not has_value:
            check_keys(connection, [query.sort])
        return total, [row[0] for row in rows]

    def matching(self, query: RunQuery) -> list[str]:
        """The ids of all runs that match, in the order of the query, whose limit and offset are ignored.

        Raises QueryError.
        """
        with self.database.reading() as connection:
            ids = self._matching(connection, query, runs.c.run_id)[1]
        if query.keeps_order:
            order = {run_id: number for number, run_id in enumerate(query.run_ids or ())}
            ids.sort(key=order.__getitem__, reverse=query.descending)
        return ids

    def check_keys(self, names: Iterable[str]) -> None:
        """Raise QueryError with near names if a key is neither a column of runs nor a value of any run."""
        with self.database.reading() as connection:
            check_keys(connection, names)

    def ids_that_begin(self, prefix: str, limit: int) -> list[str]:
        """The first ids of runs that begin with `prefix`, sorted."""
        return self._ids_that_begin(runs.c.run_id, prefix, limit)

    def ids_with_prefixes(self, prefixes: Iterable[str]) -> list[str]:
        """The ids of runs that begin with one of these prefixes, sorted."""
        # One comparison for each length, however many prefixes there are.
        wanted: dict[int, list[str]] = {}
        for prefix in prefixes:
            wanted.setdefault(len(prefix), []).append(prefix)
        ids = runs.c.run_id
        with self.database.reading() as connection:
            # substr has no type of its own, and the array of `among` needs one in PostgreSQL.
            matches = [
                among(connection, func.substr(ids, 1, length, type_=ids.type), some) for length, some in wanted.items()
            ]
            return list(connection.execute(select(ids).where(or_(False, *matches)).order_by(ids)).scalars())

    def newest_ms(self, run_ids: Iterable[str]) -> int | None:
        """The time of the last change of the runs with these ids, in ms since 1970; None if none has started."""
        changed = func.max(func.coalesce(runs.c.ended_ms, runs.c.updated_ms, runs.c.created_ms))
        with self.database.reading() as connection:
            return connection.execute(select(changed).where(among(connection, runs.c.run_id, run_ids))).scalar()

    def write(self, rows: Sequence[RunRecord], *, since: int | None = None) -> None:
        """Insert or replace runs; their leases end.

        `since` is the revision before their files were read: those that have a lease, or have changed since, stay as
        they are.
        """
        with self.database.writing() as connection:
            newer_ids: set[str] = set()
            if since is not None:
                written = among(connection, runs.c.run_id, [row.run_id for row in rows])
                newer = select(runs.c.run_id).where(written, self._is_newer(runs, since))
                newer_ids = set(connection.execute(newer).scalars())
            write_runs(connection, [row for row in rows if row.run_id not in newer_ids])

    def delete(self, run_ids: Iterable[str], *, since: int | None = None) -> None:
        """Delete runs from the index; for `since`, see `write`."""
        with self.database.writing() as connection:
            deleted = among(connection, runs.c.run_id, run_ids)
            if since is not None:
                deleted = and_(deleted, ~self._is_newer(runs, since))
            next_revision(connection)  # readers that keep what they have read see that something has changed
            connection.execute(delete(runs).where(deleted))

    @contextlib.contextmanager
    def untrained(self, run_id: str, *, since: int | None = None) -> Iterator[Connection]:
        """A writing transaction: nobody leases the run meanwhile.

        Raises InTrainingError if a sweep trains it, or if it has changed since the revision `since`.
        """
        with self.database.writing() as connection:
            query = select(self._status(runs), runs.c.sweep_id, runs.c.revision).where(runs.c.run_id == run_id)
            found = connection.execute(query).one_or_none()
            if found is not None and found[0] == "running":
                raise in_training(run_id, found[1])
            if found is not None and since is not None and found[2] > since:
                raise InTrainingError(f"run {run_id} has changed since it was looked at: look again", run_id=run_id)
            yield connection

    @contextlib.contextmanager
    def deleting(self, run_id: str, *, since: int | None = None) -> Iterator[None]:
        """Delete a run from the index once the block ends; a block that raises keeps it. Nobody leases it meanwhile.

        Raises InTrainingError, see `untrained`.
        """
        with self.untrained(run_id, since=since) as connection:
            next_revision(connection)
            connection.execute(delete(runs).where(runs.c.run_id == run_id))
            yield

    # -- leases --------------------------------------------------------------------------------------------------

    def acquire(self, record: RunRecord, sweep_id: str, ttl_s: float) -> Lease | Refusal:
        """Lease a run to a sweep for `ttl_s` from now. Of several sweeps at once, one succeeds.

        The lease of a running run is given to another sweep once it has expired. The sweep that holds it may take it
        again: its driver died, and a new one continues. `record` is written if the run is not in the index.
        """
        now_s = self.database.now_s()
        # Without message and worker of an attempt before: a run without a worker waits for one.
        lease = {
            "status": "running",
            "sweep_id": sweep_id,
            "expires_s": now_s + ttl_s,
            "message": None,
            "worker_id": None,
        }
        is_held = and_(runs.c.status == "running", ~has_expired(runs, now_s))
        columns = (runs.c.status, runs.c.attempt, runs.c.sweep_id, is_held)
        same = runs.c.run_id == record.run_id
        with self.database.writing() as connection:  # writers wait for each other: nobody else reads the same row
            seen = connection.execute(select(*columns).where(same)).one_or_none()
            if seen is None:
                write_runs(connection, [record])
                connection.execute(update(runs).where(same).values(**lease, attempt=1))
                return Lease(record.run_id, 1)
            status, attempt, holder, held = seen
            if status == "finished":
                return "finished"
            if held and holder != sweep_id:
                return "leased"
            values = {**lease, "attempt": attempt + 1, "revision": next_revision(connection)}
            connection.execute(update(runs).where(same).values(values))
            return Lease(record.run_id, attempt + 1)

    def renew(self, sweep_id: str, ttl_s: float, progress: Iterable[Event] = ()) -> Renewal:
        """Prolong the leases of a sweep and of its running runs to `ttl_s` from now; write the progress of its runs.

        A lease that has expired is prolonged, too, unless another sweep has taken it.
        """
        until = {"expires_s": self.database.now_s() + ttl_s}
        with self.database.writing() as connection:
            own = and_(sweeps.c.sweep_id == sweep_id, sweeps.c.status == "running")
            connection.execute(update(sweeps).where(own).values(until))
            connection.execute(update(runs).where(_held_by(sweep_id)).values(until))
            held = frozenset(connection.execute(select(runs.c.run_id).where(_held_by(sweep_id))).scalars())
            for event in progress:
                # A run that another sweep has taken has that one's progress.
                if event.run_id in held:
                    values = {name: getattr(event, name) for name in (*REPORTED_COLUMNS, "metrics")}
                    changed = update(runs).where(runs.c.run_id == event.run_id)
                    connection.execute(changed.values(**values, revision=next_revision(connection)))
            return Renewal(held, _stop_requested(connection, sweep_id))

    def end(self, record: RunRecord, sweep_id: str) -> bool:
        """Write how a run ended and end its lease; False, without effect, if the sweep does not hold the lease."""
        with self.database.writing() as connection:
            held = select(runs.c.id).where(runs.c.run_id == record.run_id, _held_by(sweep_id))
            if connection.execute(held).one_or_none() is None:
                return False
            write_runs(connection, [record])
            return True

    def release(self, run_ids: Iterable[str], sweep_id: str) -> None:
        """Give up the leases of runs that have no folder: they are pending again."""
        with self.database.writing() as connection:
            next_revision(connection)
            held = and_(among(connection, runs.c.run_id, run_ids), _held_by(sweep_id))
            connection.execute(delete(runs).where(held))

    def expired(self) -> list[str]:
        """The ids of the runs that are running by their rows, and whose lease has ended."""
        with self.database.reading() as connection:
            return self._expired(connection, runs.c.run_id)

    def end_expired(self, records: Mapping[str, RunRecord | None]) -> list[str]:
        """Write how runs ended whose lease has expired, unless it was taken meanwhile; return their ids.

        Run id → record; None: the run has never started, and is pending again.
        """
        with self.database.writing() as connection:
            over = [run_id for run_id in self._expired(connection, runs.c.run_id) if run_id in records]
            write_runs(connection, [record for run_id in over if (record := records[run_id]) is not None])
            if unstarted := [run_id for run_id in over if records[run_id] is None]:
                next_revision(connection)
                connection.execute(delete(runs).where(among(connection, runs.c.run_id, unstarted)))
        return over

    def leases(self, run_ids: Iterable[str]) -> dict[str, tuple[str, float]]:
        """Run id → the sweep that holds its lease, and the seconds until that expires, of the runs that are leased."""
        now_s = self.database.now_s()
        held = and_(runs.c.status == "running", ~has_expired(runs, now_s))
        query = select(runs.c.run_id, runs.c.sweep_id, runs.c.expires_s - now_s).where(held)
        with self.database.reading() as connection:
            return {row[0]: (row[1], float(row[2])) for row in self._selected(connection, query, run_ids)}

    # -- sweeps --------------------------------------------------------------------------------------------------

    def sweeps(self, statuses: Collection[Status] | None = None) -> list[SweepSummary]:
        """All sweeps, or those with one of these statuses, oldest first."""
        query = select(*self._sweep_columns()).order_by(sweeps.c.started_ms, sweeps.c.sweep_id)
        if statuses is not None:
            query = query.where(self._status(sweeps).in_(statuses))
        with self.database.reading() as connection:
            return [_summary(row) for row in connection.execute(query)]

    def sweep(self, sweep_id: str) -> SweepSummary | None:
        """One sweep, or None."""
        query = select(*self._sweep_columns()).where(sweeps.c.sweep_id == sweep_id)
        with self.database.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _summary(row)

    def members(self, sweep_id: str) -> list[dict[str, Any]]:
        """The runs of a sweep in order, as `write_sweep` takes them; with those that a search has suggested so far."""
        columns = sweep_runs.c
        query = select(columns.run_id, columns.row, columns.seed, columns.labels, columns.reused)
        query = query.where(columns.sweep_id == sweep_id).order_by(columns.ordinal)
        with self.database.reading() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def sweep_page(self, *, ablation: str | None = None, limit: int = 100, offset: int = 0) -> SweepPage:
        """A page of all sweeps, or of an ablation's sweeps, newest first, with their counts."""
        where = () if ablation is None else (has_name(sweeps.c.ablation, ablation),)
        page = select(*self._sweep_columns()).where(*where)
        page = page.order_by(sweeps.c.started_ms.desc(), sweeps.c.sweep_id.desc()).limit(limit).offset(offset)
        with self.database.reading() as connection:
            total = connection.execute(select(func.count()).select_from(sweeps).where(*where)).scalar_one()
            summaries = [_summary(row) for row in connection.execute(page)]
        counts = self.sweep_counts(summary.sweep_id for summary in summaries)
        counted = [summary.model_copy(update={"counts": counts.get(summary.sweep_id, {})}) for summary in summaries]
        end = offset + len(counted)
        return SweepPage(
            total=total, limit=limit, offset=offset, next=end if counted and end < total else None, sweeps=counted
        )

    def swept_ablations(self, limit: int) -> list[str]:
        """The names of the ablations that have sweeps, those with the newest first."""
        query = select(sweeps.c.ablation).group_by(sweeps.c.ablation).order_by(func.max(sweeps.c.started_ms).desc())
        with self.database.reading() as connection:
            return list(connection.execute(query.limit(limit)).scalars())

    def variants(self, ablation: str | None = None) -> list[Variant]:
        """The variants of an ablation, or of all, that were trained with `--set`; those with the newest runs first."""
        status = func.coalesce(self._counted(), "pending").label("status")
        sets = cast(sweeps.c.sets, Text).label("sets")  # PostgreSQL does not group by JSON
        changed = func.max(func.coalesce(runs.c.ended_ms, runs.c.updated_ms, runs.c.created_ms))
        columns = (sweeps.c.ablation, sweeps.c.scale, sets, status)
        query = select(*columns, func.count(sweep_runs.c.run_id.distinct()), changed).group_by(*columns)
        members = sweeps.join(sweep_runs, sweep_runs.c.sweep_id == sweeps.c.sweep_id)
        query = query.select_from(members.outerjoin(runs, runs.c.run_id == sweep_runs.c.run_id)).where(sets != "[]")
        if ablation is not None:
            query = query.where(has_name(sweeps.c.ablation, ablation))
        found: dict[tuple[str, str | None, str], tuple[dict[Status, int], list[int]]] = {}
        with self.database.reading() as connection:
            for name, scale, values, of_runs, number, changed_ms in connection.execute(query):
                counts, times_ms = found.setdefault((name, scale, values), ({}, []))
                counts[of_runs] = int(number)
                times_ms += [] if changed_ms is None else [int(changed_ms)]
        variants = [
            Variant(name, scale, tuple(json.loads(values)), counts, max(times_ms, default=None))
            for (name, scale, values), (counts, times_ms) in found.items()
        ]
        return sorted(variants, key=lambda variant: (-(variant.newest_ms or 0), variant.scale or "", variant.sets))

    def sweep_counts(self, sweep_ids: Iterable[str]) -> dict[str, dict[Status, int]]:
        """Sweep id → status → the present number of its runs."""
        status = func.coalesce(self._counted_in_sweep(), "pending").label("status")
        members = sweep_runs.join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
        members = members.outerjoin(runs, runs.c.run_id == sweep_runs.c.run_id)
        query = select(sweep_runs.c.sweep_id, status, func.count()).select_from(members)
        query = query.where(sweep_runs.c.sweep_id.in_(list(sweep_ids))).group_by(sweep_runs.c.sweep_id, status)
        rows: dict[str, dict[Status, int]] = {}
        with self.database.reading() as connection:
            for sweep_id, of_runs, number in connection.execute(query):
                rows.setdefault(sweep_id, {})[of_runs] = int(number)
        return rows

    def sweep_progress(self, sweep_id: str, most_failed: int) -> SweepProgress | None:
        """How far a sweep is, with at most `most_failed` failed runs; None for an unknown sweep."""
        of_sweep = and_(sweep_runs.c.run_id == runs.c.run_id, sweep_runs.c.sweep_id == sweep_id)
        status = self._counted_in_sweep()
        grouped = select(status, func.count(), func.sum(runs.c.step), func.sum(runs.c.steps)).group_by(status)
        failed = select(runs.c.run_id, sweep_runs.c.row, runs.c.message).where(runs.c.status == "failed")
        failed = failed.order_by(runs.c.revision.desc()).limit(most_failed)
        workers = select(runs.c.worker_id).where(status == "running")
        query = select(*self._sweep_columns()).where(sweeps.c.sweep_id == sweep_id)

        def joined(select_runs: Any) -> Any:
            return select_runs.join(sweep_runs, of_sweep).join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)

        with self.database.reading() as connection:
            revision = revision_of(connection)  # before the rows: what changes in between is read again
            row = connection.execute(query).one_or_none()
            if row is None:
                return None
            sweep = _summary(row)
            totals = [
                (status, int(number), int(steps_done or 0), int(steps or 0))
                for status, number, steps_done, steps in connection.execute(joined(grouped))
            ]
            training = [worker or "" for worker in connection.execute(joined(workers)).scalars()]
            newest = connection.execute(failed.join(sweep_runs, of_sweep)).all()
        counts: Counter[Status] = Counter({status: number for status, number, _, _ in totals})
        started = sum(counts.values())
        counts["pending"] += sweep.runs - started
        steps_left = sum(steps - steps_done for status, _, steps_done, steps in totals if status not in ENDED)
        # A run that has not started counts with the mean of the others.
        mean_steps = sum(steps for *_, steps in totals) / started if started else 0.0
        is_running = sweep.status == "running"
        return SweepProgress(
            sweep_id=sweep_id,
            ablation=sweep.ablation,
            status=sweep.status,
            runs=sweep.runs,
            counts=+counts,  # without the statuses that no run has
            groups=len(training) if is_running else None,
            nodes=len({worker.rpartition(":")[0] for worker in training} - {""}) if is_running else None,
            failures=[
                FailedMember(run_id=run_id, row=row, message=message) for run_id, row, message in reversed(newest)
            ],
            revision=revision,
            steps_done=sum(steps_done for _, _, steps_done, _ in totals),
            steps_left=steps_left + mean_steps * max(0, sweep.runs - started),
        )

    def sweep_ids_that_begin(self, prefix: str, limit: int) -> list[str]:
        """The first ids of sweeps that begin with `prefix`, sorted."""
        return self._ids_that_begin(sweeps.c.sweep_id, prefix, limit)

    def sweep_rows(self, sweep_id: str) -> dict[str, str]:
        """Run id → row, of the runs of a sweep, in its order."""
        query = select(sweep_runs.c.run_id, sweep_runs.c.row).where(sweep_runs.c.sweep_id == sweep_id)
        with self.database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query.order_by(sweep_runs.c.ordinal))}

    def recorded_rows(self, ablation: str) -> list[tuple[str, dict[str, str]]]:
        """Run id and labels of the runs in the sweeps of an ablation, each once, oldest first."""
        query = (
            select(sweep_runs.c.run_id, sweep_runs.c.labels)
            .join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
            .where(has_name(sweeps.c.ablation, ablation))
            .order_by(sweeps.c.started_ms, sweep_runs.c.sweep_id, sweep_runs.c.ordinal)
        )
        with self.database.reading() as connection:
            found = {row.run_id: dict(row.labels) for row in connection.execute(query)}
        return list(found.items())

    def places(self, run_ids: Iterable[str]) -> dict[str, list[SweepPlace]]:
        """Run id → the sweeps that contain it, with ablation, row and labels, oldest sweep first."""
        query = (
            select(
                sweep_runs.c.run_id, sweeps.c.sweep_id, sweeps.c.ablation, sweeps.c.started_ms,
                sweep_runs.c.row, sweep_runs.c.seed, sweep_runs.c.labels,
            )
            .join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
            .order_by(sweeps.c.started_ms, sweeps.c.sweep_id)
        )  # fmt: skip
        places: dict[str, list[SweepPlace]] = {}
        with self.database.reading() as connection:
            for run_id, *place in connection.execute(query.where(among(connection, sweep_runs.c.run_id, run_ids))):
                places.setdefault(run_id, []).append(SweepPlace(*place))
        return places

    def activity(self) -> Activity:
        """The present state of all runs and sweeps."""
        of_runs, of_sweeps = self._counted(), self._status(sweeps)
        leased_until = case((self._status(runs) == "running", runs.c.expires_s))
        left_s = func.min(leased_until) - self.database.now_s()
        totals = select(of_runs, func.count(), func.sum(runs.c.step), left_s).group_by(of_runs)
        members = sweep_runs.join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
        members = members.outerjoin(runs, runs.c.run_id == sweep_runs.c.run_id)
        has_not_started = func.coalesce(of_runs, "pending") == "pending"
        not_started = select(func.count()).select_from(members).where(of_sweeps == "running", has_not_started)
        with self.database.reading() as connection:
            rows = connection.execute(totals).all()
            counts = connection.execute(select(of_sweeps, func.count()).group_by(of_sweeps)).all()
            left_out = connection.execute(select(sweeps.c.left_out).where(of_sweeps == "running")).scalars().all()
            waiting = connection.execute(not_started).scalar_one()
        return Activity(
            runs={row[0]: int(row[1]) for row in rows},
            steps=sum(int(row[2] or 0) for row in rows),
            shortest_lease_s=min((float(row[3]) for row in rows if row[3] is not None), default=None),
            sweeps={row[0]: int(row[1]) for row in counts},
            waiting=int(waiting),
            left_out=sum(map(int, left_out)),
        )

    def write_sweep(
        self,
        summary: SweepSummary,
        members: Sequence[Mapping[str, Any]],
        *,
        ttl_s: float | None = None,
        since: int | None = None,
    ) -> None:
        """Insert or replace a sweep.

        Args:
            summary: The sweep.
            members: Its runs in order: `{"run_id", "row", "seed", "labels", "reused"}`. Later calls may append to them.
            ttl_s: A process executes the sweep, whose lease ends in `ttl_s`. None: a lease that it has stays, while it
                is running; a running sweep without one reads as interrupted.
            since: See `write`: a sweep with a lease, or one that has changed since, stays as it is.
        """
        expires_s = None if ttl_s is None else self.database.now_s() + ttl_s
        with self.database.writing() as connection:
            if since is not None:
                newer = select(sweeps.c.sweep_id).where(self._is_newer(sweeps, since))
                if connection.execute(newer.where(sweeps.c.sweep_id == summary.sweep_id)).one_or_none() is not None:
                    return
            write_sweep(connection, summary, members, expires_s)
            if summary.status not in ACTIVE:  # it has added as many runs as it will
                self.database.measure_tables(connection)

    @contextlib.contextmanager
    def adding_sweep(self) -> Iterator[Callable[[SweepSummary, Sequence[Mapping[str, Any]]], None]]:
        """Add a sweep by what is yielded, for the arguments see `write_sweep`. Nobody else adds one during the block.

        So the block can look whether there is such a sweep, and write its files: of several processes one adds it, and
        the others find it complete. The row is written when the block ends; a block that raises adds nothing.
        """
        added: list[tuple[SweepSummary, Sequence[Mapping[str, Any]]]] = []
        with self.database.writing(lock=ADDING_LOCK) as connection:
            yield lambda summary, members: added.append((summary, members))
            self.database.lock(connection)
            for summary, members in added:
                write_sweep(connection, summary, members)

    def append_members(self, sweep_id: str, members: Sequence[Mapping[str, Any]]) -> None:
        """Append runs to a sweep; for `members`, see `write_sweep`."""
        with self.database.writing() as connection:
            counted_runs = select(sweeps.c.runs).where(sweeps.c.sweep_id == sweep_id)
            known = connection.execute(counted_runs).scalar_one()
            write_members(connection, sweep_id, members, first=known)
            changes = {
                "runs": known + len(members),
                "reused": sweeps.c.reused + sum(member["reused"] for member in members),
                "revision": next_revision(connection),
            }
            connection.execute(update(sweeps).where(sweeps.c.sweep_id == sweep_id).values(changes))

    def delete_sweep(self, sweep_id: str) -> None:
        """Delete a sweep from the index; its runs stay."""
        with self.database.writing() as connection:
            next_revision(connection)
            connection.execute(delete(sweep_runs).where(sweep_runs.c.sweep_id == sweep_id))
            connection.execute(delete(sweeps).where(sweeps.c.sweep_id == sweep_id))

    def note_left_out(self, sweep_id: str, nodes: int) -> None:
        """Note how many nodes a sweep has left out."""
        with self.database.writing() as connection:
            connection.execute(update(sweeps).where(sweeps.c.sweep_id == sweep_id).values(left_out=nodes))

    def request_stop(self, sweep_id: str) -> None:
        """Ask a sweep that has not ended to stop. Its driver sees it with the next renewal."""
        active = and_(sweeps.c.sweep_id == sweep_id, sweeps.c.status.in_(ACTIVE))
        with self.database.writing() as connection:
            values = {"stop_requested": True, "revision": next_revision(connection)}
            connection.execute(update(sweeps).where(active).values(values))

    def stop_requested(self, sweep_id: str) -> bool:
        """The sweep was asked to stop, and has not ended."""
        with self.database.reading() as connection:
            return _stop_requested(connection, sweep_id)

    # -- internals -----------------------------------------------------------------------------------------------

    def _status(self, table: Table) -> ColumnElement[Any]:
        return status_of(table, self.database.now_s())

    def _is_newer(self, table: Table, revision: int) -> ColumnElement[bool]:
        """The run or sweep has a lease, or has changed since the revision."""
        return or_(self._status(table) == "running", table.c.revision > revision)

    def _expired(self, connection: Connection, ids: ColumnElement[str]) -> list[str]:
        """The ids of the runs or sweeps that are running by their rows, and whose lease has ended."""
        query = select(ids).where(has_expired(ids.table, self.database.now_s())).order_by(ids)
        return list(connection.execute(query).scalars())

    def _ids_that_begin(self, ids: ColumnElement[str], prefix: str, limit: int) -> list[str]:
        query = select(ids).where(ids.startswith(prefix, autoescape=True)).order_by(ids).limit(limit)
        with self.database.reading() as connection:
            return list(connection.execute(query).scalars())

    def _counted(self) -> ColumnElement[str]:
        """The status by which runs are counted: one that is leased and waits for a worker is pending."""
        status = self._status(runs)
        is_waiting = and_(status == "running", runs.c.worker_id.is_(None))
        return case((is_waiting, literal("pending", String)), else_=status).label("status")

    def _counted_in_sweep(self) -> ColumnElement[str]:
        """The same in `sweep_runs` and `sweeps`: an active sweep waits for the runs that another sweep trains."""
        counted = self._counted()
        is_elsewhere = and_(counted == "running", runs.c.sweep_id != sweep_runs.c.sweep_id, sweeps.c.status.in_(ACTIVE))
        return case((is_elsewhere, literal("pending", String)), else_=counted).label("status")

    def _sweep_columns(self) -> list[ColumnElement[Any]]:
        names = [name for name in SweepSummary.model_fields if name not in ("status", "counts")]
        return [self._status(sweeps), *(sweeps.c[name] for name in names)]

    def _selected(
        self, connection: Connection, query: Select[Any], run_ids: Iterable[str] | None
    ) -> Iterator[tuple[Any, ...]]:
        """The rows of `query`, of all runs or of those with these ids."""
        if run_ids is not None:
            query = query.where(among(connection, runs.c.run_id, run_ids))
        for rows in connection.execute(query).partitions(10_000):  # row by row, fetching costs more
            yield from map(tuple, rows)


def revision_of(connection: Connection) -> int:
    """The revision of the last change in the store."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == "revision")).scalar_one())


def _held_by(sweep_id: str) -> ColumnElement[bool]:
    """The sweep holds the lease of a run, which may have expired if nobody else has taken it."""
    return and_(runs.c.sweep_id == sweep_id, runs.c.status == "running", runs.c.expires_s.is_not(None))


def _stop_requested(connection: Connection, sweep_id: str) -> bool:
    query = select(sweeps.c.stop_requested).where(sweeps.c.sweep_id == sweep_id, sweeps.c.status.in_(ACTIVE))
    return bool(connection.execute(query).scalar())


def _record_columns(*, values: bool) -> list[ColumnElement[Any]]:
    """The columns of a record, without its status; without `values`, also without metrics and facts."""
    return [runs.c[name] for name in (*COLUMNS, *(("metrics", "facts") if values else ()))]


def _record(names: Sequence[str], row: Sequence[Any]) -> RunRecord:
    return RunRecord(**dict(zip(names, row, strict=True)))


def _summary(row: Row[Any]) -> SweepSummary:
    return SweepSummary.model_validate(row, from_attributes=True)
