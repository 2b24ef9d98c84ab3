"""The requests that have a body, with their answers: a sweep to execute, sequences to score, a sequence to probe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cope_sweep.api.formats import Trainable
from cope_sweep.records import Budget, Status


def _check_unicode(text: str) -> str:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("no Unicode text: it has half of a surrogate pair")
    return text


Unicode = AfterValidator(_check_unicode)
UnicodeText = Annotated[str, Unicode]
"""JSON can have halves of surrogate pairs, which no encoding can write."""
TokenId = Annotated[int, Field(strict=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""A list that is validated up to its first error: a body of 1 MB can have 250,000."""
Count = Annotated[int, Field(ge=1, le=1 << 31, strict=True)]

MAX_KEYS = 100


def _check_keys(value: object) -> object:
    """The value. Raises ValueError for a mapping of so many keys that an error for each of them would take seconds."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS} keys")
    return value


class Body(BaseModel):
    """A body of a request, which has no other keys than its fields. It is validated in bounded time."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        return _check_keys(data)


# -- sweeps ---------------------------------------------------------------------------------------------------------

_Name = Annotated[UnicodeText, Field(min_length=1, max_length=200)]


class SweepRequest(Body, Budget):
    """A sweep to execute: an ablation of this service by its name, or one in the request."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"ablation": "quickstart", "set": ["train.steps=100", "seeds=[0]"]}]}
    )

    ablation: _Name | None = Field(default=None, description="The name of an ablation.")
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = Field(
        default=None, description="The name of the ablation in `spec`; no ablation file has it."
    )
    spec: UnicodeText | dict[str, Any] | None = Field(
        default=None,
        description="An ablation: the text of a file (YAML), or the same as an object. It may inherit from an ablation "
        "of this service. It names no plugins, files and folders.",
    )
    scale: Annotated[UnicodeText, Field(max_length=100)] | None = None
    set: Annotated[list[Annotated[UnicodeText, Field(max_length=10_000)]], Field(max_length=100)] = Field(
        default=[], description="Values that replace those of the ablation: `KEY=VALUE`, as after `--set`."
    )
    only: Annotated[list[Trainable], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None,
        description="Train only the runs with these statuses. Default: all that have not ended as planned.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.ablation is None) == (self.spec is None):
            raise ValueError("give either `ablation` or `spec`")
        if (self.name is None) != (self.spec is None):
            raise ValueError("`name` is the name of the ablation in `spec`; give both or none of them")
        return self

    @property
    def leave_out(self) -> list[Status]:
        """The statuses of runs that are not trained."""
        return [each for each in get_args(Trainable) if self.only is not None and each not in self.only]


# -- perplexity -----------------------------------------------------------------------------------------------------

RunId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Text = Annotated[str, Field(min_length=1), Unicode]


class BestOfRow(Body):
    """The finished run of a row with the best value of the ablation's primary metric."""

    ablation: Annotated[UnicodeText, Field(max_length=200)]
    row: Annotated[UnicodeText, Field(max_length=500, description="The name of the row, as in the table.")]
    scale: Annotated[UnicodeText, Field(max_length=100)] | None = None


