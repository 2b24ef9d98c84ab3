"""The supported part of the OpenAI protocol, for clients such as lm-evaluation-harness.

    /v1/completions                   the request names the model, a run id
    /openai/{run_id}/v1/completions   the path does, for clients whose other requests cannot

Prompts are scored and continued in batches with other requests.
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cope_services.http.access import INFER, READ
from cope_services.http.components import Components, ComponentsDep, PreparePlans, RequireJson
from cope_services.http.errors import (
    INTERNAL_ERROR,
    InvalidError,
    Responses,
    ServiceError,
    TooLargeError,
    answer_to,
    error_object,
)
from cope_services.http.settings import Settings
from cope_services.models.predictors import Predictors
from cope_sweep.api.answers import RunSummary
from cope_sweep.api.questions import GetRun, ListRuns
from cope_sweep.api.requests import Body, TokenIds, Unicode, UnicodeText
from cope_sweep.errors import TokensError, UserError

if TYPE_CHECKING:
    from cope_sweep.inference import Generation, Predictor, Scores, Vocabulary

# -- schemas -----------------------------------------------------------------------------------------------------------

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
    created: int = Field(description="Start of the run, in seconds since 1970.")
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


# -- completions -------------------------------------------------------------------------------------------------------

DEFAULT_MAX_TOKENS = 16

Entry = tuple[int, float | None, list[tuple[int, float]]]
"""A token, its log-probability, and the most probable tokens with theirs."""


@dataclass
class _Choice:
    """One completion, and how much of it the client has."""

    index: int
    prompt: list[int]
    trained: list[bool]
    """Whether the task trains each token of the prompt; only trained ones have log-probabilities."""
    generation: Generation | None
    """None if no token is asked for."""
    scores: Scores | None = None
    """Log-probabilities of the prompt; None if they are not asked for, or if the prompt has one token."""
    begun: bool = False
    ended: bool = False
    sent_tokens: int = 0
    """Generated tokens."""
    sent_characters: int = 0
    """Characters of the generated text."""
    offset: int = 0
    """Characters of the tokens that were sent, the prompt's included."""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def next_part(self, request: CompletionRequest, vocabulary: Vocabulary) -> Choice | None:
        """Text that was added since the last call; None for nothing."""
        if self.ended:
            return None
        text, entries = "", []
        if request.echo and not self.begun:
            text = b"".join(map(vocabulary.piece, self.prompt)).decode(errors="replace")
            entries = _prompt_entries(self.prompt, self.trained, self.scores, request.logprobs or 0)
        self.begun = True
        reason: Literal["stop", "length"] | None = "length"
        if self.generation is not None:
            # Read first: a generation that has a reason has its whole text.
            reason = self.generation.finish_reason
            text += self.generation.text[self.sent_characters :]
            self.sent_characters = len(self.generation.text)
            new = self.generation.tokens[self.sent_tokens :]
            self.sent_tokens += len(new)
            entries += [(token.id, token.log_probability, token.top) for token in new]
        self.ended = reason is not None
        if not (text or entries or self.ended):
            return None
        logprobs = None if request.logprobs is None else self._logprobs(entries, vocabulary)
        return Choice(index=self.index, text=text, logprobs=logprobs, finish_reason=reason)

    def _logprobs(self, entries: list[Entry], vocabulary: Vocabulary) -> Logprobs:
        logprobs = Logprobs()
        for token, log_p, top in entries:
            label = vocabulary.label(token)
            logprobs.tokens.append(label)
            logprobs.token_logprobs.append(log_p)
            # With the chosen token, whose float is the same one: clients compare them with `==`.
            labelled = None if log_p is None else {vocabulary.label(other): p for other, p in top} | {label: log_p}
            logprobs.top_logprobs.append(labelled)
            logprobs.text_offset.append(self.offset)
            self.offset += len(self.decoder.decode(vocabulary.piece(token)))
        return logprobs


