"""The questions. Each names its route, its answer, and its parameters with their defaults, limits and descriptions.

They are dataclasses with the constraints of `annotated_types` in place of pydantic's models: the command line makes its
options from them, and importing pydantic would add half to the time of `cope-sweep --help`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

from annotated_types import Interval, Len, MaxLen
from typing_extensions import Doc

from cope_sweep.store import Status

if TYPE_CHECKING:  # the types of answers are given by name
    from cope_sweep.api import answers  # noqa: F401

A_co = TypeVar("A_co", covariant=True)

RUN_PREFIX = re.compile(r"[0-9a-f]{4,15}")
"""The first digits of a run's id."""
MAX_CURVE_ROWS = 1_000
"""Rows of an ablation whose curves are on one page."""
API = "/api/v1"
"""Begins the routes of a service."""
FigureFormat = Literal["png", "svg", "pdf", "csv"]
RunsFormat = Literal["parquet", "csv", "json"]
Band = Literal["auto", "interval", "range"]


@dataclass(frozen=True)
class Parameter:
    """A field of a question."""

    name: str
    kind: Any
    """Its type, with the constraints."""
    default: Any
    """`dataclasses.MISSING`: it has to be given."""
    description: str
    in_path: bool
    """Whether it is a part of the route's path."""


@dataclass(frozen=True)
class Question(Generic[A_co]):
    """A question to a store or a service, with an answer of type `A_co`, a model of `answers`."""

    path: ClassVar[str]
    """The route below `API`, with fields in braces. The other fields are parameters of the query."""

    def __init_subclass__(cls, path: str) -> None:
        super().__init_subclass__()
        cls.path = path

    def __post_init__(self) -> None:
        """Lists, as requests and command lines have them, are kept as tuples of texts: questions can be compared."""
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(map(str, value)))

    @classmethod
    @cache
    def parameters(cls) -> tuple[Parameter, ...]:
        """The fields, in order."""
        hints = get_type_hints(cls, include_extras=True)
        in_path = re.findall(r"{(\w+)}", cls.path)
        found = []
        for field in fields(cls):
            kind, *notes = get_args(hints[field.name])
            (description,) = [note.documentation for note in notes if isinstance(note, Doc)]
            constraints = [note for note in notes if not isinstance(note, Doc)]
            kind = Annotated[kind, *constraints] if constraints else kind
            found.append(Parameter(field.name, kind, field.default, description, field.name in in_path))
        return tuple(found)

    @classmethod
    @cache
    def answer_type(cls) -> Any:
        """The type of the answer: a pydantic model, a list of them, or the bytes of a file."""
        from cope_sweep.api import answers

        base = cls.__orig_bases__[-1]  # type: ignore[attr-defined]
        holder = type("Holder", (), {"__annotations__": {"answer": get_args(base)[0]}})
        return get_type_hints(holder, {"answers": answers})["answer"]

    def given(self) -> dict[str, Any]:
        """The parameters of the query that differ from their defaults, and are not None."""
        own = [(each, getattr(self, each.name)) for each in self.parameters() if not each.in_path]
        return {each.name: value for each, value in own if value not in (None, each.default)}


Name = Annotated[str, MaxLen(200), Doc("The name of an ablation.")]
Scale = Annotated[str | None, MaxLen(100), Doc("A named size of the ablation: one of its scales.")]
Side = Annotated[str, MaxLen(100), Doc("The id of a run or sweep.")]
RunId = Annotated[str, MaxLen(100), Doc("The id of a run, or its first digits: four or more that no other run has.")]
Points = Annotated[
    int | None, Interval(ge=4, le=10_000), Doc("At most so many points of a run; spikes stay. Default: all.")
]

Committed = Annotated[
    bool, Doc("The results that are kept with the ablation files, in their folder `results`, not those of the store.")
]


@dataclass(frozen=True)
class ListAblations(Question["list[answers.AblationSummary]"], path="/ablations"):
    """All ablations, with the number of runs by status."""


@dataclass(frozen=True)
class GetAblation(Question["answers.AblationDetail"], path="/ablations/{name}"):
    """One ablation: its rows, runs and file."""

    name: Name
    scale: Scale = None


@dataclass(frozen=True)
class GetPlan(Question["answers.PlanCost"], path="/ablations/{name}/plan"):
    """Each run of an ablation in plan order: status, step, worker, message, parameters, estimated time and memory.

    Estimates are for the machine that answers.
    """

    name: Name
    scale: Scale = None


