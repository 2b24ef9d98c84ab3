"""Answers the questions of the command line and the REST service, from the index of a store."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, singledispatchmethod
from typing import IO, Any, TypeVar, cast

from cope_sweep.api.ablations import (
    AblationDetail,
    AblationSummary,
    ClaimResult,
    CurvePage,
    GetAblation,
    GetCurves,
    GetMissing,
    GetMlflowPage,
    GetPlan,
    ListAblations,
    ListClaims,
    MetricInfo,
    Missing,
    MissingRow,
    MissingRun,
    MlflowPage,
    PlanCost,
    PlannedRow,
    PlannedRun,
    ScaleSummary,
    VariantSummary,
)
from cope_sweep.api.figures import FigureInfo, GetFigure, ListFigures
from cope_sweep.api.question import Question
from cope_sweep.api.runs import (
    RUN_PREFIX,
    CompareCurves,
    CurvesOfRuns,
    ExportRuns,
    GetDiff,
    GetLog,
    GetRun,
    ListRuns,
    ListTried,
    RunDetail,
    RunFilter,
    RunLog,
    RunsDiff,
    Tried,
)
from cope_sweep.api.sweeps import GetSweep, ListSweeps, SweepDetail, SweepMember
from cope_sweep.api.tables import GetReport, GetTable, GetVerdict, Verdict
from cope_sweep.config import LoadedAblation, Plan, SpecError, expand, with_overrides
from cope_sweep.config.filters import parse_filter
from cope_sweep.config.overrides import variant_of
from cope_sweep.config.source import composed
from cope_sweep.errors import FigureError, NotFinishedError, NotFoundError
from cope_sweep.read.figures.available import (
    available_figures,
    chosen_options,
    draw_figure,
    drawn_lines,
    figure_path,
    fits,
    needs_checkpoint,
)
from cope_sweep.read.queries import runs
from cope_sweep.read.queries.ablations import AblationFiles
from cope_sweep.read.queries.claims import claim_results
from cope_sweep.read.queries.curves import CurveCache, curves_of_runs, plan_curves, run_rows
from cope_sweep.read.queries.difference import store_difference
from cope_sweep.read.queries.plans import best_of_row, plan_cost, recorded_plan
from cope_sweep.read.queries.recorded import RecordedAblation, RecordedAblations
from cope_sweep.read.queries.tried import tried
from cope_sweep.read.queries.unknown import no_run, no_sweep
from cope_sweep.read.queries.waiting import Waiting
from cope_sweep.read.tables import Results, Table, read_results, table_file
from cope_sweep.read.tables.comparisons import compared_pair, reference
from cope_sweep.read.tables.results import training_command
from cope_sweep.read.tables.table import check_options, lists_runs
from cope_sweep.read.tables.verdicts import find_row, verdicts
from cope_sweep.redaction import redacted
from cope_sweep.store import (
    QueryError,
    RunFolder,
    RunPage,
    RunQuery,
    RunRecord,
    Store,
    SweepPage,
    SweepRecord,
    SweepSummary,
)
from cope_sweep.store.artifacts import RUN_ID
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import Variant
from cope_sweep.store.results_file import file_name
from cope_sweep.store.store import MEMORY
from cope_sweep.tracking.page import mlflow_experiment_page

A = TypeVar("A")

MAX_RECORDED = 200
"""Maximum number of ablations without a file that are listed, those with the newest sweeps."""
MAX_SHOWN_VARIANTS = 3
"""Variants of an ablation that a message names."""
MAX_VARIANTS = 50
"""Maximum number of variants of an ablation that are listed, those with the newest runs."""
ROW_OF_ABLATION = re.compile(r"(?P<ablation>.+?\.ya?ml|[^/.][^/]*)/(?P<row>.+)")
"""`ABLATION/ROW`: the name or path of an ablation, and one of its rows."""


class Queries:
    """Answers questions about a store and a folder of ablation files. Thread-safe.

    Reading never writes: a run with an expired lease is reported as interrupted, but not changed. Methods raise
    NotFoundError, NotFinishedError, QueryError, SpecError and StoreError.
    """

    def __init__(
        self,
        store: Store,
        ablations: AblationFiles | None = None,
        *,
        links: bool = False,
        max_rows: int | None = None,
    ) -> None:
        """Create the object; nothing is read.

        Args:
            store: The store.
            ablations: The ablation files; None: no files.
            links: Add links to other routes of a service to files.
            max_rows: Maximum number of rows in an image; None: no limit.
        """
        self._store = store
        self._files = ablations
        self._links = links
        self._max_rows = max_rows
        self._curves = CurveCache()
        self._recorded = RecordedAblations(may_import=ablations is not None and ablations.IMPORTS_RECORDED)

    @property
    def store(self) -> Store:
        """The store. If it did not exist at first, it is opened again as soon as it exists."""
        store = self._store
        # The folder first: the index of a folder of results is made only if something asks for it.
        if (store.root / "runs").is_dir() and store.index.url == MEMORY and os.access(store.root, os.W_OK):
            self._store = Store(store.location)
        return self._store

    @property
    def files(self) -> AblationFiles:
        """The ablation files. Raises NotFoundError if there is no folder."""
        if self._files is None:
            raise NotFoundError("there is no folder of ablation files; name one with --ablations", code="no_folder")
        return self._files

    def check(self) -> None:
        """Read the folder of the ablations and the index. A missing store counts as empty. Raises OSError."""
        self.files.files()
        self.store.state()

    def ask(self, question: Question[A]) -> A:
        """The answer to a question."""
        return cast(A, self._answer(question))

    @singledispatchmethod
    def _answer(self, question: Question[Any]) -> Any:
        """The answer, by the method below whose parameter has the question's type."""
        raise TypeError(f"{type(question).__name__} has no answer here")

    def load(self, name: str, scale: str | None = None, sets: Sequence[str] = ()) -> Plan:
        """The plan of an ablation, as `planned`, with the rows that its search has suggested in earlier sweeps."""
        return recorded_plan(self.planned(name, scale, sets), self.store)

    def planned(self, name: str, scale: str | None = None, sets: Sequence[str] = ()) -> Plan:
        """The plan of an ablation at a scale, with values of `--set`.

        Without a scale: of a folder of results, at the only scale that it has, if it has none without a scale. Raises
        QueryError for values of `--set` with a folder of results.
        """
        plan = self._at_scale(name, scale, sets)
        only = self.store.only_scale(plan.name) if scale is None else None
        return self._at_scale(name, only) if only else plan

    def _at_scale(self, name: str, scale: str | None = None, sets: Sequence[str] = ()) -> Plan:
        """The plan made from the ablation's file, or else from the newest sweep that has recorded it."""
        if sets and self.store.read_only:
            raise QueryError(
                "a folder of results shows its runs as they are; leave out --set (`set`)",
                code="conflicting_options",
                options=["--store", "--set"],
            )
        try:
            return self.files.load(name, scale, sets)
        except NotFoundError:
            recorded = self.recorded(name)
            if recorded is None:
                raise
        return self.files.expand_recorded(recorded, scale, sets)

    def recorded(self, name: str) -> RecordedAblation | None:
        """The ablation from the newest sweep that has recorded it, or None. Raises SpecError (a missing plugin)."""
        return None if self._files is None else self._recorded.find(self.store, name)

    def text(self, name: str) -> str:
        """The text of an ablation's file, or else the text that the newest sweep has recorded."""
        try:
            return self.files.file(name).read_text(encoding="utf-8-sig", errors="replace")
        except NotFoundError:
            recorded = self.recorded(name)
            if recorded is None:
                raise
            return recorded.text

    # -- ablations -----------------------------------------------------------------------------------------------

    @_answer.register
    def _ablations(self, _: ListAblations) -> list[AblationSummary]:
        """The ablations by name, those with files first. The entry of an invalid file has its error."""
        variants: dict[str, list[Variant]] = {}
        for variant in self.store.index.variants():
            variants.setdefault(composed(variant.ablation), []).append(variant)
        entries, files = [], self.files.files()
        # By their names in NFC: sweeps of other systems may have recorded them in NFD.
        without_file = {composed(name): name for name in reversed(self.store.index.swept_ablations(MAX_RECORDED))}
        for name in map(composed, files):
            without_file.pop(name, None)
        for name in (*files, *filter(self._is_recorded, sorted(without_file.values()))):
            try:
                base = self._at_scale(name)
                plan = recorded_plan(base, self.store)
                entries.append(AblationSummary(**self._ablation_fields(plan, base, variants.get(composed(name), []))))
            except SpecError as error:
                entries.append(AblationSummary(name=name, error=str(error)))
        return entries

    @_answer.register
    def _ablation(self, question: GetAblation) -> AblationDetail:
        name = question.name
        text = self.text(name)
        try:
            plan = self.load(name, question.scale, question.set)
            fields = self._ablation_fields(plan, self._at_scale(name), self.store.index.variants(name))
        except SpecError as error:
            return AblationDetail(name=name, error=str(error), text=text)
        statuses = self.store.index.statuses((run.run_id for run in plan.runs), counted=True)
        return AblationDetail(
            **fields,
            axes=plan.axes,
            metrics=[
                MetricInfo.model_validate(metric, from_attributes=True) for metric in plan.ablation.content.metrics
            ],
            primary=plan.ablation.content.primary_metric.name,
            plan=[
                PlannedRow(
                    row=row.name,
                    labels=row.labels,
                    runs=[
                        PlannedRun(run_id=run.run_id, seed=run.seed, status=statuses.get(run.run_id, "pending"))
                        for run in row.runs
                    ],
                )
                for row in plan.rows
            ],
            reference=reference(plan),
            text=text,
        )

    @_answer.register
    def _plan(self, question: GetPlan) -> PlanCost:
        return plan_cost(self.planned(question.name, question.scale, question.set), self.store)

    @_answer.register
    def _missing(self, question: GetMissing) -> Missing:
        results = self.results(question.name, question.scale, question.set)
        rows = []
        for row in results.plan.rows:
            records = [(results.records[run.run_id], run) for run in row.runs]
            lacking = [
                MissingRun(**record.progress() | {"steps": run.train.steps}, seed=run.seed)
                for record, run in records
                if record.status not in results.plan.done_statuses
            ]
            if lacking:
                rows.append(MissingRow(row=row.name, runs=lacking))
        command = training_command(results.plan, results.store)
        return Missing(missing=sum(len(row.runs) for row in rows), rows=rows, command=command)

    @_answer.register
    def _mlflow_page(self, question: GetMlflowPage) -> MlflowPage:
        return MlflowPage(url=mlflow_experiment_page(self.store, question.name))

    @_answer.register
    def _claims(self, question: ListClaims) -> list[ClaimResult]:
        if question.ablation is not None:
            return claim_results([self.results(question.ablation, question.scale, question.set)])
        check_no_values(question.scale, question.set, "add `ablation`")
        return claim_results(self._finished_results())

    def _finished_results(self) -> Iterator[Results]:
        """The results of ablations with claims, at each scale that has a finished run, in the order of their files."""
        for plan in sorted(self.files.all(), key=file_name):
            if not plan.ablation.content.has_claims:
                continue
            # A folder of results has no file of some ablations, and stale or damaged ones of others.
            with contextlib.suppress(NotFoundError, NotFinishedError):
                results = read_results(recorded_plan(plan, self.store), self.store)
                if any(record.status == "finished" for record in results.records.values()):
                    yield results

    @_answer.register
    def _figures(self, question: ListFigures) -> list[FigureInfo]:
        return available_figures(self.load(question.name, question.scale, question.set), question.set)

    def _ablation_fields(self, plan: Plan, base: Plan, variants: Sequence[Variant]) -> dict[str, Any]:
        """The fields of an AblationSummary; `base` is the plan without scale and `--set`.

        Raises SpecError, also for an invalid scale.
        """
        content, index = plan.ablation.content, self.store.index
        name, run_ids = plan.name, [run.run_id for run in plan.runs]
        counts = index.status_counts(run_ids)
        scales = {scale: [run.run_id for run in self.load(name, scale).runs] for scale in content.scales}
        others = [variant for variant in variants if _has_own_runs(variant, base.ablation)][:MAX_VARIANTS]
        times_ms = [index.newest_ms({*run_ids, *itertools.chain.from_iterable(scales.values())})]
        times_ms += [variant.newest_ms for variant in others]
        return {
            "name": name,
            "title": content.title,
            "hypothesis": content.hypothesis.strip(),
            "reproduces": content.reproduces,
            "scales": list(content.scales),
            "at_scales": {scale: self._scale_summary(runs, run_ids) for scale, runs in scales.items()},
            "rows": len(plan.rows),
            "seeds": len(content.row_seeds),
            "runs": len(run_ids),
            "finished": counts.get("finished", 0),
            "counts": counts,
            "variants": [_variant_summary(variant) for variant in others],
            "newest_ms": max((time_ms for time_ms in times_ms if time_ms is not None), default=None),
            "committed": self.files.committed(name),
            "recorded_by": None if name in self.files.files() else self._sweep_with(name),
        }

    def _is_recorded(self, name: str) -> bool:
        try:
            return self.recorded(name) is not None
        except SpecError:
            return True

    def _sweep_with(self, name: str) -> str | None:
        """The sweep whose record contains the ablation."""
        recorded = self.recorded(name)
        return None if recorded is None else recorded.sweep_id

    def _scale_summary(self, runs: list[str], own: list[str]) -> ScaleSummary:
        """The runs at a scale; `own` are those without one."""
        counts, same_runs = self.store.index.status_counts(runs), set(runs) == set(own)
        return ScaleSummary(runs=len(runs), finished=counts.get("finished", 0), counts=counts, same_runs=same_runs)

    @_answer.register
    def _curves_of_plan(self, question: GetCurves) -> CurvePage:
        return plan_curves(self.load(question.name, question.scale, question.set), self.store, question, self._curves)

    def state(self) -> tuple[object, ...]:
        """A value that changes with any ablation file and with the store. Costs `stat` calls and two queries."""
        return self._files.state() if self._files else (), self.store.state()

    # -- runs ----------------------------------------------------------------------------------------------------

    @_answer.register
    def _runs(self, question: ListRuns) -> RunPage:
        query = self._run_query(question)
        query = replace(query, limit=question.limit, offset=question.offset)
        plan = None if question.ablation is None else self.load(question.ablation, question.scale, question.set)
        return runs.run_page(self.store, plan, question, query)

    @_answer.register
    def _tried(self, question: ListTried) -> Tried:
        return tried(self.store, question)

    def _run_query(self, question: RunFilter) -> RunQuery:
        run_ids = None if question.run is None else runs.full_ids(self.store, question.run)
        for run_id in run_ids or ():
            if not (RUN_ID.fullmatch(run_id) or RUN_PREFIX.fullmatch(run_id)):  # or the first digits of a pending run
                raise no_run(self.store, run_id)
        if question.ablation is not None:
            plan = self.load(question.ablation, question.scale, question.set)
            planned = dict.fromkeys(run.run_id for run in plan.runs)
            run_ids = [run_id for run_id in (planned if run_ids is None else run_ids) if run_id in planned]
        else:
            check_no_values(question.scale, question.set, "add `ablation`")
        query = RunQuery(
            tuple(question.status),
            run_ids=None if run_ids is None else tuple(run_ids),
            sweep_id=question.sweep,
            filters=tuple(map(parse_filter, question.filter)),
            search_words=tuple(question.search.split()),
            sort=question.sort,
            descending=question.descending,
        )
        if query.sweep_id is not None:
            self.sweep_summary(query.sweep_id)
        return query

    def run_id(self, text: str, scale: str | None = None, sets: Sequence[str] = ()) -> str:
        """The id of the run that a text names; the text itself if it names no run.

        The text is an id, at least four of its first digits, or `ABLATION/ROW` for the best finished run of a row at
        `scale`, with values of `--set`. Raises the errors of `best_of_row`, and QueryError for values beside an id.
        """
        match = ROW_OF_ABLATION.fullmatch(text)
        if self._files is not None and match is not None:
            return self.best_of_row(match["ablation"], match["row"], scale, sets)
        (run_id,) = runs.full_ids(self.store, [text])
        if RUN_ID.fullmatch(run_id):
            check_no_values(scale, sets)
        return run_id

    def best_of_row(self, ablation: str, row: str, scale: str | None = None, sets: Sequence[str] = ()) -> str:
        """The id of the row's finished run with the best value of the ablation's primary metric.

        Raises NotFoundError, NotFinishedError, SpecError.
        """
        plan = self.load(ablation, scale, sets)
        return best_of_row(plan, self.store, row, lambda: self.other_values(plan))

    @_answer.register
    def _diff(self, question: GetDiff) -> RunsDiff:
        sides = (question.left, question.right)
        are_rows = [ROW_OF_ABLATION.fullmatch(side) is not None for side in sides]
        if not any(are_rows):
            check_no_values(question.scale, question.set)
        left, right = (
            self.run_id(side, question.scale, question.set) if is_row else self.run_id(side)
            for side, is_row in zip(sides, are_rows, strict=True)
        )
        return store_difference(self.store, left, right)

    @_answer.register
    def _run(self, question: GetRun) -> RunDetail:
        """The details of a run, without unreadable files."""
        return runs.run_detail(self.store, self._files, self.run_id(question.run_id), with_curve=question.curve)

    def curve(self, run_id: str, metrics: Sequence[str] = (), points: int | None = None) -> list[dict[str, float]]:
        """The logged rows of a run, by step, with one of `metrics` (none: all), at most `points` (≥ 4) of them."""
        return run_rows(self._find_run(run_id)[1], metrics, points)

    def _find_run(self, text: str) -> tuple[RunRecord, RunFolder]:
        """The record and the folder of a run, named as in `run_id`. Raises NotFoundError, QueryError."""
        run_id = self.run_id(text)
        return runs.find_run(self.store, self._files, run_id)[0], self.store.run(run_id)

    @_answer.register
    def _curves_of_runs(self, question: CompareCurves) -> CurvesOfRuns:
        folders = [self._find_run(run_id)[1] for run_id in dict.fromkeys(map(self.run_id, question.run))]
        return curves_of_runs(folders, question.metric, question.points)

    @_answer.register
    def _log(self, question: GetLog) -> RunLog:
        """The end of a run's log; empty for a run that has not started."""
        return runs.run_log(self._find_run(question.run_id)[1], question.tail)

    def finished(self, run_id: str) -> RunFolder:
        """The folder of a finished run, with its checkpoint on this machine."""
        record, folder = self._find_run(run_id)
        if record.status != "finished":
            raise NotFinishedError(
                f"run {record.run_id} is {record.status}; choose a finished run: only these have a checkpoint",
                run_id=record.run_id,
                status=record.status,
            )
        folder.fetch_checkpoint(record.ended_ms)
        return folder

    # -- files -----------------------------------------------------------------------------------------------------

    def results(self, name: str, scale: str | None = None, sets: Sequence[str] = ()) -> Results:
        """The results of the plan that `load` returns, for tables, figures and reports.

        Raises NotFinishedError for a stale or damaged file in a folder of results.
        """
        plan = self.load(name, scale, sets)
        results = read_results(plan, self.store)
        if any(record.status == "finished" for record in results.records.values()):
            return results
        return replace(results, others=self.other_values(plan))

    def other_values(self, plan: Plan) -> str:
        """Which other values finished runs of the plan's ablation have, and how to choose them; empty if none have.

        `3 finished runs have other values: add --set train.steps=100`
        """
        scale, sets = plan.ablation.scale, tuple(variant_of(plan.ablation.assignments))
        others = [each for each in self.store.index.variants(plan.name) if (each.scale, each.sets) != (scale, sets)]
        others = [each for each in others if each.counts.get("finished")]
        others.sort(key=lambda variant: variant.scale != scale)  # stable: then the newest first
        texts = []
        for variant in others[:MAX_SHOWN_VARIANTS]:
            number = variant.counts["finished"]
            verb = "add" if scale in (None, variant.scale) else "take, instead of the scale,"
            option = self.files.written(None if variant.scale == scale else variant.scale, variant.sets)
            runs_have = "finished run has" if number == 1 else "finished runs have"
            texts.append(f"{number:,} {runs_have} other values: {verb} {option}")
        return "; ".join(texts)

    def table(self, question: GetTable) -> Table:
        """The table of an ablation; of a folder of results compared as its report is, unless the question says how."""
        results = self.results(question.name, question.scale, question.set)
        default = reference(results.plan) if results.store.read_only and not lists_runs(question) else None
        asked = question.model_copy(update={"compare": question.compare or default})
        check_options(asked)
        return Table(results, asked)

    @_answer.register
    def _table(self, question: GetTable) -> bytes:
        return table_file(self.table(question))

    @_answer.register
    def _verdict(self, question: GetVerdict) -> Verdict:
        results = self.results(question.name, question.scale, question.set)
        model = Table.of(results).model
        row, than = find_row(model, question.row), find_row(model, question.than)
        if row is than:
            raise QueryError(f"{row.row!r} is both rows; compare it with another one", code="same_row", row=row.row)
        return next(verdicts(results, compared_pair(results.plan, model, row, than), question.margin, row.row))

    @_answer.register
    def _figure(self, question: GetFigure) -> bytes:
        return self.figure(question)

    def figure(self, question: GetFigure, style: str | None = None) -> bytes:
        """The file of a figure.

        `style` is a style sheet of matplotlib, its name or a file. It is no part of the question: a service must not
        read a file that a client names.
        """
        results = self.results(question.name, question.scale, question.set)
        plan, file_format = results.plan, question.format or "svg"
        is_plain = not chosen_options(question) and not question.set and style is None
        if file_format == "svg" and is_plain and (kept := results.store.kept(plan)):
            saved_figure = kept.picture(question.figure)
            # A folder of results has no checkpoints, so its maps can only be shown as they were drawn.
            if saved_figure and (fits(saved_figure, question.size) or needs_checkpoint(plan, question.figure)):
                return saved_figure
        lines = drawn_lines(plan, question.figure, len(plan.rows))
        if self._max_rows is not None and lines > self._max_rows and file_format != "csv" and not question.row:
            raise FigureError(
                f"{plan.name} has {lines:,} rows, but an image shows at most {self._max_rows}; choose rows with `row`, "
                "or get the data with `format=csv`",
                code="too_many_rows",
                ablation=plan.name,
                rows=lines,
                limit=self._max_rows,
            )
        figure = draw_figure(results, question, style)
        if figure.empty and file_format != "csv":
            raise FigureError(
                f"nothing to draw: {plan.ablation.cli_args} has too few finished runs in {results.place}; train them "
                f"with: {results.training}",
                code="nothing_to_draw",
                ablation=plan.name,
            )
        return figure.render(file_format)

    @_answer.register
    def _report(self, question: GetReport) -> bytes:
        from cope_sweep.read.reports.evidence import report_file

        results = self.results(question.name, question.scale, question.set)
        url = partial(figure_path, results.plan, sets=question.set, format="svg") if self._links else None
        return report_file(results, question, url)

    def export(self, question: ExportRuns, file: IO[bytes]) -> None:
        """Write all matching runs, or their curves, to a file, a few at a time."""
        file.writelines(self.export_chunks(question))

    def export_chunks(self, question: ExportRuns) -> Iterator[bytes]:
        """The file of `export` in pieces, each made when it is asked for."""
        from cope_sweep.read.tables.export import run_chunks

        return run_chunks(self.store, self._run_query(question), question.format or "csv", curves=question.curves)

    @_answer.register
    def _export(self, question: ExportRuns) -> bytes:
        return b"".join(self.export_chunks(question))

    # -- sweeps --------------------------------------------------------------------------------------------------

    @_answer.register
    def _sweeps(self, question: ListSweeps) -> SweepPage:
        return self.store.index.sweep_page(ablation=question.ablation, limit=question.limit, offset=question.offset)

    def sweep_summary(self, sweep_id: str) -> SweepSummary:
        """The summary of a sweep from the index. Raises NotFoundError."""
        summary = self.store.index.sweep(sweep_id)
        if summary is None:
            raise no_sweep(self.store, sweep_id)
        return summary

    @_answer.register
    def _sweep(self, question: GetSweep) -> SweepDetail:
        """The details of a sweep; only the summary from the index if its record is unreadable."""
        sweep_id = question.sweep_id
        summary = self.sweep_summary(sweep_id)
        counts = self.store.index.sweep_counts([sweep_id]).get(sweep_id, {})
        fields = summary.model_dump() | {"counts": counts}
        try:
            record = self.store.sweep(sweep_id)
        except DamagedError as error:
            return SweepDetail(**fields, error=str(error))
        if record is None:
            return SweepDetail(**fields, error=redacted(f"{self.store.location}/sweeps has no file {sweep_id}.json"))
        # The record has the runs of a search when it ends, the index while it trains them.
        found = self.store.index.members(sweep_id)
        records = self.store.index.records((run["run_id"] for run in found), values=False)
        stops = self.store.index.stop_requested(sweep_id)
        waiting = Waiting(summary, records, record.leave_out, stops)
        training, members = waiting.training, []
        for run in found:
            current = records.get(run["run_id"]) or RunRecord(run_id=run["run_id"], steps=0)
            counted = {"status": waiting.status(current), "reason": waiting.reason(current, training)}
            members.append(SweepMember(**current.progress() | run | counted))
        more = record.model_dump(include=set(SweepDetail.model_fields) - set(fields) - {"members", "error"})
        return SweepDetail(**fields, **more, members=members, to_suggest=self._to_suggest(record))

    def _to_suggest(self, record: SweepRecord) -> int:
        """The number of rows that the search of a sweep has still to choose."""
        # A retry leaves out pending runs, and suggests no rows. A search may find fewer rows than it was to have.
        if record.status == "finished" or not record.data.get("search") or "pending" in record.leave_out:
            return 0
        try:
            ablation = self._recorded.of_record(record)
            plan = expand(with_overrides(ablation, scale=record.scale, assignments=record.sets))
            return recorded_plan(plan, self.store).open_samples
        except SpecError:  # a plugin is missing here
            return 0