def _prompt_entries(prompt: list[int], trained: list[bool], scores: Scores | None, top: int) -> list[Entry]:
    """The entries of a prompt's tokens. Only those after the first that the task trains have log-probabilities."""
    entries: list[Entry] = [(prompt[0], None, [])]
    if scores is not None:
        ids_NK, tops_NK = scores.top_ids_NK[:, :top].tolist(), scores.top_log_probabilities_NK[:, :top].tolist()
        log_p_N = scores.log_probabilities_N.tolist()
        for token, scored, log_p, ids, tops in zip(prompt[1:], trained[1:], log_p_N, ids_NK, tops_NK, strict=True):
            entries.append((token, log_p, list(zip(ids, tops, strict=True))) if scored else (token, None, []))
    return entries


async def complete(predictors: Predictors, predictor: Predictor, request: CompletionRequest) -> Completion:
    """All completions of a request. Raises as `parts`."""
    whole: dict[int, Choice] = {}
    async with aclosing(parts(predictors, predictor, request)) as all_parts:
        async for part in all_parts:
            last = part
            for choice in part.choices:
                known = whole.setdefault(choice.index, choice)
                if known is not choice:
                    _extend(known, choice)
    return last.model_copy(update={"choices": [whole[index] for index in sorted(whole)]})


def _extend(known: Choice, part: Choice) -> None:
    known.text += part.text
    known.finish_reason = part.finish_reason
    if known.logprobs is not None and part.logprobs is not None:
        for name, values in part.logprobs:
            getattr(known.logprobs, name).extend(values)


async def parts(
    predictors: Predictors, predictor: Predictor, request: CompletionRequest
) -> AsyncGenerator[Completion, None]:
    """The completions in parts, as they grow. The last part has the usage and no choices.

    Raises TooLargeError, BusyError, TimeLimitError, TokensError, CheckpointError.
    """
    batcher, settings = predictors.batcher, predictors.settings
    choices = await batcher.prepare(lambda: _choices(predictor, request, settings))
    generations = [choice.generation for choice in choices if choice.generation is not None]
    header = Completion(id=f"cmpl-{uuid.uuid4().hex}", created=int(time.time()), model=predictor.run.run_id, choices=[])
    with batcher.admitted(_cost(request, choices)):
        await _score_prompts(predictors, predictor, request, choices)
        async with aclosing(batcher.generate(generations, settings.max_seconds)) as progress:
            async for _ in progress:
                for generation in generations:
                    if generation.error is not None:
                        raise generation.error
                found = [choice.next_part(request, predictor.vocabulary) for choice in choices]
                if new := [part for part in found if part is not None]:
                    yield header.model_copy(update={"choices": new})
    prompted = sum(len(choice.prompt) for choice in choices) // request.n
    completed = sum(len(generation.tokens) for generation in generations)
    usage = Usage(prompt_tokens=prompted, completion_tokens=completed, total_tokens=prompted + completed)
    yield header.model_copy(update={"usage": usage})


def _choices(predictor: Predictor, request: CompletionRequest, settings: Settings) -> list[_Choice]:
    """The completions to make. Raises TokensError and TooLargeError."""
    from cope_sweep.inference import Generation, Sampling

    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    sampling = Sampling(
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(0, request.top_k),
        stop=tuple(stop),
        top=request.logprobs or 0,
    )
    choices: list[_Choice] = []
    for number, prompt in enumerate(request.prompts):
        tokens_T = _prompt_tokens(predictor, prompt, f"prompt {number}")
        if len(tokens_T) > settings.max_tokens:
            raise TooLargeError(f"prompt {number} has {len(tokens_T)} tokens; the limit is {settings.max_tokens}")
        if _scores_prompt(request):
            predictor.check_reach(len(tokens_T) - 1, f"prompt {number} of {len(tokens_T)} tokens")
        trained = predictor.trained(tokens_T)[1].tolist()
        for copy in range(request.n):
            # Each completion has its own random numbers, which do not depend on what else is asked for.
            seed = None if request.seed is None else (request.seed % (1 << 64), number, copy)
            generation = Generation(predictor, tokens_T, sampling, seed) if sampling.max_tokens else None
            choices.append(_Choice(len(choices), tokens_T.tolist(), trained, generation))
    cost = _cost(request, choices)
    if cost > settings.max_request_tokens:
        raise TooLargeError(
            f"{cost} tokens to read and generate; one request may have {settings.max_request_tokens}, so send several"
        )
    return choices


