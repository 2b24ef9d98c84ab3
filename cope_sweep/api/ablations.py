"""Questions about ablations: their plans, curves and claims."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cope_sweep.api.question import AblationName, Answer, OfAblation, Question, Scale, Sets
from cope_sweep.records import Counts, Progress, Status

MAX_CURVE_ROWS = 1_000
"""Maximum number of rows whose curves are on one page."""

# -- the list, and one ablation ----------------------------------------------------------------------------------------


class RunCounts(Answer):
    """The number of some runs of an ablation."""

    runs: int
    finished: int
    counts: Counts = {}


class ScaleSummary(RunCounts):
    """The number of an ablation's runs at a scale."""

    same_runs: bool = Field(default=False, description="The ablation has the same runs without a scale.")


class VariantSummary(RunCounts):
    """Runs of an ablation that sweeps have trained with other values: `table?set=KEY=VALUE` is about them."""

    scale: str | None
    sets: list[str] = Field(description="The values of `--set` that decide which runs it has, for `set`.")
    newest_ms: int | None = Field(description="Time of the last change of one of its runs, in ms since 1970.")


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
    variants: list[VariantSummary] = Field(
        default=[],
        description="Runs that were trained with other values (`--set`), as sweeps have recorded them; those with the "
        "newest runs first. No field above counts them.",
    )
    newest_ms: int | None = Field(
        default=None,
        description="Time of the last change of one of its runs, at any scale and of any variant, in ms since 1970.",
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


class ListAblations(Question[list[AblationSummary]]):
    """All ablations, with the number of runs by status."""

    PATH = "/ablations"
    COMMITTED = True


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
    primary: str | None = Field(default=None, description="The metric by which rows are compared.")
    plan: list[PlannedRow] = []
    reference: str | None = Field(
        default=None, description="What a report compares the rows with: a value for `compare` of the table."
    )
    text: str = Field(description="The content of the file.")


class GetAblation(OfAblation[AblationDetail]):
    """One ablation: its rows, runs and file."""

    PATH = "/ablations/{name}"


class MlflowPage(Answer):
    """The page of an ablation in MLflow, where its runs can have notes and tags."""

    url: str | None = Field(
        description="URL of its experiment; null if no MLflow server is known, or the server has no such experiment."
    )


class GetMlflowPage(Question[MlflowPage]):
    """The page of an ablation in MLflow, where its runs can have notes and tags."""

    PATH = "/ablations/{name}/mlflow"
    WORK = "answers"
    FROM_INDEX = False  # MLflow's answer can change while the index does not

    name: AblationName


# -- what is planned, and what it costs --------------------------------------------------------------------------------


class RunCost(Progress):
    """A run of a plan: its progress and its estimated cost."""

    row: str
    seed: int
    parameters: int
    training_tokens: int = Field(description="Tokens in training: steps × sequences × tokens.")
    training_flops: float = Field(
        description="Floating-point operations in training: 6 per parameter and token, plus attention."
    )
    estimated_s: float = Field(description="Estimate if no other program uses the machine.")
    estimated_memory_bytes: int
    basis: str
    to_do: bool = Field(
        description="A sweep trains it: it is not finished, stopped early by the ablation's schedule, left out, or "
        "beyond `max_runs`."
    )
    fits: bool = Field(description="Whether the machine that answers has enough memory, as far as is known.")
    resources: str = Field(description="Resources of the worker group that trains it.")


class PlanCost(Answer):
    """The runs of a plan, in order, and the estimated wall time of the runs still to do."""

    ablation: str
    worker_groups: int
    counts: Counts
    finished: int
    to_do: int = Field(description="Number of runs that a sweep trains: of these, or those that its search suggests.")
    to_suggest: int = Field(description="Of these, runs that the search has not suggested yet; they are not in `runs`.")
    basis: str | None = Field(description="What the time estimate is based on.")
    estimated_s: float = Field(description="Estimate while other programs use the machine as they do now.")
    least_s: float = Field(description="Estimate if no other program uses the machine.")
    lacks_gpu: bool = Field(description="Whether the runs may use a GPU, and the machine that answers has none.")
    runs: list[RunCost]


class GetPlan(OfAblation[PlanCost]):
    """Each run of an ablation in plan order: status, step, worker, message, parameters, estimated time and memory.

    Estimates are for the machine that answers the request.
    """

    PATH = "/ablations/{name}/plan"
    COMMITTED = False
    FROM_INDEX = False  # estimates depend on what else the machine computes


# -- what is missing ---------------------------------------------------------------------------------------------------


class MissingRun(Progress):
    """A run that a table lacks, because it is not finished."""

    seed: int


class MissingRow(Answer):
    """A row with runs that are not finished."""

    row: str
    runs: list[MissingRun]


class Missing(Answer):
    """What the table of an ablation lacks, and the command that trains it."""

    missing: int = Field(description="Number of runs that are neither finished nor stopped early by its schedule.")
    rows: list[MissingRow]
    command: str = Field(description="Trains the missing runs into the store.")


class GetMissing(OfAblation[Missing]):
    """The runs that the table of an ablation lacks, by row, why, and the command that trains them."""

    PATH = "/ablations/{name}/missing"
    COMMITTED = False


# -- learning curves ---------------------------------------------------------------------------------------------------


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


class GetCurves(OfAblation[CurvePage]):
    """Learning curves of a metric: every run of the rows, at most about 200 points each.

    A page also ends after 5,000 runs that have started. Curves come from the index, which running runs update every few
    seconds.
    """

    PATH = "/ablations/{name}/curves"

    metric: Annotated[str | None, Field(max_length=200, description="Default: the primary metric of the ablation.")] = (
        None
    )
    offset: Annotated[
        int, Field(ge=0, le=2**31, description="Number of rows to skip: `next` of the previous page.")
    ] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_CURVE_ROWS, description="Maximum number of rows.")] = MAX_CURVE_ROWS