class PerplexityRequest(Body):
    """Sequences to score with one or several models: token ids or texts."""

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

    models: Annotated[list[RunId | BestOfRow], Field(min_length=1, max_length=32, fail_fast=True)] = Field(
        description="Run ids, or the best runs of rows."
    )
    tokens: Annotated[list[TokenIds], Field(min_length=1, max_length=4096, fail_fast=True)] | None = Field(
        default=None,
        description="Token ids of whole sequences, their answers included. Scored are those that the task trains, and "
        "never the first.",
    )
    text: Text | Annotated[list[Text], Field(min_length=1, max_length=4096, fail_fast=True)] | None = Field(
        default=None,
        description="Texts for a model with a tokenizer: the end-of-text token is put before each, so every token is "
        "scored. For other models: labels of the task's vocabulary with blanks between them, the answers included.",
    )
    context: Count | None = Field(
        default=None,
        description="Tokens of a window. Default: for texts, and with `stride`, as many as in training; for token ids "
        "the whole sequence.",
    )
    stride: Count | None = Field(
        default=None,
        description="Tokens from the begin of a window to the next, 1 … context. Default: disjoint windows.",
    )
    log_probabilities: bool = Field(
        default=False, description="Whether the response has the log-probability of each token."
    )
    token_labels: bool = Field(default=False, description="Whether the response has the ids and labels of the tokens.")
    top: Annotated[int, Field(ge=0, le=20, strict=True)] = Field(
        default=0, description="Number of most probable tokens to report in the place of each token."
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


class TextUnits(BaseModel):
    """Measures that do not depend on the tokenizer."""

    words: int = Field(description="Words separated by blanks; line breaks count as words.")
    size_bytes: int = Field(description="Size in UTF-8.")
    word_perplexity: float | None = Field(description="exp(nll_sum / words); null if undefined or too large.")
    byte_perplexity: float | None = Field(description="exp(nll_sum / size_bytes); null if a float overflows.")
    bits_per_byte: float


class ScoredTotal(BaseModel):
    """Perplexity over the tokens that the task trains; each has the same weight."""

    nll_sum: float = Field(description="−Σ log p, in nats.")
    tokens: int = Field(description="Number of scored tokens: those that the task trains.")
    positions: int = Field(description="Number of all tokens but the first of each sequence.")
    perplexity: float | None = Field(description="exp(nll_sum / tokens); null if a float overflows.")
    bits_per_token: float
    text: TextUnits | None = Field(default=None, description="Only for texts of models with a tokenizer.")


class ScoredSequence(ScoredTotal):
    """Perplexity of one sequence. Lists have an entry for each token, null where it is not scored."""

    log_probabilities: list[float | None] | None = Field(
        default=None, description="Natural logarithms, one per token; null: not scored. Only if requested."
    )
    token_ids: list[int] | None = Field(default=None, description="Only with `token_labels`.")
    input_ids: list[int] | None = Field(
        default=None,
        description="Ids that the model reads in the places of all tokens but the last. Only with `token_labels`.",
    )
    labels: list[str] | None = Field(default=None, description="The text of each token. Only with `token_labels`.")
    top: list[list[tuple[int, float]] | None] | None = Field(
        default=None, description="Id and log-probability of the most probable tokens; null: not scored."
    )


class ModelPerplexity(BaseModel):
    run_id: str
    context: int | None = Field(default=None, description="Tokens of a window; null: whole sequences.")
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
Index = Annotated[int, Field(ge=0, strict=True)]
Indices = Annotated[list[Index], Field(fail_fast=True)]


class ProbeRequest(Body):
    """A sequence of token ids or a text, and the requested layers, heads, matrices and marks."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [3, 14, 14, 7], "layers": [0], "heads": [1]}]})

    tokens: Annotated[TokenIds, Field(min_length=1)] | None = None
    text: Annotated[str, Field(min_length=1), Unicode] | None = Field(
        default=None,
        description="A text for a model with a tokenizer: the end-of-text token is put before it. For other models: "
        "labels of the task's vocabulary with blanks between them.",
    )
    layers: Indices | None = Field(default=None, description="Numbers from 0; null: all.")
    heads: Indices | None = Field(default=None, description="Numbers from 0; null: all.")
    matrices: Annotated[list[MatrixName], Field(fail_fast=True)] = Field(
        default=list(get_args(MatrixName)), description="The requested matrices; an empty list: statistics only."
    )
    marks: Annotated[dict[str, Indices], Field(max_length=16), BeforeValidator(_check_keys)] | None = Field(
        default=None,
        description="Mark name → indices of the marked tokens; null: the marks of the task or the text.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens is None) == (self.text is None):
            raise ValueError("give either `tokens` or `text`")
        return self


class ProbedMark(BaseModel):
    """Separation of marked tokens from the others by a head's gates; null: undefined for these tokens."""

    tokens_on: int
    tokens_off: int
    on: float | None = Field(description="Mean gate of the marked tokens; each gate is a mean over the queries.")
    off: float | None = Field(description="Mean gate of the other tokens.")
    auc: float | None = Field(description="P(gate of a marked token > gate of another token); ½ is chance.")
    effect: float | None = Field(description="Cohen's d.")
    share: float | None = Field(description="Share of the marked tokens in the sum of gates.")


class ProbedEncoding(BaseModel):
    """Statistics and matrices of an encoding in a head. An encoding without gates has only scores."""

    kind: str
    limit: int | None = Field(
        default=None, description="Largest position that the encoding distinguishes, p_max − 1; null: no limit."
    )
    clamped: float | None = Field(default=None, description="Share of the pairs with a position beyond the limit.")
    position_mean: float | None = Field(default=None, description="Mean over the pairs, before the limit.")
    position_max: float | None = Field(default=None, description="Maximum over the pairs, before the limit.")
    marks: dict[str, ProbedMark] = {}
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