def _prompt_tokens(predictor: Predictor, prompt: str | list[int], name: str) -> np.ndarray:
    from cope_sweep.inference import validate_token_ids

    if not isinstance(prompt, str):
        return validate_token_ids(prompt, predictor.vocabulary_size, name)
    tokens_T = predictor.vocabulary.encode(prompt)
    end_of_text = predictor.vocabulary.end_of_text
    if not len(tokens_T):
        if end_of_text is None:
            raise TokensError(f"{name} is empty; give at least one token")
        return validate_token_ids([end_of_text], predictor.vocabulary_size, name)
    return tokens_T


def _scores_prompt(request: CompletionRequest) -> bool:
    return request.echo and request.logprobs is not None


def _cost(request: CompletionRequest, choices: list[_Choice]) -> int:
    """Tokens to read and to generate."""
    scored = sum(len(choice.prompt) for choice in choices) // request.n if _scores_prompt(request) else 0
    return scored + sum(choice.generation.limit for choice in choices if choice.generation is not None)


async def _score_prompts(
    predictors: Predictors, predictor: Predictor, request: CompletionRequest, choices: list[_Choice]
) -> None:
    """Score the prompts, if the client asks for it, once for all their completions.

    The same pass gives the first generated token: a client that only scores prompts asks for one.
    """
    from cope_sweep.inference import Window

    if not _scores_prompt(request):
        return
    groups = [choices[first : first + request.n] for first in range(0, len(choices), request.n)]
    windows: dict[int, Window] = {}
    for number, group in enumerate(groups):
        first, prompt = group[0].generation, group[0].prompt
        # A generation that shortened its prompt starts from other tokens.
        read_last = first is not None and len(first.ids) == len(prompt)
        if read_last or len(prompt) > 1:
            windows[number] = Window(np.array(prompt), np.array(predictor.reading(prompt)), read_last=read_last)
    scored = await predictors.batcher.score(predictor, list(windows.values()), top=request.logprobs or 0)
    for number, scores in zip(windows, scored, strict=True):
        scores.check(predictor.run)
        for choice in groups[number]:
            choice.scores = scores if len(choice.prompt) > 1 else None
            if choice.generation is not None and scores.next_logits_V is not None:
                choice.generation.choose(scores.next_logits_V)


# -- routes ------------------------------------------------------------------------------------------------------------

MAX_MODELS = 1000
END_OF_STREAM = b"data: [DONE]\n\n"

COMPLETION_RESPONSES: Responses = {200: {"model": Completion, "content": {"text/event-stream": {}}}, **OPENAI_ERRORS}

models = APIRouter(tags=["OpenAI protocol"])
router = APIRouter(tags=["OpenAI protocol"])
"""Routes that ask a model: `create_app` has them twice, the second time below `/openai/{run_id}`."""


async def of_run(run_id: Annotated[str, Path(description="A run id.")]) -> None:
    """Document the parameter of the second ones."""


async def _path_run(request: Request) -> str | None:
    run_id: str | None = request.path_params.get("run_id")
    return run_id


PathRun = Annotated[str | None, Depends(_path_run)]
"""The run of the path; None where it has none."""
ModelParameter = Annotated[str | None, Query(max_length=200, description="A run id.")]