# -- claims ------------------------------------------------------------------------------------------------------------

ClaimVerdict = Literal[
    "shown", "shown in part", "mixed", "opposite", "not shown", "too few seeds", "not testable", "not trained"
]

ClaimSize = Literal["better", "worse", "equivalent", "unclear"]


class ClaimTexts(Answer):
    """Numbers of a claim as tables show them; `–` for those that it lacks."""

    difference: str = Field(description="With its 95 % interval: `-1.34 [-1.64, -1.08]`.")
    n: str = Field(description="`8`, `5–8`, or `8 pairs`.")
    p: str
    q: str
    margin: str = Field(description="`± 0.50`")
    verdict: str = Field(description="The verdict; of one in part, with the number of pairs: `mixed (3 of 9 pairs)`.")


class ClaimResult(Answer):
    """A claim of an ablation, and the verdict of its finished runs at one scale."""

    claim: str
    task: str = Field(description="The kind of task of the rows: `flip_flop`.")
    source: str = Field(
        description="The table or figure of the paper that makes the claim; empty: not a claim of the paper."
    )
    ablation: str
    title: str = Field(description="The title of the ablation.")
    scale: str | None
    measure: str = Field(description="The column of the table that decides: `OOD (%)`.")
    ours: str = Field(description="Mean ± standard deviation over seeds of the rows that are compared.")
    headline: str = Field(
        description="`CoPE 2.2, RoPE 15.7 (weakest of 9 pairs)`: means of the weakest pair of rows: the one that "
        "differs most the other way, or else the one with the largest p; with a margin, the one with the smallest "
        "difference in the claimed direction, or, of rows called equivalent, the one that may differ most."
    )
    published: str = Field(description="The published values of the same rows; empty if there are none.")
    p: float | None = Field(
        description="p of the weakest pair, corrected for the pairs of all claims of the ablation that rows are "
        "better, about the same column and task (Holm); null for a claim by a margin, which is judged by intervals."
    )
    q: float | None = Field(
        description="p, corrected for all claims of this answer that rows are better (Benjamini–Hochberg); null for "
        "other claims, and for a single one."
    )
    n: int | None = Field(description="The smallest number of seeds of a row, or of pairs of runs.")
    paired: bool = Field(description="Whether runs of the same seed are compared in pairs.")
    difference: float | None = Field(
        description="Of the weakest pair: the row called better minus the other, not scaled."
    )
    ci_low: float | None = Field(description="Lower end of its 95 % interval; null if no data could exclude a value.")
    ci_high: float | None = Field(description="Upper end.")
    says: Literal["better", "equivalent", "not worse"]
    margin: float | None = Field(description="The smallest difference that matters, not scaled; null: not given.")
    size: ClaimSize | None = Field(
        description="equivalent: the interval lies within ± the margin; otherwise better or worse, if the difference "
        "is significant, or else unclear; null without a margin."
    )
    texts: ClaimTexts
    verdict: ClaimVerdict
    meaning: str = Field(description="What the verdict says; empty if no run is trained.")
    pairs: int = Field(description="The number of pairs of rows that were tested.")
    shown: int = Field(description="The number of pairs that are as claimed.")
    hypothesis: str = Field(
        description="The verdict on the ablation's hypothesis from all its claims, such as `supported`."
    )
    recipe: Literal["tuned", "one recipe"] = Field(
        description="Whether the recipe of each row was tuned, all rows alike, or all rows have one recipe."
    )
    model: str = Field(description="The size of the models: `2 layers of 64`, or `the paper's size`.")
    hardware_follows_rows: bool = Field(
        description="Whether half of the runs of some row have other hardware than those of another."
    )
    decided_by: list[str] = Field(
        description="The reports (`encodings.small`) that decide about the claim, of those in this answer that make it "
        "about the same task in the same words: those with tuned rows (those with the same hardware for all rows, if "
        "there are any), else those of the paper's size, else all. Empty: this one does, alone or with others."
    )
    declared: str = Field(
        description="Whether the ablation file contained the claim before the first of its runs started: `before "
        "(2026-11-24, abc1234)`, with day and commit, `after` or `not recorded`; empty if no run is trained."
    )
    note: str = Field(
        description="Why the runs do not show it, and what would settle it, from the ablation file; may be empty."
    )


class ListClaims(Question[list[ClaimResult]]):
    """The claims of ablations with their verdicts, in the order of the paper's tables and figures.

    Without `ablation`: the claims of all ablations, at each scale with finished runs.
    """

    PATH = "/claims"
    COMMITTED = True

    ablation: Annotated[str | None, Field(max_length=200, description="Only the claims of this ablation.")] = None
    scale: Scale = None
    set: Sets = []


QUESTIONS = (ListAblations, GetAblation, GetMlflowPage, GetPlan, GetMissing, GetCurves, ListClaims)
"""A service has a route for each."""
