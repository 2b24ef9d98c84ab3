"""Requests with a body, and their answers: execute a sweep, score sequences, probe a sequence."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cope_sweep.api.question import MAX_SET_CHARACTERS, MAX_SETS
from cope_sweep.records import Budget, Status


def _check_unicode(text: str) -> str:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("contains a lone surrogate, which is not Unicode text; remove it")
    return text


Unicode = AfterValidator(_check_unicode)
UnicodeText = Annotated[str, Unicode]
"""A string without lone surrogates: JSON can contain them, but no file can."""
TokenId = Annotated[int, Field(strict=True)]
TokenIdList = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation ends at the first error: a body of 1 MB can contain 250,000."""
TokenCount = Annotated[int, Field(ge=1, le=1 << 31, strict=True)]

MAX_KEYS = 100


def _check_keys(value: object) -> object:
    """Reject a mapping with too many keys (ValueError): reporting an error for each would take seconds."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise ValueError(f"has {len(value)} keys; send at most {MAX_KEYS}")
    return value


class Body(BaseModel):
    """Base class of request bodies. Unknown keys are errors, and validation takes bounded time."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        return _check_keys(data)


# -- sweeps ---------------------------------------------------------------------------------------------------------

Trainable = Literal["pending", "interrupted", "failed", "stopped"]
"""Statuses of runs that a sweep may train."""

_Sets = Annotated[list[Annotated[UnicodeText, Field(max_length=MAX_SET_CHARACTERS)]], Field(max_length=MAX_SETS)]
_Name = Annotated[UnicodeText, Field(min_length=1, max_length=200)]


class SweepRequest(Body, Budget):
    """A sweep to execute: the name of an ablation of this service, or an ablation in the request."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"ablation": "quickstart", "set": ["train.steps=100", "seeds=[0]"]}]}
    )

    ablation: _Name | None = Field(default=None, description="The name of an ablation.")
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = Field(
        default=None, description="A name for the ablation in `spec`, different from all ablation files."
    )
    spec: UnicodeText | dict[str, Any] | None = Field(
        default=None,
        description="An ablation: the text of a file (YAML), or the same as an object. It may inherit from an ablation "
        "of this service. It may not name plugins, files or folders.",
    )
    scale: Annotated[UnicodeText, Field(max_length=100)] | None = None
    set: _Sets = Field(default=[], description="Replace values of the ablation: `KEY=VALUE`, as with `--set`.")
    only: Annotated[list[Trainable], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None,
        description="Train only the runs with these statuses. Default: all runs that are neither finished nor stopped "
        "early by its schedule.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.ablation is None) == (self.spec is None):
            raise ValueError("give either `ablation` or `spec`")
        if (self.name is None) != (self.spec is None):
            raise ValueError("`name` is the name of the ablation in `spec`; give both or neither")
        return self

    @property
    def leave_out(self) -> list[Status]:
        """The statuses of runs that are not trained."""
        if self.only is None:
            return []
        return [status for status in get_args(Trainable) if status not in self.only]


# -- perplexity -----------------------------------------------------------------------------------------------------

RunDigits = Annotated[str, Field(pattern="^[0-9a-f]{4,16}$")]
RequestText = Annotated[str, Field(min_length=1), Unicode]


class BestOfRow(Body):
    """The finished run of a row with the best value of the ablation's primary metric."""

    ablation: Annotated[UnicodeText, Field(max_length=200)]
    row: Annotated[UnicodeText, Field(max_length=500, description="The name of the row, as in the table.")]
    scale: Annotated[UnicodeText, Field(max_length=100)] | None = None
    set: _Sets = Field(default=[], description="The values of `--set` with which the row was trained: `KEY=VALUE`.")


