"""The questions that a store answers: pydantic models, whose fields have defaults, limits and descriptions.

The fields of a question that are no part of its path are the parameters of its route: `TableOptions` are those of
`GET /ablations/{name}/table`, and `GetTable` adds the name.
"""

from __future__ import annotations

import re
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from cope_sweep.api import answers
from cope_sweep.api.formats import Band, FigureFormat, ReportFormat, RunsFormat, TableFormat
from cope_sweep.records import RunPage, Status, SweepPage

A_co = TypeVar("A_co", covariant=True)

RUN_PREFIX = re.compile(r"[0-9a-f]{4,15}")
"""The first digits of a run's id."""
MAX_CURVE_ROWS = 1_000
"""Rows of an ablation whose curves are on one page."""
API = "/api/v1"
"""The path below which a service has its routes."""

Name = Annotated[str, Field(max_length=200, description="The name of an ablation.")]
Scale = Annotated[str | None, Field(max_length=100, description="A named size of the ablation: one of its scales.")]
Side = Annotated[
    str,
    Field(
        max_length=700,
        description="The id of a run or sweep; or `ABLATION/ROW`: the row's best finished run.",
    ),
]
RunId = Annotated[
    str, Field(max_length=100, description="The id of a run, or its first digits: four or more that no other run has.")
]
SweepId = Annotated[str, Field(description="The id of a sweep.")]
FigureName = Annotated[
    str,
    Field(
        max_length=100, description="The name of a declared figure, as `curves` or `maps-2`, or a kind: see the list."
    ),
]
Points = Annotated[
    int | None,
    Field(ge=4, le=10_000, description="At most so many points of a run; spikes stay. Default: all."),
]
Committed = Annotated[
    bool,
    Field(
        description="The results that are kept with the ablation files, in their folder `results`, not those of the "
        "store."
    ),
]


