"""JSON schemas of perplexity requests and responses."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cope_services.schemas import TokenId, Unicode, UnicodeText

RunId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Field(ge=1, le=1 << 31, strict=True)]
Text = Annotated[str, Field(min_length=1), Unicode]


class BestOfRow(BaseModel):
    """The finished run of a row with the best value of the ablation's first metric."""

    model_config = ConfigDict(extra="forbid")

    ablation: Annotated[UnicodeText, Field(max_length=200)]
    row: Annotated[UnicodeText, Field(max_length=500, description="The name of the row, as in the table.")]
    scale: Annotated[UnicodeText, Field(max_length=100)] | None = None


class SequencesRequest(BaseModel):
    """Sequences to score: token ids or texts."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"tokens": [[3, 14, 14, 7]], "log_probabilities": True}]}
    )

    tokens: Annotated[list[list[TokenId]], Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Token ids. The first token of each sequence is an input and is not scored."
    )
    text: Text | Annotated[list[Text], Field(min_length=1, max_length=4096)] | None = Field(
        default=None,
        description="Texts for a model with a tokenizer: the end-of-text token is put before each, so every token is "
        "scored. For other models: labels of the task's vocabulary with blanks between them.",
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


class PerplexityRequest(SequencesRequest):
    """Sequences to score with one or several models."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"models": ["95199d1142de555d", {"ablation": "quickstart", "row": "CoPE"}], "tokens": [[3, 14, 14, 7]]}
            ]
        }
    )

    models: Annotated[list[RunId | BestOfRow], Field(min_length=1, max_length=32)] = Field(
        description="Run ids, or the best runs of rows."
    )


class TextUnits(BaseModel):
    """Measures that do not depend on the tokenizer."""

    words: int = Field(description="Words separated by blanks; line breaks count as words.")
    size_bytes: int = Field(description="Size in UTF-8.")
    word_perplexity: float | None = Field(description="exp(nll_sum / words); null if undefined or too large.")
    byte_perplexity: float | None = Field(description="exp(nll_sum / size_bytes); null if a float overflows.")
    bits_per_byte: float


class ScoredTotal(BaseModel):
    """Perplexity over tokens; every token has the same weight."""

    nll_sum: float = Field(description="−Σ log p, in nats.")
    tokens: int = Field(description="Number of scored tokens.")
    perplexity: float | None = Field(description="exp(nll_sum / tokens); null if a float overflows.")
    bits_per_token: float
    text: TextUnits | None = Field(default=None, description="Only for texts of models with a tokenizer.")


class ScoredSequence(ScoredTotal):
    """Perplexity of one sequence. Lists have an entry for each token, of which the first is not scored."""

    log_probabilities: list[float | None] | None = Field(
        default=None, description="Natural logarithms, one per token; the first is null. Only if requested."
    )
    token_ids: list[int] | None = Field(default=None, description="Only with `token_labels`.")
    labels: list[str] | None = Field(default=None, description="The text of each token. Only with `token_labels`.")
    top: list[list[tuple[int, float]] | None] | None = Field(
        default=None, description="Id and log-probability of the most probable tokens; the first entry is null."
    )


class ModelPerplexity(BaseModel):
    run_id: str
    context: int | None = Field(default=None, description="Tokens of a window; null: whole sequences.")
    stride: int | None = None
    total: ScoredTotal
    sequences: list[ScoredSequence]


class PerplexityComparison(BaseModel):
    results: list[ModelPerplexity] = Field(description="One per model, in the order of the request.")