def check_no_values(scale: str | None, sets: Sequence[str], hint: str = "leave it out beside an id") -> None:
    """Raise QueryError for the scale, or values of `--set`, of an ablation that a question does not name."""
    if scale is not None:
        raise QueryError(
            f"scale: {scale!r} is the scale of an ablation; {hint}", code="scale_of_no_ablation", scale=scale
        )
    if sets:
        raise QueryError(
            f"set: {', '.join(sets)} is for an ablation; {hint}", code="set_of_no_ablation", set=list(sets)
        )


def _variant_summary(variant: Variant) -> VariantSummary:
    counts = dict(variant.counts)
    finished, number = counts.get("finished", 0), sum(counts.values())
    return VariantSummary(
        scale=variant.scale, sets=list(variant.sets), runs=number, finished=finished, counts=counts,
        newest_ms=variant.newest_ms,
    )  # fmt: skip


def _has_own_runs(variant: Variant, ablation: LoadedAblation) -> bool:
    """Whether the ablation without `--set` lacks runs of the variant: it has those of other seeds only."""
    if any(not text.startswith("seeds=") for text in variant.sets):
        return True
    try:
        base = with_overrides(ablation, scale=variant.scale).content.row_seeds
        seeds = with_overrides(ablation, scale=variant.scale, assignments=variant.sets).content.row_seeds
    except SpecError:  # the file has no longer this scale
        return True
    return not set(seeds) <= set(base)
