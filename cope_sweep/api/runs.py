"""Questions about runs: pages and exports of many, all about one, and differences."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, Field

from cope_sweep.api.question import Answer, Question, RunIdOrPrefix, Scale, Sets, option
from cope_sweep.records import RunPage, RunRecord, Status, Value

RUN_PREFIX = re.compile(r"[0-9a-f]{4,15}")
"""The first digits of a run's id."""

# -- many runs ---------------------------------------------------------------------------------------------------------

RunsFormat = Literal["parquet", "csv", "json"]

Filters = Annotated[
    list[str],
    *option(
        "Only runs that meet this condition: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`, "
        "`facts.device=cuda`, `tags.row=CoPE` (also `tags.sweep`, `tags.ablation`, and the label of an axis). A run "
        "that lacks the key does not match. May be repeated.",
        "--filter",
        metavar="KEY>=VALUE",
        max_length=20,
    ),
]
Search = Annotated[
    str,
    *option(
        "Only runs that contain all of these words: at the start of the id; or in the message, the row, the ablation "
        "or its title. Case does not matter.",
        max_length=200,
    ),
]
STATUS = option("Only runs with this status. May be repeated.", max_length=20)
"""Without the type of its values: Typer reads no list of a Literal, so the command has an enumeration instead."""
OfSweep = Annotated[str | None, *option("Only the runs of this sweep.", metavar="SWEEP", max_length=100)]
OfAblation = Annotated[str | None, *option("Only the runs of this ablation, in plan order.", max_length=200)]
SortRuns = Annotated[
    str | None,
    *option(
        "A key as in `filter`, or run_id, status, seed, step, created_ms. Runs without it come last. Default: run_id, "
        "or the order of the ablation's plan.",
        metavar="KEY",
    ),
]
Descending = Annotated[
    bool, *option("Largest value first; without a key to sort by, the reverse order.", "--descending")
]
Limit = Annotated[int, *option("Maximum number of runs.", ge=1, le=1000)]
Offset = Annotated[int, *option("Number of runs to skip.", ge=0, le=2**31)]
LoggedValues = Annotated[
    bool, *option("The learning curves instead: one line for each logged value of a run.", "--curves")
]


class RunFilter(BaseModel):
    """Selection and order of runs."""

    filter: Filters = []
    search: Search = ""
    status: Annotated[list[Status], *STATUS] = []
    run: Annotated[
        list[str] | None,
        Field(
            max_length=1000,
            description="Only these runs, in this order: ids or their first digits. May be repeated.",
        ),
    ] = None
    sweep: OfSweep = None
    ablation: OfAblation = None
    scale: Scale = None
    set: Sets = []
    sort: SortRuns = None
    descending: Descending = False


class ListRuns(RunFilter, Question[RunPage]):
    """All runs that have been started, filtered and sorted; or the runs of an ablation, or with some ids.

    The runs of an ablation include pending runs, and so do those of `run`. With `filter`, `search`, `sweep` or `sort`,
    pending runs are left out, because they have no values.
    """

    PATH = "/runs"
    WORK = "answers"

    limit: Limit = 100
    offset: Offset = 0
    fields: Annotated[
        list[str],
        Field(
            max_length=50,
            description="The fields of each run to show (`status,step,metrics`), and keys as in `filter` "
            "(`model.layers`), shown in `values`. May be repeated. Default: all fields.",
        ),
    ] = []


class ExportRuns(RunFilter, Question[bytes]):
    """All matching runs that have started, with all their values, one line per run; or their learning curves.

    A line has the configuration by dotted keys, seed, sweeps, metrics, and facts such as versions and durations.
    """

    PATH = "/runs/export"
    MEDIA_TYPES = {"csv": "text/csv", "parquet": "application/vnd.apache.parquet", "json": "application/json"}
    FROM_INDEX = False  # an export may have gigabytes, which nothing keeps

    format: Annotated[RunsFormat | None, Field(description="The format of the file. Default: csv.")] = None
    curves: LoggedValues = False