@dataclass(frozen=True)
class GetCurves(Question["answers.Curves"], path="/ablations/{name}/curves"):
    """Learning curves of a metric: every run of the rows, at most about 200 points each.

    A page also ends where it has 5,000 runs that were begun. Curves are as new as the index, which running runs update
    every few seconds.
    """

    name: Name
    metric: Annotated[str | None, MaxLen(200), Doc("Default: the primary metric of the ablation.")] = None
    scale: Scale = None
    offset: Annotated[int, Interval(ge=0, le=2**31), Doc("Number of rows to skip: `next` of the page before.")] = 0
    limit: Annotated[int, Interval(ge=1, le=MAX_CURVE_ROWS), Doc("Maximum number of rows.")] = MAX_CURVE_ROWS


@dataclass(frozen=True)
class GetTable(Question[bytes], path="/ablations/{name}/table"):
    """The result table: mean ± standard deviation over seeds, and the published numbers."""

    name: Name
    format: Annotated[
        str | None,
        MaxLen(100),
        Doc(
            "json, csv, markdown, latex, latex_stars, html, parquet, terminal, or one of an installed package. "
            "Default: json."
        ),
    ] = None
    scale: Scale = None
    compare: Annotated[
        str | None,
        MaxLen(500),
        Doc(
            "Compare the rows with one of them by its name, or with the published numbers: `paper`; or, as in "
            "`model.position=CoPE`, each row with the one that has this label and the same other labels. The rule is "
            "below the table."
        ),
    ] = None
    runs: Annotated[bool, Doc("One line for each run instead of each row (csv, parquet).")] = False
    committed: Committed = False


@dataclass(frozen=True)
class GetReport(Question[bytes], path="/ablations/{name}/report"):
    """The report on the finished runs: table with comparisons, figures, what is missing, and what made the runs."""

    name: Name
    format: Annotated[Literal["html", "markdown"] | None, Doc("Default: html.")] = None
    scale: Scale = None


@dataclass(frozen=True)
class ListFigures(Question["list[answers.FigureInfo]"], path="/ablations/{name}/figures"):
    """The figures of an ablation: those that its file declares, and those that any ablation has."""

    name: Name
    scale: Scale = None


@dataclass(frozen=True)
class GetFigure(Question[bytes], path="/ablations/{name}/figures/{figure}"):
    """A figure of the finished runs, or its data.

    An ablation has the figures that its file declares, and each kind with the options that are given here.
    """

    name: Name
    figure: Annotated[
        str, MaxLen(100), Doc("The name of a declared figure, as `curves` or `maps-2`, or a kind: see the list.")
    ]
    metric: Annotated[Sequence[str], MaxLen(20), Doc("A metric. May be repeated. Default: those of the table.")] = ()
    x: Annotated[
        str | None,
        MaxLen(200),
        Doc(
            "curves, convergence: `step` or `time`. values: an axis, another key of a run, or a fact "
            "(`facts.parameters`). Default: the first axis with numbers."
        ),
    ] = None
    panels: Annotated[
        str | None, MaxLen(200), Doc("values, contexts, budget, heatmap: an axis; a panel for each value.")
    ] = None
    row: Annotated[Sequence[str], MaxLen(300), Doc("A row. May be repeated. Default: all.")] = ()
    band: Annotated[
        Band,
        Doc(
            "interval: 95 % interval of the mean. range: least and greatest value. auto: the range if a row has two "
            "seeds, else the interval."
        ),
    ] = "auto"
    log: Annotated[bool | None, Doc("Whether the metrics' axis is logarithmic. Default: as the data ask for.")] = None
    log_x: Annotated[bool | None, Doc("Whether the other axis is logarithmic. Default: as the data ask for.")] = None
    title: Annotated[str, MaxLen(200), Doc("Above the figure. Default: the ablation's title.")] = ""
    scale: Scale = None
    committed: Committed = False
    format: Annotated[FigureFormat | None, Doc("csv: the data that is drawn. Default: svg.")] = None