class Options(BaseModel):
    """The parameters of a query. An unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Question(Options, Generic[A_co]):
    """A question to a store, whose answer is of type `A_co`: a model of `answers`, or a file."""


# -- ablations ---------------------------------------------------------------------------------------------------------


class ListAblations(Question[list[answers.AblationSummary]]):
    """All ablations, with the number of runs by status."""


class ScaleOptions(Options):
    scale: Scale = None


class GetAblation(ScaleOptions, Question[answers.AblationDetail]):
    """One ablation: its rows, runs and file."""

    name: Name


class GetPlan(ScaleOptions, Question[answers.PlanCost]):
    """Each run of an ablation in plan order: status, step, worker, message, parameters, estimated time and memory.

    Estimates are for the machine that answers.
    """

    name: Name


class CurvesOptions(Options):
    metric: Annotated[str | None, Field(max_length=200, description="Default: the primary metric of the ablation.")] = (
        None
    )
    scale: Scale = None
    offset: Annotated[int, Field(ge=0, le=2**31, description="Number of rows to skip: `next` of the page before.")] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_CURVE_ROWS, description="Maximum number of rows.")] = MAX_CURVE_ROWS


class GetCurves(CurvesOptions, Question[answers.Curves]):
    """Learning curves of a metric: every run of the rows, at most about 200 points each.

    A page also ends where it has 5,000 runs that were begun. Curves are as new as the index, which running runs update
    every few seconds.
    """

    name: Name


class TableOptions(Options):
    format: Annotated[TableFormat | None, Field(description="Default: json.")] = None
    scale: Scale = None
    compare: Annotated[
        str | None,
        Field(
            max_length=500,
            description="Compare the rows with one of them, named by its labels as in `RoPE, layers 2`; or with the "
            "published numbers: `paper`; or, as in `model.position=CoPE`, each row with the one that has this label "
            "and the same other labels. The rule is below the table.",
        ),
    ] = None
    sort: Annotated[
        str | None,
        Field(max_length=200, description="Order the rows by a metric, best first, by an axis, or by `parameters`."),
    ] = None
    runs: Annotated[bool, Field(description="One line for each run instead of each row (csv, parquet).")] = False
    committed: Committed = False
    stars: Annotated[
        bool, Field(description="latex: mark significant differences by stars instead of a table of comparisons.")
    ] = False
    group: Annotated[
        str | None,
        Field(
            max_length=200,
            description="latex: an axis; rows with the same label are together, and the best of each group is bold. "
            "Default: the first axis.",
        ),
    ] = None
    caption: Annotated[
        str | None, Field(max_length=2000, description="latex: the caption, as LaTeX code. Default: the title.")
    ] = None
    label: Annotated[str | None, Field(max_length=200, description="latex: the label. Default: tab:NAME.")] = None
    notes: Annotated[bool, Field(description="latex: whether the notes are below the table.")] = True


class GetTable(TableOptions, Question[bytes]):
    """The result table: mean ± standard deviation over seeds, and the published numbers."""

    name: Name


class ReportOptions(Options):
    format: Annotated[ReportFormat | None, Field(description="Default: html.")] = None
    scale: Scale = None


class GetReport(ReportOptions, Question[bytes]):
    """The report on the finished runs: table with comparisons, figures, what is missing, and what made the runs."""

    name: Name


class GetMlflowPage(Question[answers.MlflowPage]):
    """The page of an ablation in MLflow, where its runs can have notes and tags."""

    name: Name


class ListClaims(Question[list[answers.ClaimResult]]):
    """The claims of ablations with their verdicts, in the order of the paper's tables and figures.

    Without an ablation: those of all ablations, at each scale with finished runs.
    """

    ablation: Annotated[str | None, Field(max_length=200, description="Only the claims of this ablation.")] = None
    scale: Scale = None
    committed: Committed = False


class ListFigures(ScaleOptions, Question[list[answers.FigureInfo]]):
    """The figures of an ablation: those that its file declares, and those that any ablation has."""

    name: Name


class FigureOptions(Options):
    metric: Annotated[
        tuple[str, ...],
        Field(max_length=20, description="A metric. May be repeated. Default: those of the table."),
    ] = ()
    x: Annotated[
        str | None,
        Field(
            max_length=200,
            description="curves, convergence: `step` or `time`. values: an axis, another key of a run, or a fact "
            "(`facts.parameters`). slice: an axis. Default: the first axis with numbers; slice: all axes.",
        ),
    ] = None
    panels: Annotated[
        str | None,
        Field(max_length=200, description="values, contexts, budget, heatmap: an axis; a panel for each value."),
    ] = None
    row: Annotated[tuple[str, ...], Field(max_length=300, description="A row. May be repeated. Default: all.")] = ()
    band: Annotated[
        Band,
        Field(
            description="interval: 95 % interval of the mean. range: least and greatest value. auto: the range if a "
            "row has two seeds, else the interval."
        ),
    ] = "auto"
    log: Annotated[
        bool | None, Field(description="Whether the metrics' axis is logarithmic. Default: as the data ask for.")
    ] = None
    log_x: Annotated[
        bool | None, Field(description="Whether the other axis is logarithmic. Default: as the data ask for.")
    ] = None
    title: Annotated[str, Field(max_length=200, description="Above the figure. Default: the ablation's title.")] = ""
    width: Annotated[float | None, Field(ge=1, le=40, description="Inches. Default: as the panels need.")] = None
    height: Annotated[float | None, Field(ge=1, le=40, description="Inches. Default: as the panels need.")] = None
    font_size: Annotated[float | None, Field(ge=4, le=24, description="Points. Default: 8.")] = None
    scale: Scale = None
    committed: Committed = False
    format: Annotated[FigureFormat | None, Field(description="csv: the data that is drawn. Default: svg.")] = None


class GetFigure(FigureOptions, Question[bytes]):
    """A figure of the finished runs, or its data.

    An ablation has the figures that its file declares, and each kind with the options that are given here.
    """

    name: Name
    figure: FigureName


# -- runs --------------------------------------------------------------------------------------------------------------


class RunFilter(Options):
    """Selection and order of runs."""

    filter: Annotated[
        tuple[str, ...],
        Field(
            max_length=20,
            description="A condition that has to hold: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`, "
            "`facts.device=cuda`, `tags.row=CoPE` (also `tags.sweep`, `tags.ablation`, and the label of an axis). A "
            "run that lacks the key does not match. May be repeated.",
        ),
    ] = ()
    search: Annotated[
        str,
        Field(
            max_length=200,
            description="Words that have to be found, each at the start of the run's id, or in its message, or in the "
            "row, the ablation or its title, in a sweep of the run. Small and capital letters are alike.",
        ),
    ] = ""
    status: Annotated[
        tuple[Status, ...], Field(max_length=20, description="Only runs with this status. May be repeated.")
    ] = ()
    run: Annotated[
        tuple[str, ...] | None,
        Field(
            max_length=1000,
            description="Only these runs, by ids or first digits, in this order. May be repeated.",
        ),
    ] = None
    sweep: Annotated[str | None, Field(max_length=100, description="Only the runs of this sweep.")] = None
    ablation: Annotated[
        str | None, Field(max_length=200, description="Only the runs of this ablation, in plan order.")
    ] = None
    scale: Scale = None
    sort: Annotated[
        str,
        Field(
            description="A key as in `filter`, or run_id, status, seed, step, created_ms. Runs without it come last."
        ),
    ] = "run_id"
    descending: Annotated[bool, Field(description="The greatest first.")] = False


class ListRuns(RunFilter, Question[RunPage]):
    """All runs that have been started, filtered and sorted; or the runs of an ablation.

    Those of an ablation are in the order of its plan, with pending ones. A filter, a sweep or an order leaves out
    pending runs, which have no values.
    """

    limit: Annotated[int, Field(ge=1, le=1000, description="Maximum number of runs.")] = 100
    offset: Annotated[int, Field(ge=0, le=2**31, description="Number of runs to skip.")] = 0
    cursor: Annotated[
        str | None,
        Field(max_length=2000, description="`next` of the page before. Pages stay exact while runs arrive and end."),
    ] = None
    fields: Annotated[
        tuple[str, ...],
        Field(
            max_length=50,
            description="What is shown of each run, as names of its fields (`status,step,metrics`) and keys as in "
            "`filter` (`model.layers`), whose values are in `values`. May be repeated. Default: all fields.",
        ),
    ] = ()


class ExportRuns(RunFilter, Question[bytes]):
    """All matching runs that have been started, a line for each, with all their values; or their learning curves.

    A line has the configuration by dotted keys, seed, sweeps, metrics, and facts such as versions and durations.
    """

    format: Annotated[RunsFormat | None, Field(description="The format of the file. Default: csv.")] = None
    curves: Annotated[
        bool, Field(description="The learning curves instead: one line for each logged value of a run.")
    ] = False


class RunOptions(Options):
    curve: Annotated[bool, Field(description="Whether to include the logged rows.")] = True


class GetRun(RunOptions, Question[answers.RunDetail]):
    """One run: configuration, state, attempts, metrics, facts and logged rows; why it failed."""

    run_id: RunId


class LogOptions(Options):
    tail: Annotated[int, Field(ge=0, le=10_000, description="Number of lines from the end.")] = 200


class GetLog(LogOptions, Question[answers.RunLog]):
    """The end of a run's log, of its last MiB: its attempts, evaluations, and errors with their tracebacks."""

    run_id: RunId


class GetDiff(Question[answers.RunsDiff]):
    """Differences between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test."""

    left: Side
    right: Side


class CompareCurves(Question[answers.CurvesOfRuns]):
    """A metric of several runs, by step and by seconds since each run began.

    A run whose curve cannot be read has no points.
    """

    run: Annotated[
        tuple[str, ...], Field(min_length=1, max_length=100, description="The id of a run. May be repeated.")
    ]
    metric: Annotated[str, Field(max_length=200, description="A metric that the runs have logged: `train/loss`.")]
    points: Points = None


# -- sweeps ------------------------------------------------------------------------------------------------------------


class ListSweeps(Question[SweepPage]):
    """The sweeps of the store, newest first, with the present number of their runs by status."""

    ablation: Annotated[str | None, Field(max_length=200, description="Only the sweeps of this ablation.")] = None
    limit: Annotated[int, Field(ge=1, le=1000, description="Maximum number of sweeps.")] = 100
    offset: Annotated[int, Field(ge=0, le=2**31, description="Number of sweeps to skip.")] = 0


class GetSweep(Question[answers.SweepDetail]):
    """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""

    sweep_id: SweepId