TriedValues = Annotated[
    str,
    Field(
        min_length=1,
        max_length=500,
        description="A key and its values: `model.position=cope,rope`, `train.lr=1e-3,3e-3`; a key alone: all values.",
    ),
]
TriedFilters = Annotated[
    list[str],
    *option(
        "Only runs that meet this condition, as in `cope-sweep runs`: `task.kind=flip_flop`. May be repeated.",
        "--filter",
        metavar="KEY>=VALUE",
        max_length=20,
    ),
]
TriedMetric = Annotated[
    str | None, *option("The metric to show. Default: the one that most of the runs have.", "--metric", max_length=200)
]


class TriedValue(Answer):
    """The runs of a group that have one value of the key."""

    value: str
    n: int = Field(description="Finished runs with the metric.")
    mean: float | None
    std: float | None = Field(description="Of at least two runs.")
    text: str = Field(description="`3.40 ± 0.21 (8)`: with n in parentheses.")
    unfinished: int = Field(description="Runs that have started and are not finished.")
    run_ids: list[str] = Field(description="The first 20 of the runs.")


class TriedGroup(Answer):
    """Runs with the same settings, except the key that was asked about and the seed."""

    settings: dict[str, str] = Field(description="Those in which the groups of the answer differ.")
    ablations: list[str] = Field(description="The ablations whose sweeps have contained its runs.")
    values: list[TriedValue]


class Tried(Answer):
    """What a store has of some values of a key, in all of its ablations."""

    key: str
    metric: str | None = Field(description="null: no run has a metric.")
    metrics: list[str] = Field(description="The metrics that the runs have.")
    runs: int = Field(description="The number of runs.")
    values: list[str] = Field(description="The values that the runs have.")
    same: dict[str, str] = Field(description="The settings that all runs share.")
    groups: list[TriedGroup] = Field(description="Those with the most values and runs first.")
    total: int = Field(description="Groups, on all pages.")
    next: int | None = Field(default=None, description="The `offset` of the next page; null on the last one.")


class ListTried(Question[Tried]):
    """What did we already try? All runs with some values of a key, in whichever ablation.

    Runs are grouped by the settings that differ otherwise, so that the values within a group can be compared: mean,
    standard deviation and number of seeds. It is an overview and no test: the seeds of two values may be of different
    sweeps, and nobody has said before what would be compared. `verdict` answers whether a row is better.
    """

    PATH = "/tried"
    COMMITTED = True

    values: TriedValues
    filter: TriedFilters = []
    metric: TriedMetric = None
    offset: Annotated[int, Field(ge=0, le=2**31, description="Number of groups to skip.")] = 0
    limit: Annotated[int, *option("Maximum number of groups.", ge=1, le=1000)] = 50


class RunCurve(Answer):
    """A metric of one run."""

    run_id: str
    points: list[tuple[int, float | None, float | None]] = Field(
        description="(step, seconds since the run started, value); seconds are null for old runs."
    )


class CurvesOfRuns(Answer):
    """A metric of several runs, in the order of the request."""

    metric: str
    series: list[RunCurve]


MaxPoints = Annotated[
    int | None,
    Field(ge=4, le=10_000, description="Maximum number of points per run; spikes are kept. Default: all points."),
]


class CompareCurves(Question[CurvesOfRuns]):
    """A metric of several runs, by step and by seconds since each run started.

    A run with an unreadable curve has no points.
    """

    PATH = "/curves"
    FROM_INDEX = False  # reads the files of runs

    run: Annotated[list[str], Field(min_length=1, max_length=100, description="The id of a run. May be repeated.")]
    metric: Annotated[str, Field(max_length=200, description="A metric that the runs have logged: `train/loss`.")]
    points: MaxPoints = None


# -- one run -----------------------------------------------------------------------------------------------------------


class Failure(Answer):
    """The error of a run's last attempt."""

    message: str
    traceback: str = ""


class Attempt(Answer):
    """One attempt to train a run, from the run's log."""

    number: int
    began: str = Field(description="Time of day, UTC: `2026-07-30 12:00:00`.")
    worker_id: str
    text: str = Field(description="The line of the log: device, precision, workers, and the step at which it started.")


