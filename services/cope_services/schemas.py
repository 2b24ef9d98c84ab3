"""What the service says and takes, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from cope_sweep.record import Status

Counts = dict[Status, int]
Responses = dict[int | str, dict[str, Any]]


class Problem(BaseModel):
    """Every error, whatever its status."""

    class Error(BaseModel):
        type: str
        message: str

    error: Error


def problems(*statuses: int) -> Responses:
    """What a route's documentation says of its errors."""
    return {status: {"model": Problem} for status in statuses}


class Health(BaseModel):
    status: str


class AblationSummary(BaseModel):
    """An ablation, and how far its runs are."""

    name: str
    title: str = ""
    hypothesis: str = ""
    reproduces: str = ""
    scales: list[str] = []
    rows: int = 0
    runs: int = 0
    counts: Counts = {}
    error: str | None = Field(default=None, description="Why the file cannot be used; all else is empty then.")


class PlannedRun(BaseModel):
    run_id: str
    seed: int
    status: Status


class PlannedRow(BaseModel):
    """A row of the table, with its runs."""

    row: str
    labels: dict[str, str]
    runs: list[PlannedRun]


class MetricInfo(BaseModel):
    name: str
    title: str
    goal: str
    unit: str
    decimals: int


class AblationDetail(AblationSummary):
    """An ablation with its rows, its metrics, and its file."""

    axes: dict[str, str] = Field(default={}, description="Axis key → the short name that tables show.")
    metrics: list[MetricInfo] = []
    plan: list[PlannedRow] = []
    text: str = Field(description="The file as it stands.")


class RunSummary(BaseModel):
    """A run, in one line."""

    run_id: str
    status: Status
    ablations: list[str] = Field(default=[], description="The ablations that contain it.")
    row: str | None = Field(default=None, description="Its row in the first of them.")
    seed: int | None = None
    step: int = 0
    steps: int | None = Field(default=None, description="Steps in all.")
    created_ms: int | None = Field(default=None, description="When it was first begun, since 1970.")
    updated_ms: int | None = None
    worker_id: str | None = Field(default=None, description="The worker that trained it last.")
    message: str | None = Field(default=None, description="Why it failed.")
    metrics: dict[str, float] = Field(default={}, description="Final values, once it is finished.")


class RunPage(BaseModel):
    total: int
    limit: int
    offset: int
    runs: list[RunSummary]


class RunDetail(RunSummary):
    """A run, in full."""

    spec: dict[str, Any] | None = None
    state: dict[str, Any] = Field(default={}, description="Attempt, place, and how it failed, with the traceback.")
    facts: dict[str, Any] = {}
    curve: list[dict[str, int | float]] = Field(default=[], description="The logged rows, by step.")


class Series(BaseModel):
    """A metric of one run as it was trained."""

    run_id: str
    seed: int
    status: Status
    points: list[tuple[int, float]] = Field(description="(step, value)")


class RowCurves(BaseModel):
    row: str
    series: list[Series]


class Curves(BaseModel):
    """A metric of all the runs of an ablation."""

    metric: str
    metrics: list[str] = Field(description="All that were logged.")
    rows: list[RowCurves]


class CheckpointFile(BaseModel):
    name: str
    size_bytes: int
    sha256: str
    url: str


class Checkpoint(BaseModel):
    run_id: str
    files: list[CheckpointFile]


TokenId = Annotated[int, Field(strict=True)]


class PerplexityRequest(BaseModel):
    """Sequences of token ids. The first of each is given to the model and not scored."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"tokens": [[3, 14, 14, 7]], "log_probabilities": True}]}
    )

    tokens: Annotated[list[list[TokenId]], Field(min_length=1)]
    log_probabilities: bool = Field(default=False, description="Whether to say each token's.")


class Measured(BaseModel):
    """Perplexity over some tokens, each counting alike."""

    nll_sum: float = Field(description="−Σ log p, in nats.")
    tokens: int = Field(description="Scored tokens.")
    perplexity: float | None = Field(description="exp(nll_sum / tokens); null where that is too large for a number.")
    bits_per_token: float


class MeasuredSequence(Measured):
    log_probabilities: list[float | None] | None = Field(
        default=None, description="Natural logarithms, one for each token; the first is null. Only where asked for."
    )


class PerplexityResponse(BaseModel):
    run_id: str
    total: Measured
    sequences: list[MeasuredSequence]


MatrixName = Literal["gates", "positions", "scores", "alone", "attention"]
Rows = Annotated[
    list[list[float]], Field(description="Row i has the keys 0 … i, as query i sees them, to six decimal places.")
]
Index = Annotated[int, Field(ge=0, strict=True)]


class ProbeRequest(BaseModel):
    """A sequence of token ids, and what to say of it."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"tokens": [3, 14, 14, 7], "layers": [0], "heads": [1]}]}
    )

    tokens: Annotated[list[TokenId], Field(min_length=1)]
    layers: list[Index] | None = Field(default=None, description="From 0; null: all.")
    heads: list[Index] | None = Field(default=None, description="From 0; null: all.")
    matrices: list[MatrixName] = Field(
        default=list(get_args(MatrixName)), description="Those wanted; none of them: the numbers alone."
    )
    marks: dict[str, list[Index]] | None = Field(
        default=None,
        max_length=16,
        description="Places of tokens to compare gates with, by name; null: those that the task or the text names.",
    )


class Separation(BaseModel):
    """How a head's gates tell marked tokens from all others; null: not to be said of so few or so equal tokens."""

    tokens_on: int
    tokens_off: int
    on: float | None = Field(description="Mean gate of the marked tokens, each over the queries that see it.")
    off: float | None = Field(description="Mean gate of all others.")
    auc: float | None = Field(description="P(a marked token's gate is larger than another's); ½: by chance.")
    effect: float | None = Field(description="Cohen's d.")
    share: float | None = Field(description="Of all that the head counts, how much is marked.")


class ProbedEncoding(BaseModel):
    """What an encoding does in a head. One without gates has scores alone."""

    kind: str
    limit: int | None = Field(default=None, description="Where positions stop, p_max − 1; null: nowhere.")
    clamped: float | None = Field(default=None, description="Share of pairs whose position is beyond.")
    position_mean: float | None = Field(default=None, description="Over pairs, before the limit.")
    position_max: float | None = None
    marks: dict[str, Separation] = {}
    gates: Rows | None = None
    positions: Rows | None = Field(default=None, description="Before the limit.")
    scores: Rows | None = Field(default=None, description="What it adds to the attention logits.")


class ProbedHead(BaseModel):
    layer: int
    head: int
    encodings: list[ProbedEncoding] = Field(description="Those that count or add to the attention logits.")
    alone: Rows | None = Field(
        default=None,
        description="Attention from position alone, each query's maximum scaled to 1; "
        "null where no encoding adds to the logits.",
    )
    attention: Rows | None = None


class ProbeResponse(BaseModel):
    run_id: str
    labels: list[str] = Field(description="The tokens, as people read them.")
    heads: list[ProbedHead]
