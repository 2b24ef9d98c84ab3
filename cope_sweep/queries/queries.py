"""The read side of a store: what the command line and the REST service ask, answered from the index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, TypeVar

from cope_sweep.plan import Plan
from cope_sweep.queries.ablations import AblationFiles, LoadedPlan, Place
from cope_sweep.queries.answers import (
    AblationDetail,
    AblationSummary,
    Curves,
    MetricInfo,
    PlannedRow,
    PlannedRun,
    RunDetail,
    RunPage,
    RunSummary,
    ScaleSummary,
    SweepDetail,
    SweepEntry,
    SweepMember,
    SweepPage,
)
from cope_sweep.queries.curves import plan_curves
from cope_sweep.queries.errors import NotFinishedError, NotFoundError
from cope_sweep.queries.plans import recorded_plan, settle
from cope_sweep.spec import SpecError
from cope_sweep.store import RunFolder, RunQuery, RunRecord, Store, SweepSummary
from cope_sweep.store.artifacts import RUN_ID
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import summaries
from cope_sweep.store.store import MEMORY

if TYPE_CHECKING:
    from cope_sweep.results import Table
    from cope_sweep.results.difference import StoreDifference

T = TypeVar("T")

VALUE_COLUMNS = frozenset(RunRecord.__dataclass_fields__) - {"metrics", "facts"}


class Queries:
    """Questions about a store, and about the ablation files of a folder where it has one. It is thread-safe.

    Methods raise NotFoundError, NotFinishedError, QueryError, SpecError and StoreError.
    """

    def __init__(self, store: Store, ablations: AblationFiles | None = None) -> None:
        self._store = store
        self._ablations = ablations

    @property
    def store(self) -> Store:
        """The store. One that did not exist before, so that its index is in memory, is opened again once it does."""
        known = self._store
        if known.index.url == MEMORY and (known.root / "runs").is_dir() and os.access(known.root, os.W_OK):
            self._store = Store(known.location)
        return self._store

    @property
    def files(self) -> AblationFiles:
        """The ablation files. Raises NotFoundError where no folder was named."""
        if self._ablations is None:
            raise NotFoundError("no folder of ablation files was named")
        return self._ablations

    def check(self) -> None:
        """Read the folder of the ablations and the index. A missing store counts as an empty one. Raises OSError."""
        self.files.files()
        self.store.index.revision()

    def load(self, name: str, scale: str | None = None) -> LoadedPlan:
        """The plan of an ablation at a scale, with what the search of earlier sweeps has suggested."""
        loaded = self.files.load(name, scale)
        plan = recorded_plan(loaded.plan, self.store)
        if plan is loaded.plan:
            return loaded
        return replace(loaded, plan=plan, runs={run.run_id: run for run in plan.runs})

    # -- ablations -----------------------------------------------------------------------------------------------

    def ablations(self) -> list[AblationSummary]:
        """All ablations by name. An invalid file gives an entry with its error."""
        settle(self.store)
        entries = []
        for name in self.files.files():
            try:
                entries.append(AblationSummary(**self._ablation_fields(self.load(name))))
            except SpecError as error:
                entries.append(AblationSummary(name=name, error=str(error)))
        return entries

    def ablation(self, name: str, scale: str | None = None) -> AblationDetail:
        """One ablation with its plan at a scale, and its file."""
        text = self.files.file(name).read_text(errors="replace")
        settle(self.store)
        try:
            loaded = self.load(name, scale)
            fields = self._ablation_fields(loaded)
        except SpecError as error:
            return AblationDetail(name=name, error=str(error), text=text)
        statuses = self.store.index.statuses(loaded.runs)
        return AblationDetail(
            **fields,
            axes=loaded.plan.axes,
            metrics=[
                MetricInfo(name=m.name, title=m.title, goal=m.goal, unit=m.unit, decimals=m.decimals, scale=m.scale)
                for m in loaded.plan.ablation.content.metrics
            ],
            plan=[
                PlannedRow(
                    row=row.name,
                    labels=row.labels,
                    runs=[
                        PlannedRun(run_id=r.run_id, seed=r.seed, status=statuses.get(r.run_id, "pending"))
                        for r in row.runs
                    ],
                )
                for row in loaded.plan.rows
            ],
            text=text,
        )

    def _ablation_fields(self, loaded: LoadedPlan) -> dict[str, Any]:
        content = loaded.plan.ablation.content
        counts = summaries.plan_counts(self.store.index, list(loaded.runs))
        return {
            "name": loaded.plan.name,
            "title": content.title,
            "hypothesis": content.hypothesis.strip(),
            "reproduces": content.reproduces,
            "scales": list(content.scales),
            "at_scales": {scale: self._scale_summary(loaded.plan.name, scale) for scale in content.scales},
            "rows": len(loaded.plan.rows),
            "seeds": len(content.seeds),
            "runs": len(loaded.runs),
            "finished": counts.get("finished", 0),
            "counts": counts,
        }

    def _scale_summary(self, name: str, scale: str) -> ScaleSummary:
        """Raises SpecError."""
        runs = list(self.load(name, scale).runs)
        return ScaleSummary(runs=len(runs), finished=summaries.plan_counts(self.store.index, runs).get("finished", 0))

    def curves(self, loaded: LoadedPlan, metric: str | None) -> Curves:
        """A metric (None: the first of the table) of every run of a plan."""
        return plan_curves(loaded.plan, self.store, metric)

    def version(self, loaded: LoadedPlan) -> tuple[object, ...]:
        """A value that changes when an ablation's file or anything in the store changes."""
        settle(self.store)
        return loaded.stamp, loaded.scale, summaries.version(self.store.index)

    # -- runs ----------------------------------------------------------------------------------------------------

    def runs(self, query: RunQuery, *, ablation: str | None = None, scale: str | None = None) -> RunPage:
        """A page of the runs that match a query.

        Without an ablation these are the runs that were begun. With one, they are the runs of its plan in its order,
        including pending ones; a query with filters, a sweep or an order leaves those out, which have no values.
        """
        settle(self.store)
        if query.sweep_id is not None:
            self._sweep(query.sweep_id)
        if ablation is not None:
            query = replace(query, run_ids=tuple(self.load(ablation, scale).runs))
        if query.run_ids is not None and query == RunQuery(
            query.statuses, query.run_ids, limit=query.limit, offset=query.offset
        ):
            total, records = self._in_given_order(query)
        else:
            page = self.store.index.page(query)
            total, records = page.total, page.runs
        keys = {each.key for each in query.filters} | {query.sort} - {"run_id"}
        summaries_ = self._summaries(records, keys)
        return RunPage(total=total, limit=query.limit, offset=query.offset, runs=summaries_)

    def export(self, query: RunQuery, output_format: str, file: IO[bytes], *, curves: bool = False) -> int:
        """Write all runs that match a query, or their curves, to a file: `results.export.write_runs`."""
        from cope_sweep.results.export import write_runs

        settle(self.store)
        if query.sweep_id is not None:
            self._sweep(query.sweep_id)
        return write_runs(self.store, query, output_format, file, curves=curves)

    def table(self, plan: Plan, *, against: str | None = None) -> Table:
        """The table of a plan, with what its search has suggested: `results.table`."""
        from cope_sweep.results import table

        settle(self.store)
        return table(recorded_plan(plan, self.store), self.store, against=against)

    def difference(self, left: str, right: str) -> StoreDifference:
        """What differs between two runs or two sweeps: `results.difference`."""
        from cope_sweep.results.difference import store_difference

        settle(self.store)
        return store_difference(self.store, left, right)

    def _in_given_order(self, query: RunQuery) -> tuple[int, list[RunRecord]]:
        """The number of matching runs, and a page of them in the order of `query.run_ids`."""
        ids: Sequence[str] = query.run_ids or ()
        if query.statuses:
            statuses = self.store.index.statuses(ids)
            ids = [run_id for run_id in ids if statuses.get(run_id, "pending") in query.statuses]
        page = ids[query.offset : query.offset + query.limit]
        records = self.store.index.records(page)
        return len(ids), [records.get(run_id) or RunRecord(run_id) for run_id in page]

    def _summaries(self, records: Sequence[RunRecord], keys: Iterable[str] = ()) -> list[RunSummary]:
        ids = [record.run_id for record in records]
        places = self._places(ids)
        specs = self.store.index.specs(ids) if keys else {}
        return [
            RunSummary(
                **_run_fields(record, places.get(record.run_id, [])),
                values=_values(record, specs.get(record.run_id, {}), keys),
            )
            for record in records
        ]

    def _places(self, run_ids: Sequence[str]) -> dict[str, list[Place]]:
        """Run id → where it is: in the ablation files first, then in sweeps."""
        found = self._ablations.places(run_ids) if self._ablations else {}
        for run_id, places in summaries.places(self.store.index, run_ids).items():
            found.setdefault(run_id, []).extend(Place(ablation, row) for _, ablation, row in places)
        return found

    def run(self, run_id: str, *, with_curve: bool = True) -> RunDetail:
        """A run of the store or of a plan, with what is in its files. What cannot be read of them is left out."""
        settle(self.store)
        record, places = self._find(run_id)
        folder = self.store.run(run_id)
        document = _readable(lambda: folder.spec) or {}
        planned = next((place.spec for place in places if place.spec), None)
        result = _readable(lambda: folder.result) if record.status == "finished" else None
        return RunDetail(
            **_run_fields(record, places),
            spec=document.get("spec") or (planned.model_dump(mode="json") if planned else None),
            state=_readable(lambda: folder.state) or {},
            facts=dict(record.facts),
            result=result,
            sweeps=[sweep_id for sweep_id, *_ in summaries.places(self.store.index, [run_id]).get(run_id, [])],
            curve=(_readable(folder.curve) or []) if with_curve else [],
        )

    def curve(self, run_id: str) -> list[dict[str, float]]:
        """The logged rows of a run, by step."""
        self._find(run_id)
        return self.store.run(run_id).curve()

    def finished(self, run_id: str) -> RunFolder:
        """The folder of a finished run, with its checkpoint on this machine."""
        record, _ = self._find(run_id)
        if record.status != "finished":
            raise NotFinishedError(f"run {run_id} is {record.status}; only a finished run has a checkpoint")
        folder = self.store.run(run_id)
        folder.fetch_checkpoint()
        return folder

    def _find(self, run_id: str) -> tuple[RunRecord, list[Place]]:
        """The record of a run and its places. Raises NotFoundError."""
        if not RUN_ID.fullmatch(run_id):
            raise NotFoundError(f"{run_id[:40]!r} is no run id: a run id has 16 hexadecimal digits")
        places = self._places([run_id]).get(run_id, [])
        record = self.store.index.records([run_id]).get(run_id)
        if record is None and not places:
            raise NotFoundError(
                f"{summaries.no_run(self.store.index, run_id, self.store.location)}; `cope-sweep plan ABLATION` lists "
                "those of an ablation"
            )
        return record or RunRecord(run_id), places

    # -- sweeps --------------------------------------------------------------------------------------------------

    def sweeps(self, *, ablation: str | None = None, limit: int = 100, offset: int = 0) -> SweepPage:
        """A page of the sweeps of the store, newest first."""
        settle(self.store)
        index = self.store.index
        total, found = summaries.sweep_page(index, ablation=ablation, limit=limit, offset=offset)
        counts = summaries.sweep_counts(index, [each.sweep_id for each in found])
        entries = [SweepEntry(**_sweep_fields(each), counts=counts.get(each.sweep_id, {})) for each in found]
        return SweepPage(total=total, limit=limit, offset=offset, sweeps=entries)

    def _sweep(self, sweep_id: str) -> SweepSummary:
        """The index's summary of a sweep. Raises NotFoundError."""
        summary = self.store.index.sweep(sweep_id)
        if summary is None:
            raise NotFoundError(summaries.no_sweep(self.store.index, sweep_id, self.store.location))
        return summary

    def sweep(self, sweep_id: str) -> SweepDetail:
        """A sweep with the present status of its runs. Where its record cannot be read, the index's summary."""
        settle(self.store)
        summary = self._sweep(sweep_id)
        counts = summaries.sweep_counts(self.store.index, [sweep_id]).get(sweep_id, {})
        fields = _sweep_fields(summary) | {"counts": counts}
        try:
            record = self.store.sweep(sweep_id)
        except DamagedError as error:
            return SweepDetail(**fields, error=str(error))
        if record is None:
            return SweepDetail(**fields, error=f"{sweep_id}.json is not in {self.store.location}/sweeps")
        records = self.store.index.records((run.run_id for run in record.runs), values=False)
        reused = set(record.reused)
        members = []
        for run in record.runs:
            known = records.get(run.run_id) or RunRecord(run.run_id)
            members.append(
                SweepMember(
                    **run.model_dump(),
                    reused=run.run_id in reused,
                    status=known.status,
                    step=known.step,
                    steps=known.steps,
                    worker_id=known.worker_id,
                    message=known.message,
                )
            )
        kept = record.model_dump(include=set(SweepDetail.model_fields) - set(fields) - {"members", "error"})
        return SweepDetail(**fields, **kept, members=members)


