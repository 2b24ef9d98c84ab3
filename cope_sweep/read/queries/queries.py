"""The read side of a store: what the command line and the REST service ask, answered from the index."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, TypeVar

from cope_sweep.api.answers import (
    AblationDetail,
    AblationSummary,
    Curves,
    CurvesOfRuns,
    MetricInfo,
    PlanCost,
    PlannedRow,
    PlannedRun,
    RunDetail,
    RunLog,
    RunPage,
    RunsDiff,
    ScaleSummary,
    SweepDetail,
    SweepEntry,
    SweepMember,
    SweepPage,
)
from cope_sweep.api.questions import (
    CompareCurves,
    ExportRuns,
    GetAblation,
    GetCurves,
    GetDiff,
    GetLog,
    GetPlan,
    GetRun,
    GetSweep,
    ListAblations,
    ListPlannedRuns,
    ListRuns,
    ListSweeps,
    Question,
    RunFilter,
)
from cope_sweep.config import Plan, SpecError
from cope_sweep.read.queries.ablations import AblationFiles, LoadedPlan
from cope_sweep.read.queries.curves import KnownCurves, curves_of_runs, plan_curves, run_rows
from cope_sweep.read.queries.errors import NotFinishedError, NotFoundError
from cope_sweep.read.queries.logs import run_log
from cope_sweep.read.queries.plans import plan_cost, recorded_plan
from cope_sweep.read.queries.records import sweep_fields
from cope_sweep.read.queries.runs import detail as run_detail
from cope_sweep.read.queries.runs import find as find_run
from cope_sweep.read.queries.runs import full_id, run_query
from cope_sweep.read.queries.runs import page as run_page
from cope_sweep.store import QueryError, RunFolder, RunQuery, RunRecord, Store, SweepSummary
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import summaries
from cope_sweep.store.store import MEMORY

if TYPE_CHECKING:
    from cope_sweep.read.tables import Table

A = TypeVar("A")


class Queries:
    """Answers questions about a store, and about the ablation files of a folder where it has one. It is thread-safe.

    Reading never writes: a run whose lease has expired reads as interrupted. Methods raise NotFoundError,
    NotFinishedError, QueryError, SpecError and StoreError.
    """

    def __init__(self, store: Store, ablations: AblationFiles | None = None) -> None:
        """Name a store and its ablation files.

        Args:
            store: The store.
            ablations: The ablation files; None: none.
        """
        self._store = store
        self._files = ablations
        self._curves = KnownCurves()

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
        if self._files is None:
            raise NotFoundError("no folder of ablation files was named")
        return self._files

    def check(self) -> None:
        """Read the folder of the ablations and the index. A missing store counts as an empty one. Raises OSError."""
        self.files.files()
        self.store.index.revision()

    def ask(self, question: Question[A]) -> A:
        """The answer to a question."""
        answer: Callable[[Queries, Question[A]], A] = ANSWERS[type(question)]
        return answer(self, question)

    def load(self, name: str, scale: str | None = None) -> LoadedPlan:
        """The plan of an ablation at a scale, with what the search of earlier sweeps has suggested."""
        loaded = self.files.load(name, scale)
        plan = recorded_plan(loaded.plan, self.store)
        if plan is loaded.plan:
            return loaded
        return replace(loaded, plan=plan, runs={run.run_id: run for run in plan.runs})

    # -- ablations -----------------------------------------------------------------------------------------------

    def _ablations(self, _: ListAblations) -> list[AblationSummary]:
        """By name. An invalid file gives an entry with its error."""
        entries = []
        for name in self.files.files():
            try:
                ready = self.files.waits or self.files.is_ready(name)
                fields = self._ablation_fields(self.load(name)) if ready else {"name": name, "loading": True}
                entries.append(AblationSummary(**fields))
            except SpecError as error:
                entries.append(AblationSummary(name=name, error=str(error)))
        return entries

    def _ablation(self, question: GetAblation) -> AblationDetail:
        name = question.name
        text = self.files.file(name).read_text(errors="replace")
        try:
            loaded = self.load(name, question.scale)
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

    def _plan(self, question: GetPlan) -> PlanCost:
        return plan_cost(self.files.load(question.name, question.scale).plan, self.store)

    def _ablation_fields(self, loaded: LoadedPlan) -> dict[str, Any]:
        """Raises SpecError, also for a faulty scale."""
        content, index = loaded.plan.ablation.content, self.store.index
        name = loaded.plan.name
        counts = summaries.plan_counts(index, list(loaded.runs))
        ready = [scale for scale in content.scales if self.files.waits or self.files.is_ready(name, scale)]
        scales = {scale: list(self.load(name, scale).runs) for scale in ready}
        times = [summaries.newest_ms(index, runs) for runs in (loaded.runs, *scales.values())]
        return {
            "name": name,
            "title": content.title,
            "hypothesis": content.hypothesis.strip(),
            "reproduces": content.reproduces,
            "scales": list(content.scales),
            "at_scales": {scale: self._scale_summary(runs) for scale, runs in scales.items()},
            "rows": len(loaded.plan.rows),
            "seeds": len(content.seeds),
            "runs": len(loaded.runs),
            "finished": counts.get("finished", 0),
            "counts": counts,
            "newest_ms": max((ms for ms in times if ms is not None), default=None),
            "loading": len(ready) < len(content.scales),
        }

    def _scale_summary(self, runs: list[str]) -> ScaleSummary:
        counts = summaries.plan_counts(self.store.index, runs)
        return ScaleSummary(runs=len(runs), finished=counts.get("finished", 0), counts=counts)

    def _curves_of_plan(self, question: GetCurves) -> Curves:
        return plan_curves(self.load(question.name, question.scale).plan, self.store, question, self._curves)

    def version(self, loaded: LoadedPlan) -> tuple[object, ...]:
        """A value that changes when an ablation's file or anything in the store changes."""
        return loaded.stamp, loaded.scale, *self._store_version()

    def state(self) -> tuple[object, ...]:
        """A value that changes when any file or anything in the store changes: `stat` calls and two queries."""
        return self._files.state() if self._files else (), *self._store_version()

    def _store_version(self) -> tuple[object, ...]:
        """A lease that expires changes it, too: its run reads as interrupted then."""
        index = self.store.index
        return summaries.version(index), tuple(index.expired())

    # -- runs ----------------------------------------------------------------------------------------------------

    def _runs(self, question: ListRuns) -> RunPage:
        query = replace(self._run_query(question), limit=question.limit, offset=question.offset)
        return run_page(self.store, self._files, question, query)

    def _run_query(self, question: RunFilter) -> RunQuery:
        query = run_query(question)
        if query.sweep_id is not None:
            self._sweep_summary(query.sweep_id)
        if question.ablation is not None:
            query = replace(query, run_ids=tuple(self.load(question.ablation, question.scale).runs))
        elif question.scale is not None:
            raise QueryError(f"scale: {question.scale!r} is that of an ablation; name the ablation, too")
        return query

    def export(self, question: ExportRuns, file: IO[bytes]) -> int:
        """Write all runs that match, or their curves, to a file, and return the number of its lines."""
        from cope_sweep.read.tables.export import write_runs

        return write_runs(self.store, self._run_query(question), question.format or "csv", file, curves=question.curves)

    def table(self, plan: Plan, *, compare: str | None = None) -> Table:
        """The table of a plan, with what its search has suggested: `results.table`."""
        from cope_sweep.read.tables import table

        return table(recorded_plan(plan, self.store), self.store, compare=compare)

    def run_id(self, text: str) -> str:
        """The id of the run whose id begins with these digits, at least four; else the text. Raises QueryError."""
        return full_id(self.store, text)

    def _diff(self, question: GetDiff) -> RunsDiff:
        from cope_sweep.read.tables.difference import store_difference

        found = store_difference(self.store, self.run_id(question.left), self.run_id(question.right))
        return RunsDiff.model_validate(found.to_json())

    def _run(self, question: GetRun) -> RunDetail:
        """What cannot be read of its files is left out."""
        return run_detail(self.store, self._files, self.run_id(question.run_id), with_curve=question.curve)

    def curve(self, run_id: str, metrics: Sequence[str] = (), points: int | None = None) -> list[dict[str, float]]:
        """The logged rows of a run, by step: all, or those of some metrics, and at most `points` (≥ 4) of them."""
        run_id = self.run_id(run_id)
        find_run(self.store, self._files, run_id)
        return run_rows(self.store.run(run_id), metrics, points)

    def _curves_of_runs(self, question: CompareCurves) -> CurvesOfRuns:
        run_ids = list(dict.fromkeys(map(self.run_id, question.run)))
        for run_id in run_ids:
            find_run(self.store, self._files, run_id)
        return curves_of_runs([self.store.run(run_id) for run_id in run_ids], question.metric, question.points)

    def _log(self, question: GetLog) -> RunLog:
        """No lines of a run that was not begun."""
        run_id = self.run_id(question.run_id)
        find_run(self.store, self._files, run_id)
        return run_log(self.store.run(run_id), question.tail)

    def finished(self, run_id: str) -> RunFolder:
        """The folder of a finished run, with its checkpoint on this machine."""
        run_id = self.run_id(run_id)
        record, _ = find_run(self.store, self._files, run_id)
        if record.status != "finished":
            raise NotFinishedError(f"run {run_id} is {record.status}; only a finished run has a checkpoint")
        folder = self.store.run(run_id)
        folder.fetch_checkpoint()
        return folder

    # -- sweeps --------------------------------------------------------------------------------------------------

    def _sweeps(self, question: ListSweeps) -> SweepPage:
        index, limit, offset = self.store.index, question.limit, question.offset
        total, found = summaries.sweep_page(index, ablation=question.ablation, limit=limit, offset=offset)
        counts = summaries.sweep_counts(index, [each.sweep_id for each in found])
        entries = [SweepEntry(**sweep_fields(each), counts=counts.get(each.sweep_id, {})) for each in found]
        return SweepPage(total=total, limit=limit, offset=offset, sweeps=entries)

    def _sweep_summary(self, sweep_id: str) -> SweepSummary:
        """The index's summary of a sweep. Raises NotFoundError."""
        summary = self.store.index.sweep(sweep_id)
        if summary is None:
            raise NotFoundError(summaries.no_sweep(self.store.index, sweep_id, self.store.location))
        return summary

    def _sweep(self, question: GetSweep) -> SweepDetail:
        """Where its record cannot be read, the index's summary."""
        sweep_id = question.sweep_id
        summary = self._sweep_summary(sweep_id)
        counts = summaries.sweep_counts(self.store.index, [sweep_id]).get(sweep_id, {})
        fields = sweep_fields(summary) | {"counts": counts}
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


ANSWERS: dict[type[Question[Any]], Callable[[Queries, Any], Any]] = {
    ListAblations: Queries._ablations,
    GetAblation: Queries._ablation,
    GetPlan: Queries._plan,
    GetCurves: Queries._curves_of_plan,
    ListRuns: Queries._runs,
    ListPlannedRuns: Queries._runs,
    GetRun: Queries._run,
    GetLog: Queries._log,
    GetDiff: Queries._diff,
    CompareCurves: Queries._curves_of_runs,
    ListSweeps: Queries._sweeps,
    GetSweep: Queries._sweep,
}