@dataclass(frozen=True)
class RunFilter:
    """Selection and order of runs."""

    filter: Annotated[
        Sequence[str],
        MaxLen(20),
        Doc(
            "A condition that has to hold: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`, "
            "`facts.device=cuda`, `tags.row=CoPE` (also `tags.sweep`, `tags.ablation`, and the label of an axis). A "
            "run that lacks the key does not match. May be repeated."
        ),
    ] = ()
    search: Annotated[
        str,
        MaxLen(200),
        Doc(
            "Words that have to be found, each at the start of the run's id, or in its message, or in the row, the "
            "ablation or its title, in a sweep of the run. Small and capital letters are alike."
        ),
    ] = ""
    status: Annotated[Sequence[Status], MaxLen(20), Doc("Only runs with this status. May be repeated.")] = ()
    run: Annotated[
        Sequence[str] | None, MaxLen(1000), Doc("Only these runs, by their ids, in this order. May be repeated.")
    ] = None
    sweep: Annotated[str | None, MaxLen(100), Doc("Only the runs of this sweep.")] = None
    ablation: Annotated[str | None, MaxLen(200), Doc("Only the runs of this ablation, in plan order.")] = None
    scale: Scale = None
    sort: Annotated[
        str, Doc("A key as in `filter`, or run_id, status, seed, step, created_ms. Runs without it come last.")
    ] = "run_id"
    descending: Annotated[bool, Doc("The greatest first.")] = False


@dataclass(frozen=True)
class ListRuns(RunFilter, Question["answers.RunPage"], path="/runs"):
    """All runs that have been started, filtered and sorted; or the runs of an ablation.

    Those of an ablation are in the order of its plan, with pending ones. A filter, a sweep or an order leaves out
    pending runs, which have no values.
    """

    limit: Annotated[int, Interval(ge=1, le=1000), Doc("Maximum number of runs.")] = 100
    offset: Annotated[int, Interval(ge=0, le=2**31), Doc("Number of runs to skip.")] = 0
    cursor: Annotated[
        str | None, MaxLen(2000), Doc("`next` of the page before. Pages stay exact while runs arrive and end.")
    ] = None
    fields: Annotated[
        Sequence[str],
        MaxLen(50),
        Doc(
            "What is shown of each run, as names of its fields (`status,step,metrics`) and keys as in `filter` "
            "(`model.layers`), whose values are in `values`. May be repeated. Default: all fields."
        ),
    ] = ()


@dataclass(frozen=True)
class ListPlannedRuns(ListRuns, path="/ablations/{ablation}/runs"):
    """The runs of an ablation in plan order, including pending ones; with a filter or order, those that were begun."""


@dataclass(frozen=True)
class ExportRuns(RunFilter, Question[bytes], path="/runs/export"):
    """All matching runs that have been started, a line for each, with all their values; or their learning curves.

    A line has the configuration by dotted keys, seed, sweeps, metrics, and facts such as versions and durations.
    """

    format: Annotated[RunsFormat | None, Doc("The format of the file. Default: csv.")] = None
    curves: Annotated[bool, Doc("The learning curves instead: one line for each logged value of a run.")] = False


@dataclass(frozen=True)
class GetRun(Question["answers.RunDetail"], path="/runs/{run_id}"):
    """One run: configuration, state, attempts, metrics, facts and logged rows; why it failed."""

    run_id: RunId
    curve: Annotated[bool, Doc("Whether to include the logged rows.")] = True


@dataclass(frozen=True)
class GetLog(Question["answers.RunLog"], path="/runs/{run_id}/logs"):
    """The end of a run's log, of its last MiB: its attempts, evaluations, and errors with their tracebacks."""

    run_id: RunId
    tail: Annotated[int, Interval(ge=0, le=10_000), Doc("Number of lines from the end.")] = 200


@dataclass(frozen=True)
class GetDiff(Question["answers.RunsDiff"], path="/diff"):
    """Differences between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test."""

    left: Side
    right: Side


@dataclass(frozen=True)
class CompareCurves(Question["answers.CurvesOfRuns"], path="/curves"):
    """A metric of several runs, by step and by seconds since each run began.

    A run whose curve cannot be read has no points.
    """

    run: Annotated[Sequence[str], Len(1, 100), Doc("The id of a run. May be repeated.")]
    metric: Annotated[str, MaxLen(200), Doc("A metric that the runs have logged: `train/loss`.")]
    points: Points = None


@dataclass(frozen=True)
class ListSweeps(Question["answers.SweepPage"], path="/sweeps"):
    """The sweeps of the store, newest first, with the present number of their runs by status."""

    ablation: Annotated[str | None, MaxLen(200), Doc("Only the sweeps of this ablation.")] = None
    limit: Annotated[int, Interval(ge=1, le=1000), Doc("Maximum number of sweeps.")] = 100
    offset: Annotated[int, Interval(ge=0, le=2**31), Doc("Number of sweeps to skip.")] = 0


@dataclass(frozen=True)
class GetSweep(Question["answers.SweepDetail"], path="/sweeps/{sweep_id}"):
    """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""

    sweep_id: Annotated[str, Doc("The id of a sweep.")]
