"""Answers of the queries: the models of the REST service and of `--json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cope_sweep.records import Counts, RunRecord, Status, SweepSummary


class Answer(BaseModel):
    """The base class of answers. Each is compiled when it is used first: a command needs one or two of forty."""

    model_config = ConfigDict(defer_build=True)


ClaimVerdict = Literal["shown", "shown in part", "mixed", "opposite", "not shown", "too few seeds", "not trained"]


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
        default={}, description="Scale → its runs; the numbers below are of the ablation's own size."
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
        description="Scales whose results are kept with the ablation files (`table?committed=true`). An empty name is "
        "the own size.",
    )
    recorded_by: str | None = Field(
        default=None,
        description="The sweep whose record has the ablation, where the service has no file of it; null: it has one.",
    )
    error: str | None = Field(
        default=None, description="The reason why the file is invalid; the other fields are then empty."
    )


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
    scale: float = Field(description="Tables print values times this factor.")


class AblationDetail(AblationSummary):
    """An ablation with its rows, metrics and file."""

    axes: dict[str, str] = Field(default={}, description="Axis key → its column title in tables.")
    metrics: list[MetricInfo] = []
    plan: list[PlannedRow] = []
    reference: str | None = Field(
        default=None, description="The reference of a report's comparisons, as `compare` of the table takes it."
    )
    text: str = Field(description="The content of the file.")


class ClaimResult(Answer):
    """A claim of an ablation, and what its finished runs at one scale say about it."""

    claim: str
    source: str = Field(description="The table or figure of the paper that says so; empty: the paper does not.")
    ablation: str
    title: str = Field(description="The title of the ablation.")
    scale: str | None
    measure: str = Field(description="The column of the table that decides: `OOD (%)`.")
    ours: str = Field(description="Mean ± standard deviation over seeds of the rows that are compared.")
    published: str = Field(description="The published values of the same rows; empty where there are none.")
    p: float | None = Field(description="The largest p of the pairs of rows, corrected for their number (Holm).")
    verdict: ClaimVerdict
    pairs: int = Field(description="The number of pairs of rows that were tested.")
    shown: int = Field(description="The number of these that differ as the claim says.")
    hypothesis: str = Field(description="What all claims of the ablation say about its hypothesis: `supported`.")


class MlflowPage(Answer):
    """The page of an ablation in MLflow, where its runs have notes and tags."""

    url: str | None = Field(description="Its experiment; null if no server is known, or it does not have it.")


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
    text: str = Field(description="The line of the log: device, precision, workers, and where it started.")


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
        default=None, description="Its page in MLflow, if a server is known and has the run."
    )
    example: str | None = Field(
        default=None, description="A test sequence of its task with the answers, as labels; null if it reads a text."
    )
    curve: list[dict[str, int | float]] = Field(default=[], description="The logged rows, by step.")


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


class Curves(Answer):
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
        description="(step, seconds since the run began, value); the seconds of old runs are null."
    )


class CurvesOfRuns(Answer):
    """A metric of several runs, in the order in which they were asked for."""

    metric: str
    series: list[RunCurve]


class RunLog(Answer):
    """The end of a run's log."""

    run_id: str
    lines: list[str]
    truncated: bool = Field(description="Whether the log has more lines before these.")


class ChangedValue(Answer):
    """A value that differs; null where one side has none."""

    key: str
    left: str | None
    right: str | None


class MetricTest(Answer):
    """Right minus left: of the means over finished runs, with a test where there are enough of them."""

    n: tuple[int, int]
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    p: float | None = Field(description="p of the exact permutation test, not corrected.")
    smallest_p: float | None = Field(description="The least p that so many runs can have.")


class MetricChange(Answer):
    """A metric of both sides. A number that is undefined is null."""

    row: str
    metric: str
    left: float | None = Field(description="Mean over the finished runs.")
    right: float | None
    difference: MetricTest
    p_adjusted: float | None = Field(description="With Holm's correction for all metrics of the comparison.")


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
    stop_requested: bool = Field(default=False, description="Whether it ends soon; its runs write checkpoints first.")
    retry_of: str | None = Field(default=None, description="The sweep whose runs it trains again.")
    url: str = Field(description="URL of its state.")
    events: str = Field(description="URL of its progress as server-sent events.")


class SweepMember(Answer):
    """A run of a sweep."""

    run_id: str
    row: str
    labels: dict[str, str]
    seed: int
    reused: bool
    status: Status
    step: int = 0
    steps: int = 0
    worker_id: str | None = None
    message: str | None = None


class SweepDetail(SweepSummary):
    """A sweep with its runs, and what its record says of code and machine."""

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
        default=None, description="The reason why its record cannot be read; fields are then empty."
    )


class RunCost(Answer):
    """A run of a plan: how far it is, and its estimated cost."""

    run_id: str
    row: str
    seed: int
    status: Status
    step: int
    steps: int
    worker_id: str | None
    message: str | None
    parameters: int
    training_tokens: int = Field(description="Tokens that it is trained on: steps × sequences × tokens.")
    training_flops: float = Field(
        description="Floating-point operations of its training: 6 for each parameter and token, and attention's."
    )
    estimated_s: float
    least_s: float = Field(description="The same on a fast core, where nothing was measured; else the same.")
    estimated_memory_bytes: int
    basis: str
    fits: bool = Field(description="Whether the machine that was asked has enough memory, as far as is known.")
    resources: str = Field(description="Resources of the worker group that trains it.")


class PlanCost(Answer):
    """The runs of a plan in its order, and the estimated wall time of those that are to do."""

    ablation: str
    worker_groups: int
    counts: Counts
    finished: int
    to_do: int = Field(description="Runs that are neither finished nor stopped.")
    to_suggest: int = Field(description="Runs of them that the search has still to suggest; they are not in `runs`.")
    basis: str | None = Field(description="What the time estimate is made of.")
    estimated_s: float
    least_s: float = Field(
        description="The same if no other program uses the machine; where nothing was measured, on fast cores."
    )
    lacks_gpu: bool = Field(description="Whether the runs may use a GPU, and the machine that was asked has none.")
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
