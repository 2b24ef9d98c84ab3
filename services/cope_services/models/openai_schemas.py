"""JSON schemas of the OpenAI protocol, as far as this service speaks it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cope_services.http.schemas import Responses
from cope_sweep.api.requests import Body, TokenIds, Unicode, UnicodeText

MAX_PROMPTS = 1024

ModelName = Annotated[UnicodeText, Field(max_length=200)]
Ids = Annotated[TokenIds, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=200), Unicode]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class OpenAIError(BaseModel):
    """The body of every error response of these routes."""

    class Error(BaseModel):
        message: str
        type: str
        param: str | None
        code: str | None

    error: Error


OPENAI_ERRORS: Responses = {"4XX": {"model": OpenAIError}, "5XX": {"model": OpenAIError}}
"""The documentation of the error responses: with these, FastAPI does not add a 422, which is never sent."""


class StreamOptions(Body):
    include_usage: bool = False


class CompletionRequest(Body):
    """A completion request. Fields of OpenAI's API that change nothing here are accepted with their defaults only."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "95199d1142de555d", "prompt": [3, 14, 14, 7], "max_tokens": 4}]}
    )

    model: ModelName | None = Field(default=None, description="A run id. May be missing where the path has it.")
    prompt: (
        UnicodeText
        | Ids
        | Annotated[list[UnicodeText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(
        description="A text, token ids, or a list of either. For a model without a tokenizer, a text consists of "
        "labels of its vocabulary with blanks between them. An empty text is the end-of-text token."
    )
    max_tokens: Annotated[int, Field(ge=0, le=1 << 20, strict=True)] | None = Field(
        default=None, description="Default 16. Generation also ends where the context of the training does."
    )
    temperature: Annotated[Finite, Field(ge=0, le=10)] = Field(default=1, description="0: the most probable token.")
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1
    top_k: Annotated[int, Field(ge=-1, le=1 << 31, strict=True)] = Field(default=0, description="0 and −1: all tokens.")
    n: Annotated[int, Field(ge=1, le=64, strict=True)] = Field(default=1, description="Completions of each prompt.")
    best_of: Annotated[int, Field(ge=1, le=64, strict=True)] | None = Field(default=None, description="Only `n`.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        default=None, description="Number of most probable tokens to report besides the chosen one."
    )
    echo: bool = Field(
        default=False,
        description="Whether the prompt is repeated, with the log-probabilities of the tokens that the task trains.",
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = Field(
        default=None, description="Texts before which the completion ends. `logprobs` has their tokens, too."
    )
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64, strict=True)] | None = None
    user: Annotated[UnicodeText, Field(max_length=1000)] | None = Field(default=None, description="Ignored.")
    suffix: Literal[None] = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """OpenAI's fields may be null, which means their default."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @field_validator("suffix", "logit_bias", "presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _refuse(cls, value: object) -> object:
        if value:
            raise ValueError("this field is not implemented; leave it out")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not implemented: leave it out, or send the value of n")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are only for `stream: true`")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]


class Logprobs(BaseModel):
    """One entry per token. Tokens of an echoed prompt that the task does not train have none, nor has the first."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = Field(
        default=[], description="The most probable tokens and the chosen one, with its very number."
    )
    text_offset: list[int] = []


class Choice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When the run was begun, in seconds since 1970.")
    owned_by: Literal["cope-sweep"] = "cope-sweep"
    ablations: list[str] = Field(default=[], description="Ablations that contain the run.")
    row: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizerInfo(BaseModel):
    """The special tokens; null for a model without a tokenizer."""

    model: str
    tokenizer_class: str
    vocabulary_size: int
    max_model_len: int = Field(description="Tokens of the longest prompt that a generated token may follow.")
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None = None


class TokenizeRequest(Body):
    model: ModelName | None = None
    prompt: UnicodeText
    add_special_tokens: bool = Field(default=True, description="Changes nothing: no special tokens are added.")


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    model: ModelName | None = None
    tokens: TokenIds


class Detokenized(BaseModel):
    prompt: str