class PerplexityRequest(Body):
    """Token ids or texts to score with one or several models."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "models": ["95199d1142de555d", {"ablation": "quickstart", "row": "CoPE"}],
                    "tokens": [[14, 3, 14, 7, 15, 3, 7]],
                }
            ]
        }
    )

    models: Annotated[list[RunDigits | BestOfRow], Field(min_length=1, max_length=32, fail_fast=True)] = Field(
        description="Run ids or their first digits, or the best runs of rows."
    )
    tokens: Annotated[list[TokenIdList], Field(min_length=1, max_length=4096, fail_fast=True)] | None = Field(
        default=None,
        description="Token ids of whole sequences, including the answers. Only the tokens that the task trains are "
        "scored, and never the first one.",
    )
    text: RequestText | Annotated[list[RequestText], Field(min_length=1, max_length=4096, fail_fast=True)] | None = (
        Field(
            default=None,
            description="Texts for a model with a tokenizer: each gets an end-of-text token in front, so every token "
            "is scored. For other models: labels of the task's vocabulary, separated by spaces, including the answers.",
        )
    )
    context: TokenCount | None = Field(
        default=None,
        description="Tokens per window. Default: for texts, and with `stride`, as in training; for token ids, the "
        "whole sequence.",
    )
    stride: TokenCount | None = Field(
        default=None,
        description="Tokens from the start of one window to the start of the next, 1 … context. Default: disjoint "
        "windows.",
    )
    log_probabilities: bool = Field(default=False, description="Return the log-probability of each token.")
    token_labels: bool = Field(default=False, description="Return the ids and labels of the tokens.")
    top: Annotated[int, Field(ge=0, le=20, strict=True)] = Field(
        default=0, description="Number of most probable tokens to return at each position."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens is None) == (self.text is None):
            raise ValueError("give either `tokens` or `text`")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts; empty if token ids were sent."""
        return [self.text] if isinstance(self.text, str) else self.text or []

    @property
    def values_per_token(self) -> int:
        """The number of log-probabilities and labels that the answer has for each token."""
        return self.log_probabilities + self.token_labels + self.top


class TextUnits(BaseModel):
    """Measures that do not depend on the tokenizer."""

    words: int = Field(description="Words separated by spaces; line breaks count as words.")
    size_bytes: int = Field(description="Size in UTF-8.")
    word_perplexity: float | None = Field(description="exp(nll_sum / words); null if undefined or too large.")
    byte_perplexity: float | None = Field(description="exp(nll_sum / size_bytes); null if a float overflows.")
    bits_per_byte: float


class ScoredTotal(BaseModel):
    """Perplexity over the tokens that the task trains, all with the same weight."""

    nll_sum: float = Field(description="−Σ log p, in nats.")
    tokens: int = Field(description="Number of scored tokens: the tokens that the task trains.")
    positions: int = Field(description="Number of all tokens except the first of each sequence.")
    perplexity: float | None = Field(description="exp(nll_sum / tokens); null if a float overflows.")
    bits_per_token: float
    text: TextUnits | None = Field(default=None, description="Only for texts of models with a tokenizer.")


class ScoredSequence(ScoredTotal):
    """Perplexity of one sequence. Lists have one entry per token; null: not scored."""

    log_probabilities: list[float | None] | None = Field(
        default=None, description="Natural logarithms, one per token; null: not scored. Only if requested."
    )
    token_ids: list[int] | None = Field(default=None, description="Only with `token_labels`.")
    input_ids: list[int] | None = Field(
        default=None,
        description="Ids that the model reads at the positions of all tokens except the last. Only with "
        "`token_labels`.",
    )
    labels: list[str] | None = Field(default=None, description="The text of each token. Only with `token_labels`.")
    top: list[list[tuple[int, float]] | None] | None = Field(
        default=None, description="Id and log-probability of the most probable tokens; null: not scored."
    )


class ModelPerplexity(BaseModel):
    run_id: str
    context: int | None = Field(default=None, description="Tokens per window; null: whole sequences.")
    stride: int | None = None
    scored: str = Field(description="The tokens that the task trains, in words.")
    total: ScoredTotal
    sequences: list[ScoredSequence]


class PerplexityComparison(BaseModel):
    results: list[ModelPerplexity] = Field(description="One per model, in the order of the request.")


# -- probes ---------------------------------------------------------------------------------------------------------

ProbeFormat = Literal["json", "svg", "png"]
MEDIA_TYPES: dict[ProbeFormat, str] = {"json": "application/json", "svg": "image/svg+xml", "png": "image/png"}
MatrixName = Literal["gates", "positions", "scores", "position_only_attention", "attention"]
TriangularMatrix = Annotated[
    list[list[float]],
    Field(description="Row i is query i; its values are for the keys 0 … i, rounded to six decimal places."),
]
Indices = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(fail_fast=True)]
MarkName = Annotated[UnicodeText, Field(max_length=100)]