@models.get("/v1/models", dependencies=[READ, PreparePlans], response_model_exclude_none=True, responses=OPENAI_ERRORS)
def list_models(
    components: ComponentsDep,
    limit: Annotated[int, Query(ge=1, le=MAX_MODELS)] = MAX_MODELS,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> ModelList:
    """The finished runs, newest first."""
    page = components.queries.ask(
        ListRuns(status=("finished",), sort="created_ms", descending=True, limit=limit, offset=offset)
    )
    return ModelList(data=[_model(run) for run in page.runs])


@models.get(
    "/v1/models/{model}", dependencies=[READ, PreparePlans], response_model_exclude_none=True, responses=OPENAI_ERRORS
)
def get_model(model: str, components: ComponentsDep) -> Model:
    """One finished run."""
    components.queries.finished(model)
    return _model(components.queries.ask(GetRun(run_id=model, curve=False)))


def _model(run: RunSummary) -> Model:
    return Model(id=run.run_id, created=(run.created_ms or 0) // 1000, ablations=run.ablations, row=run.row)


@router.post("/v1/completions", dependencies=[INFER, RequireJson], responses=COMPLETION_RESPONSES, response_model=None)
async def create_completion(
    body: CompletionRequest, components: ComponentsDep, request: Request, run: PathRun
) -> Response:
    """Continue and score prompts. With `stream`, the response is a stream of server-sent events."""
    named = _named(run, body.model)
    predictor = await components.infer(request, lambda: components.predictor(named))
    if not body.stream:
        completion = await components.infer(request, lambda: complete(components.predictors, predictor, body))
        return Response(completion.model_dump_json(), media_type="application/json")
    stream = parts(components.predictors, predictor, body)
    # Errors before the first part have a status.
    first = await components.infer(request, lambda: anext(stream))
    return StreamingResponse(_events(first, stream, body), media_type="text/event-stream")


@router.get("/tokenizer_info", dependencies=[INFER], responses=OPENAI_ERRORS)
async def get_tokenizer_info(components: ComponentsDep, run: PathRun, model: ModelParameter = None) -> TokenizerInfo:
    """The special tokens of a model."""
    predictor = await _predictor(_named(run, model), components)
    end = predictor.vocabulary.end_of_text
    label = None if end is None else predictor.vocabulary.label(end)
    return TokenizerInfo(
        model=predictor.run.run_id,
        tokenizer_class=type(predictor.vocabulary).__name__,
        vocabulary_size=predictor.vocabulary_size,
        max_model_len=predictor.context + 1,
        bos_token=label,
        eos_token=label,
        pad_token=label,
    )


@router.post("/tokenize", dependencies=[INFER, RequireJson], responses=OPENAI_ERRORS)
async def tokenize(
    body: TokenizeRequest, components: ComponentsDep, run: PathRun, model: ModelParameter = None
) -> Tokens:
    """The ids of a text. A text that is nothing but the end-of-text token is that token."""
    predictor = await _predictor(_named(run, body.model or model), components)
    vocabulary = predictor.vocabulary
    end = vocabulary.end_of_text
    if end is not None and body.prompt == vocabulary.label(end):
        tokens = [end]
    else:
        tokens = (await components.predictors.batcher.prepare(lambda: vocabulary.encode(body.prompt))).tolist()
    return Tokens(tokens=tokens, count=len(tokens), max_model_len=predictor.context + 1)


@router.post("/detokenize", dependencies=[INFER, RequireJson], responses=OPENAI_ERRORS)
async def detokenize(
    body: DetokenizeRequest, components: ComponentsDep, run: PathRun, model: ModelParameter = None
) -> Detokenized:
    """The text of token ids."""
    from cope_sweep.inference import decode, validate_token_ids

    predictor = await _predictor(_named(run, body.model or model), components)

    def text() -> str:
        return decode(predictor.vocabulary, validate_token_ids(body.tokens, predictor.vocabulary_size))

    return Detokenized(prompt=await components.predictors.batcher.prepare(text))


def _named(in_path: str | None, named: str | None) -> str:
    """The run that a request asks. Raises InvalidError where it names none, or another one than its path."""
    if in_path is not None and named is not None and named != in_path:
        raise InvalidError(
            f"the path is of the run {in_path[:40]}, but `model` is {named[:40]!r}; send the same or none"
        )
    if (run_id := in_path or named) is None:
        raise InvalidError("no model is named: send `model`, or use /openai/RUN_ID/; /v1/models lists the models")
    return run_id


async def _predictor(run_id: str, components: Components) -> Predictor:
    """The model of a run, if not too many requests wait."""
    with components.predictors.batcher.entered():
        return await components.predictor(run_id)


async def _events(
    first: Completion, stream: AsyncGenerator[Completion, None], body: CompletionRequest
) -> AsyncIterator[bytes]:
    """Server-sent events. An error ends the stream, as an event."""
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    async with aclosing(stream):
        part: Completion | None = first
        while part is not None:
            if part.choices or with_usage:
                yield b"data: " + part.model_dump_json().encode() + b"\n\n"
            try:
                part = await anext(stream, None)
            except (ServiceError, UserError) as error:
                yield b"data: " + error_object(*answer_to(error), str(error)) + b"\n\n"
                return
            except Exception:
                yield b"data: " + error_object(500, "internal_error", INTERNAL_ERROR) + b"\n\n"
                raise  # for the server's log
        yield END_OF_STREAM
