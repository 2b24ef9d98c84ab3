"""The questions that a store answers: pydantic models, whose fields have defaults, limits and descriptions.

`GetTable` is the question of `GET /ablations/{name}/table`. Its base class `TableOptions` has the parameters of that
route; `GetTable` adds the name, which is part of the path.
"""

from __future__ import annotations

import re
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from cope_sweep.api import answers, descriptions
from cope_sweep.api.formats import FIGURE_SIZE, FigureFormat, ReportFormat, RunsFormat, TableFormat
from cope_sweep.records import RunPage, Status, SweepPage

A_co = TypeVar("A_co", covariant=True)

RUN_PREFIX = re.compile(r"[0-9a-f]{4,15}")
"""The first digits of a run's id."""
MAX_CURVE_ROWS = 1_000
"""Maximum number of rows whose curves are on one page."""
API = "/api/v1"
"""Prefix of the paths of all routes."""

AblationName = Annotated[str, Field(max_length=200, description="The name of an ablation.")]
ScaleName = Annotated[str | None, Field(max_length=100, description=descriptions.SCALE)]
DiffSide = Annotated[str, Field(max_length=700, description=descriptions.SIDE)]
RunIdOrPrefix = Annotated[
    str, Field(max_length=100, description="The id of a run, or its first digits: at least four, unique in the store.")
]
SweepId = Annotated[str, Field(description="The id of a sweep.")]
FigureName = Annotated[
    str,
    Field(
        max_length=100,
        description="A figure that the ablation declares, such as `maps-2`, or a kind of figure, such as `curves`; "
        "`GET …/figures` lists both.",
    ),
]
MaxPoints = Annotated[
    int | None,
    Field(ge=4, le=10_000, description="Maximum number of points per run; spikes are kept. Default: all points."),
]
UseCommitted = Annotated[bool, Field(description=descriptions.COMMITTED)]


class Options(BaseModel):
    """The parameters of a query. An unknown parameter is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Question(Options, Generic[A_co]):
    """A question to a store. Its answer has type `A_co`: a model of `answers`, or the bytes of a file."""


# -- ablations ---------------------------------------------------------------------------------------------------------


class ListAblations(Question[list[answers.AblationSummary]]):
    """All ablations, with the number of runs by status."""


class ScaleOptions(Options):
    scale: ScaleName = None


class GetAblation(ScaleOptions, Question[answers.AblationDetail]):
    """One ablation: its rows, runs and file."""

    name: AblationName


class GetPlan(ScaleOptions, Question[answers.PlanCost]):
    """Each run of an ablation in plan order: status, step, worker, message, parameters, estimated time and memory.

    Estimates are for the machine that answers the request.
    """

    name: AblationName


class CurvesOptions(Options):
    metric: Annotated[str | None, Field(max_length=200, description="Default: the primary metric of the ablation.")] = (
        None
    )
    scale: ScaleName = None
    offset: Annotated[
        int, Field(ge=0, le=2**31, description="Number of rows to skip: `next` of the previous page.")
    ] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_CURVE_ROWS, description="Maximum number of rows.")] = MAX_CURVE_ROWS


class GetCurves(CurvesOptions, Question[answers.CurvePage]):
    """Learning curves of a metric: every run of the rows, at most about 200 points each.

    A page also ends after 5,000 runs that have started. Curves come from the index, which running runs update every few
    seconds.
    """

    name: AblationName


class TableOptions(Options):
    format: Annotated[TableFormat | None, Field(description="Default: json.")] = None
    scale: ScaleName = None
    compare: Annotated[
        str | None,
        Field(
            max_length=500,
            description=descriptions.COMPARE,
        ),
    ] = None
    sort: Annotated[
        str | None,
        Field(max_length=200, description=descriptions.SORT_ROWS),
    ] = None
    runs: Annotated[bool, Field(description=descriptions.ONE_LINE_PER_RUN)] = False
    committed: UseCommitted = False
    stars: Annotated[bool, Field(description=f"latex: {descriptions.STARS}")] = False
    group: Annotated[
        str | None,
        Field(
            max_length=200,
            description=f"latex: {descriptions.GROUP}",
        ),
    ] = None
    caption: Annotated[str | None, Field(max_length=2000, description=f"latex: {descriptions.CAPTION}")] = None
    label: Annotated[str | None, Field(max_length=200, description=f"latex: {descriptions.LABEL}")] = None
    notes: Annotated[bool, Field(description=f"latex: {descriptions.NOTES}")] = True


class GetTable(TableOptions, Question[bytes]):
    """The result table: mean ± standard deviation over seeds, and the published numbers."""

    name: AblationName


class ReportOptions(Options):
    format: Annotated[ReportFormat | None, Field(description="Default: html.")] = None
    scale: ScaleName = None


class GetReport(ReportOptions, Question[bytes]):
    """The report on the finished runs: table with comparisons, figures, what is missing, and provenance."""

    name: AblationName


class GetMlflowPage(Question[answers.MlflowPage]):
    """The page of an ablation in MLflow, where its runs can have notes and tags."""

    name: AblationName


class ListClaims(Question[list[answers.ClaimResult]]):
    """The claims of ablations with their verdicts, in the order of the paper's tables and figures.

    Without `ablation`: the claims of all ablations, at each scale with finished runs.
    """

    ablation: Annotated[str | None, Field(max_length=200, description="Only the claims of this ablation.")] = None
    scale: ScaleName = None
    committed: UseCommitted = False


class ListFigures(ScaleOptions, Question[list[answers.FigureInfo]]):
    """The figures that the ablation's file declares, and the kinds of figures that every ablation has."""

    name: AblationName