class ProbeRequest(Body):
    """Token ids or a text to probe, and the layers, heads, matrices and marks to return."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [3, 14, 14, 7], "layers": [0], "heads": [1]}]})

    tokens: Annotated[TokenIdList, Field(min_length=1)] | None = None
    text: RequestText | None = Field(
        default=None,
        description="A text for a model with a tokenizer: it gets an end-of-text token in front. For other models: "
        "labels of the task's vocabulary, separated by spaces.",
    )
    layers: Indices | None = Field(default=None, description="Numbers from 0; null: all.")
    heads: Indices | None = Field(default=None, description="Numbers from 0; null: all.")
    matrices: Annotated[list[MatrixName], Field(fail_fast=True)] = Field(
        default=list(get_args(MatrixName)), description="The matrices to return; an empty list: statistics only."
    )
    marks: Annotated[dict[MarkName, Indices], Field(max_length=16), BeforeValidator(_check_keys)] | None = Field(
        default=None,
        description="Mark name → indices of the marked tokens; null: the marks of the task or the text.",
    )
    load: bool = Field(
        default=False, description="Also return what the position logits of each encoding do (`load` of the answer)."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens is None) == (self.text is None):
            raise ValueError("give either `tokens` or `text`")
        return self


class ProbedMark(BaseModel):
    """How well a head's gates separate the marked tokens from the others; null: undefined for these tokens."""

    tokens_on: int
    tokens_off: int
    on: float | None = Field(description="Mean gate of the marked tokens; each gate is a mean over the queries.")
    off: float | None = Field(description="Mean gate of the other tokens.")
    auc: float | None = Field(description="P(gate of a marked token > gate of another token); ½ is chance.")
    effect: float | None = Field(description="Cohen's d.")
    share: float | None = Field(description="Share of the marked tokens in the sum of gates.")


class ProbedLoad(BaseModel):
    """What an encoding's position logits do in a head, over some rows of attention, evenly spaced."""

    position: float = Field(description="Mean size of the position logits.")
    content: float = Field(description="Mean size of the content's logits, q·k/√K.")
    load: float | None = Field(description="position ÷ content; near 0 the encoding does nothing.")
    beyond: float | None = Field(
        description="Share of the keys beyond the last embedding, where gates have no gradient; null: no limit."
    )
    spans: list[tuple[int, float]] = Field(
        description="Tokens of a row, and its largest position; empty: the encoding has no gates."
    )
    explained: float | None = Field(
        description="Share of attention's entropy that the position logits alone explain: 1 if attention is that of "
        "the positions, 0 if these prefer no key, negative if they point elsewhere; null: not defined."
    )


class ProbedEncoding(BaseModel):
    """Statistics and matrices of an encoding in a head. An encoding without gates has scores only."""

    kind: str
    limit: int | None = Field(
        default=None, description="Largest position that the encoding distinguishes, p_max − 1; null: no limit."
    )
    clamped: float | None = Field(default=None, description="Share of the pairs with a position beyond the limit.")
    position_mean: float | None = Field(default=None, description="Mean over the pairs, before the limit.")
    position_max: float | None = Field(default=None, description="Maximum over the pairs, before the limit.")
    marks: dict[str, ProbedMark] = {}
    load: ProbedLoad | None = Field(default=None, description="With `load` of the request.")
    gates: TriangularMatrix | None = None
    positions: TriangularMatrix | None = Field(default=None, description="Before the limit.")
    scores: TriangularMatrix | None = Field(default=None, description="Position logits, added to the attention logits.")


class ProbedHead(BaseModel):
    """Statistics and matrices of a head."""

    layer: int
    head: int
    encodings: list[ProbedEncoding] = Field(description="The encodings with gates or position logits.")
    position_only_attention: TriangularMatrix | None = Field(
        default=None,
        description="Softmax of the position logits alone, scaled so that the maximum of each query is 1; "
        "null if no encoding has position logits.",
    )
    attention: TriangularMatrix | None = None


class ProbeResponse(BaseModel):
    run_id: str
    token_ids: list[int]
    labels: list[str] = Field(description="The text of each token.")
    heads: list[ProbedHead]
