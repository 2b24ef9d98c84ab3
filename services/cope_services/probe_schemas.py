"""JSON schemas of probe requests and responses."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cope_services.schemas import TokenId, Unicode

ProbeFormat = Literal["json", "svg", "png"]
MEDIA_TYPES: dict[ProbeFormat, str] = {"json": "application/json", "svg": "image/svg+xml", "png": "image/png"}
MatrixName = Literal["gates", "positions", "scores", "position_only_attention", "attention"]
TriangularMatrix = Annotated[
    list[list[float]],
    Field(description="Row i is query i; its values are for the keys 0 … i, rounded to six decimal places."),
]
Index = Annotated[int, Field(ge=0, strict=True)]


class ProbeRequest(BaseModel):
    """A sequence of token ids or a text, and the requested layers, heads, matrices and marks."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"tokens": [3, 14, 14, 7], "layers": [0], "heads": [1]}]}
    )

    tokens: Annotated[list[TokenId], Field(min_length=1)] | None = None
    text: Annotated[str, Field(min_length=1), Unicode] | None = Field(
        default=None,
        description="A text for a model with a tokenizer: the end-of-text token is put before it. For other models: "
        "labels of the task's vocabulary with blanks between them.",
    )
    layers: list[Index] | None = Field(default=None, description="Numbers from 0; null: all.")
    heads: list[Index] | None = Field(default=None, description="Numbers from 0; null: all.")
    matrices: list[MatrixName] = Field(
        default=list(get_args(MatrixName)), description="The requested matrices; an empty list: statistics only."
    )
    marks: dict[str, list[Index]] | None = Field(
        default=None,
        max_length=16,
        description="Mark name → indices of the marked tokens; null: the marks of the task or the text.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens is None) == (self.text is None):
            raise ValueError("give either `tokens` or `text`")
        return self


class ProbedMark(BaseModel):
    """How the gates of a head separate marked tokens from the others; null: undefined for these tokens."""

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