class FigureOptions(Options):
    metric: Annotated[
        tuple[str, ...],
        Field(max_length=20, description=descriptions.METRICS),
    ] = ()
    x: Annotated[
        str | None,
        Field(
            max_length=200,
            description=descriptions.X,
        ),
    ] = None
    panels: Annotated[
        str | None,
        Field(max_length=200, description=descriptions.PANELS),
    ] = None
    row: Annotated[tuple[str, ...], Field(max_length=300, description=descriptions.ROWS)] = ()
    log: Annotated[bool | None, Field(description=descriptions.LOG)] = None
    size: Annotated[str | None, Field(max_length=20, pattern=FIGURE_SIZE, description=descriptions.SIZE)] = None
    scale: ScaleName = None
    committed: UseCommitted = False
    format: Annotated[FigureFormat | None, Field(description=f"{descriptions.FIGURE_CSV} Default: svg.")] = None


class GetFigure(FigureOptions, Question[bytes]):
    """A figure of the finished runs, or its data.

    `figure` is the name of a figure that the ablation's file declares, or a kind; a kind is drawn with these options.
    """

    name: AblationName
    figure: FigureName
    style: str | None = None
    """A style sheet of matplotlib: a file of this machine, so a service does not take it, or a name."""


# -- runs --------------------------------------------------------------------------------------------------------------


class RunFilter(Options):
    """Selection and order of runs."""

    filter: Annotated[
        tuple[str, ...],
        Field(
            max_length=20,
            description=descriptions.FILTER,
        ),
    ] = ()
    search: Annotated[
        str,
        Field(
            max_length=200,
            description=descriptions.SEARCH,
        ),
    ] = ""
    status: Annotated[tuple[Status, ...], Field(max_length=20, description=descriptions.STATUS)] = ()
    run: Annotated[
        tuple[str, ...] | None,
        Field(
            max_length=1000,
            description="Only these runs, in this order: ids or their first digits. May be repeated.",
        ),
    ] = None
    sweep: Annotated[str | None, Field(max_length=100, description=descriptions.SWEEP)] = None
    ablation: Annotated[str | None, Field(max_length=200, description=descriptions.ABLATION)] = None
    scale: ScaleName = None
    sort: Annotated[
        str,
        Field(description=descriptions.SORT_RUNS),
    ] = "run_id"
    descending: Annotated[bool, Field(description=descriptions.DESCENDING)] = False


class ListRuns(RunFilter, Question[RunPage]):
    """All runs that have been started, filtered and sorted; or the runs of an ablation.

    The runs of an ablation are in plan order and include pending runs. With `filter`, `sweep` or `sort`, pending runs
    are left out, because they have no values.
    """

    limit: Annotated[int, Field(ge=1, le=1000, description=descriptions.MAX_RUNS)] = 100
    offset: Annotated[int, Field(ge=0, le=2**31, description=descriptions.SKIPPED_RUNS)] = 0
    fields: Annotated[
        tuple[str, ...],
        Field(
            max_length=50,
            description="The fields of each run to show (`status,step,metrics`), and keys as in `filter` "
            "(`model.layers`), shown in `values`. May be repeated. Default: all fields.",
        ),
    ] = ()


class ExportRuns(RunFilter, Question[bytes]):
    """All matching runs that have started, with all their values, one line per run; or their learning curves.

    A line has the configuration by dotted keys, seed, sweeps, metrics, and facts such as versions and durations.
    """

    format: Annotated[RunsFormat | None, Field(description="The format of the file. Default: csv.")] = None
    curves: Annotated[bool, Field(description=descriptions.CURVES)] = False


class RunOptions(Options):
    curve: Annotated[bool, Field(description="Whether to include the logged rows.")] = True


class GetRun(RunOptions, Question[answers.RunDetail]):
    """One run: configuration, state, attempts, metrics, facts, logged rows, and why it failed."""

    run_id: RunIdOrPrefix


class LogOptions(Options):
    tail: Annotated[int, Field(ge=0, le=10_000, description="Number of lines from the end.")] = 200


class GetLog(LogOptions, Question[answers.RunLog]):
    """The end of a run's log, of its last MiB: its attempts, evaluations, and errors with their tracebacks."""

    run_id: RunIdOrPrefix


class GetDiff(Question[answers.RunsDiff]):
    """Differences between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test."""

    left: DiffSide
    right: DiffSide


class CompareCurves(Question[answers.CurvesOfRuns]):
    """A metric of several runs, by step and by seconds since each run started.

    A run with an unreadable curve has no points.
    """

    run: Annotated[
        tuple[str, ...], Field(min_length=1, max_length=100, description="The id of a run. May be repeated.")
    ]
    metric: Annotated[str, Field(max_length=200, description="A metric that the runs have logged: `train/loss`.")]
    points: MaxPoints = None


# -- sweeps ------------------------------------------------------------------------------------------------------------


class ListSweeps(Question[SweepPage]):
    """The sweeps of the store, newest first, with the current number of their runs by status."""

    ablation: Annotated[str | None, Field(max_length=200, description="Only the sweeps of this ablation.")] = None
    limit: Annotated[int, Field(ge=1, le=1000, description="Maximum number of sweeps.")] = 100
    offset: Annotated[int, Field(ge=0, le=2**31, description="Number of sweeps to skip.")] = 0


class GetSweep(Question[answers.SweepDetail]):
    """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""

    sweep_id: SweepId