def _run_fields(record: RunRecord, places: Sequence[Place]) -> dict[str, Any]:
    """The fields of a RunSummary. A run that was never begun has the seed and steps of its plan."""
    planned = next((place.spec for place in places if place.spec), None)
    begun = record.revision > 0
    return {
        "run_id": record.run_id,
        "status": record.status,
        "ablations": list(dict.fromkeys(place.ablation for place in places)),
        "row": places[0].row if places else None,
        "seed": record.seed if begun else planned.seed if planned else None,
        "step": record.step,
        "steps": record.steps if begun else planned.train.steps if planned else None,
        "attempt": record.attempt,
        "created_ms": record.created_ms,
        "updated_ms": max((ms for ms in (record.updated_ms, record.ended_ms) if ms is not None), default=None),
        "worker_id": record.worker_id,
        "sweep_id": record.sweep_id,
        "parent_id": record.parent_id,
        "message": record.message,
        "metrics": dict(record.metrics),
    }


def _values(record: RunRecord, spec: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The values of a run by the keys of filters."""
    found = {}
    for key in sorted(keys):
        value = getattr(record, key) if key in VALUE_COLUMNS else spec.get(key, record.value(key))
        if value is not None:
            found[key] = value
    return found


def _sweep_fields(summary: SweepSummary) -> dict[str, Any]:
    return dict(summary.__dict__)


def _readable(read: Callable[[], T]) -> T | None:
    """What `read` returns; None for a file that cannot be read."""
    try:
        return read()
    except DamagedError:
        return None
