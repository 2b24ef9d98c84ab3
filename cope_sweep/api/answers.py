"""Answers to questions: the models of the REST service and of `--json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cope_sweep.records import Counts, Progress, RunRecord, Status, SweepSummary


class Answer(BaseModel):
    """Base class of answers. Pydantic compiles a model on first use: a command needs one or two of the forty."""

    model_config = ConfigDict(defer_build=True)


ClaimVerdict = Literal[
    "shown", "shown in part", "mixed", "opposite", "not shown", "too few seeds", "not testable", "not trained"
]


class ScaleSummary(Answer):
    """The number of an ablation's runs at a scale."""

    runs: int
    finished: int
    counts: Counts = {}


class AblationSummary(Answer):
    """An ablation, with the number of its runs by status."""

    name: str
    title: str = ""
    hypothesis: str = ""
    reproduces: str = ""
    scales: list[str] = []
    at_scales: dict[str, ScaleSummary] = Field(
        default={}, description="Scale → its runs. The fields below count the runs without a scale."
    )
    rows: int = 0
    seeds: int = 0
    runs: int = 0
    finished: int = 0
    counts: Counts = {}
    newest_ms: int | None = Field(
        default=None, description="Time of the last change of one of its runs, at any scale, in ms since 1970."
    )
    committed: list[str] = Field(
        default=[],
        description="Scales with results that come with the ablation files (`table?committed=true`). An empty name "
        "means: without a scale.",
    )
    recorded_by: str | None = Field(
        default=None,
        description="The sweep whose record contains the ablation; null: the service has its file.",
    )
    error: str | None = Field(default=None, description="Why the file is invalid; the other fields are then empty.")


class PlannedRun(Answer):
    run_id: str
    seed: int
    status: Status


class PlannedRow(Answer):
    """A row of the table and its runs."""

    row: str
    labels: dict[str, str]
    runs: list[PlannedRun]


class MetricInfo(Answer):
    name: str
    title: str
    goal: str
    unit: str
    decimals: int
    scale: float = Field(description="Factor by which tables multiply values.")


class AblationDetail(AblationSummary):
    """An ablation with its rows, metrics and file."""

    axes: dict[str, str] = Field(default={}, description="Axis key → its column title in tables.")
    metrics: list[MetricInfo] = []
    plan: list[PlannedRow] = []
    reference: str | None = Field(
        default=None, description="What a report compares the rows with: a value for `compare` of the table."
    )
    text: str = Field(description="The content of the file.")


class ClaimResult(Answer):
    """A claim of an ablation, and the verdict of its finished runs at one scale."""

    claim: str
    source: str = Field(
        description="The table or figure of the paper that makes the claim; empty: not a claim of the paper."
    )
    ablation: str
    title: str = Field(description="The title of the ablation.")
    scale: str | None
    measure: str = Field(description="The column of the table that decides: `OOD (%)`.")
    ours: str = Field(description="Mean ± standard deviation over seeds of the rows that are compared.")
    published: str = Field(description="The published values of the same rows; empty if there are none.")
    p: float | None = Field(description="The largest p over the pairs of rows, corrected for their number (Holm).")
    verdict: ClaimVerdict
    meaning: str = Field(description="What the verdict says; empty if no run is trained.")
    pairs: int = Field(description="The number of pairs of rows that were tested.")
    shown: int = Field(description="The number of pairs that differ as claimed.")
    hypothesis: str = Field(
        description="The verdict on the ablation's hypothesis from all its claims, such as `supported`."
    )


class MlflowPage(Answer):
    """The page of an ablation in MLflow, where its runs can have notes and tags."""

    url: str | None = Field(
        description="URL of its experiment; null if no MLflow server is known, or the server has no such experiment."
    )


class FigureInfo(Answer):
    """A figure of an ablation."""

    name: str
    title: str
    kind: str
    declared: bool = Field(description="Whether the ablation's file declares it.")
    formats: list[Literal["png", "svg", "pdf", "csv"]]
    url: str = Field(description="URL of the figure; add `format`.")


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


class Series(Answer):
    """The learning curve of one run."""

    run_id: str
    seed: int
    status: Status
    points: list[tuple[int, float | None]] = Field(description="(step, value); null: not finite")


class RowCurves(Answer):
    """The learning curves of a row, one per seed."""

    row: str
    series: list[Series]


class CurvePage(Answer):
    """Learning curves of one metric for all runs of an ablation."""

    metric: str
    metrics: list[str] = Field(description="All metrics that these runs have logged.")
    rows: list[RowCurves]
    total: int = Field(description="Rows of the ablation, on all pages.")
    next: int | None = Field(default=None, description="The `offset` of the next page; null on the last one.")


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


class RunLog(Answer):
    """The end of a run's log."""

    run_id: str
    lines: list[str]
    truncated: bool = Field(description="Whether the log has more lines before these.")


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


class SweepState(Answer):
    """A sweep that was submitted, stopped or retried."""

    sweep_id: str
    ablation: str
    status: Status
    runs: int
    stop_requested: bool = Field(
        default=False, description="Whether it is about to stop; its runs write checkpoints first."
    )
    retry_of: str | None = Field(default=None, description="The sweep whose runs it trains again.")
    url: str = Field(description="URL of its state.")
    events: str = Field(description="URL of its progress as server-sent events.")


class SweepMember(Progress):
    """A run of a sweep: its progress, and its place in the sweep's table."""

    row: str
    labels: dict[str, str]
    seed: int
    reused: bool


class SweepDetail(SweepSummary):
    """A sweep with its runs, and the code and machine from its record."""

    hypothesis: str = ""
    command: list[str] = []
    git_commit: str | None = None
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    metrics: list[dict[str, Any]] = []
    notes: list[str] = []
    file_text: str = Field(default="", description="The ablation file.")
    members: list[SweepMember] = []
    error: str | None = Field(
        default=None, description="Why its record cannot be read; the other fields are then empty."
    )


class RunCost(Progress):
    """A run of a plan: its progress and its estimated cost."""

    row: str
    seed: int
    parameters: int
    training_tokens: int = Field(description="Tokens in training: steps × sequences × tokens.")
    training_flops: float = Field(
        description="Floating-point operations in training: 6 per parameter and token, plus attention."
    )
    estimated_s: float
    least_s: float = Field(
        description="Estimate for a fast core if nothing was measured; otherwise equal to `estimated_s`."
    )
    estimated_memory_bytes: int
    basis: str
    fits: bool = Field(description="Whether the machine that answers has enough memory, as far as is known.")
    resources: str = Field(description="Resources of the worker group that trains it.")


class PlanCost(Answer):
    """The runs of a plan, in order, and the estimated wall time of the runs still to do."""

    ablation: str
    worker_groups: int
    counts: Counts
    finished: int
    to_do: int = Field(description="Runs that are neither finished nor stopped.")
    to_suggest: int = Field(description="Of these, runs that the search has not suggested yet; they are not in `runs`.")
    basis: str | None = Field(description="What the time estimate is based on.")
    estimated_s: float
    least_s: float = Field(
        description="Estimate if no other program uses the machine; if nothing was measured, for fast cores."
    )
    lacks_gpu: bool = Field(description="Whether the runs may use a GPU, and the machine that answers has none.")
    runs: list[RunCost]


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