class RunDetail(RunRecord):
    """All information about a run."""

    spec: dict[str, Any] | None = Field(default=None, description="The resolved configuration.")
    values: dict[str, Value] = Field(
        default={}, description="The values of its configuration and facts, under the keys that filters have."
    )
    state: dict[str, Any] = Field(default={}, description="Attempt, worker, and the traceback of a failure.")
    facts: dict[str, Any] = Field(default={}, description="For example parameters, duration and memory.")
    result: dict[str, Any] | None = Field(default=None, description="The content of result.json, if it is finished.")
    sweeps: list[str] = Field(default=[], description="The sweeps that contained the run, oldest first.")
    failure: Failure | None = Field(default=None, description="The error of a failed run.")
    attempts: list[Attempt] = Field(default=[], description="The attempts in its log, oldest first.")
    mlflow_url: str | None = Field(
        default=None, description="Its page in MLflow, if an MLflow server is known and has the run."
    )
    example: str | None = Field(
        default=None, description="A test sequence of its task with the answers, as labels; null for tasks over text."
    )
    curve: list[dict[str, int | float]] = Field(default=[], description="The logged values, by step.")


class GetRun(Question[RunDetail]):
    """One run: configuration, state, attempts, metrics, facts, logged rows, and why it failed."""

    PATH = "/runs/{run_id}"
    WORK = "answers"
    FROM_INDEX = False  # reads the run's files

    run_id: RunIdOrPrefix
    curve: Annotated[bool, Field(description="Whether to include the logged rows.")] = True


class RunLog(Answer):
    """The end of a run's log."""

    run_id: str
    lines: list[str]
    truncated: bool = Field(description="Whether the log has more lines before these.")


class GetLog(Question[RunLog]):
    """The end of a run's log, of its last MiB: its attempts, evaluations, and errors with their tracebacks."""

    PATH = "/runs/{run_id}/logs"
    WORK = "answers"
    FROM_INDEX = False  # reads the run's files

    run_id: RunIdOrPrefix
    tail: Annotated[int, Field(ge=0, le=10_000, description="Number of lines from the end.")] = 200


class CheckpointFile(Answer):
    """A file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str
    url: str = Field(description="URL of the download.")


class Checkpoint(Answer):
    """The files of a finished run's checkpoint."""

    run_id: str
    files: list[CheckpointFile]


# -- differences -------------------------------------------------------------------------------------------------------


class ChangedValue(Answer):
    """A value that differs; null on a side that has none."""

    key: str
    left: str | None
    right: str | None


class MetricTest(Answer):
    """Right minus left: the difference of the means over finished runs, and a test if there are enough runs."""

    n: tuple[int, int]
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    p: float | None = Field(description="p of the exact permutation test, not corrected.")
    smallest_p: float | None = Field(description="The smallest p possible with this number of runs.")


class MetricChange(Answer):
    """A metric of both sides. Undefined numbers are null."""

    row: str
    metric: str
    left: float | None = Field(description="Mean over the finished runs.")
    right: float | None
    difference: MetricTest
    p_adjusted: float | None = Field(description="Corrected for all metrics of the comparison (Holm).")


class RunsDiff(Answer):
    """Two runs or two sweeps side by side."""

    left: str
    right: str
    runs: tuple[int, int]
    finished: tuple[int, int]
    spec: list[ChangedValue]
    facts: list[ChangedValue]
    metrics: list[MetricChange]
    only_left: list[str] = Field(default=[], description="Rows that only the left sweep has.")
    only_right: list[str] = []


SIDE = "Id of a run or sweep; or `ABLATION/ROW` for the row's best finished run, with `scale` and `set`."
DiffSide = Annotated[
    str, Field(max_length=700, description=SIDE), typer.Argument(metavar="RUN|SWEEP", help=SIDE, show_default=False)
]


class GetDiff(Question[RunsDiff]):
    """Differences between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test."""

    PATH = "/diff"

    left: DiffSide
    right: DiffSide
    scale: Scale = None
    set: Sets = []


QUESTIONS = (ListTried, GetRun, GetLog, GetDiff, CompareCurves)
"""A service has a route for each. `ListRuns` and `ExportRuns` have routes of their own kind."""
