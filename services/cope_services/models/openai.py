"""The part of the OpenAI protocol that scores and completes prompts, for clients such as lm-evaluation-harness.

/v1/completions                   the body names the model: a run id, or ablation/row for the row's best finished run,
                                  with the values of ?scale= and ?set=
/openai/{run_id}/v1/completions   the path names the model, for clients that cannot do it in every body
"""

from __future__ import annotations

import codecs
import threading
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from cope_services.http.access import READ
from cope_services.http.components import Components, ComponentsDep, RequireJson
from cope_services.http.errors import InvalidError, Responses, TooLargeError
from cope_services.http.settings import Settings
from cope_services.http.work import limited
from cope_services.models.predictors import Predictors
from cope_sweep.api.question import Scale, Sets
from cope_sweep.api.requests import Body, TokenIdList, Unicode, UnicodeText
from cope_sweep.api.runs import GetRun, ListRuns
from cope_sweep.errors import TokensError
from cope_sweep.read.queries import check_no_values
from cope_sweep.store import RunRecord

if TYPE_CHECKING:
    from cope_sweep.inference import Generation, Predictor, Scores, Vocabulary

# -- schemas -----------------------------------------------------------------------------------------------------------

MAX_PROMPTS = 1024

ModelName = Annotated[UnicodeText, Field(max_length=701)]
Ids = Annotated[TokenIdList, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=200), Unicode]


class OpenAIError(BaseModel):
    """The body of every error response of these routes."""

    class Error(BaseModel):
        message: str
        type: str
        param: str | None
        code: str | None

    error: Error


OPENAI_ERRORS: Responses = {"4XX": {"model": OpenAIError}, "5XX": {"model": OpenAIError}}
"""Documented error responses. With them, FastAPI does not add a 422, which is never sent."""


class CompletionRequest(Body):
    """A completion request. Other fields of OpenAI's API are errors, because they would have no effect."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "95199d1142de555d", "prompt": [3, 14, 14, 7], "max_tokens": 4}]}
    )

    model: ModelName | None = Field(
        default=None,
        description="A run id, or `ablation/row` for the row's best finished run. Not needed if the path has a run id.",
    )
    prompt: (
        UnicodeText
        | Ids
        | Annotated[list[UnicodeText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(
        description="A text, token ids, or a list of either. For a model without a tokenizer, a text consists of "
        "labels of its vocabulary, separated by spaces. An empty text means the end-of-text token."
    )
    max_tokens: Annotated[int, Field(ge=0, le=1 << 20, strict=True)] = Field(
        default=16, description="Generation also ends when the training context is full."
    )
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = Field(
        default=1, description="0: always the most probable token."
    )
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        default=None, description="Number of most probable tokens to return in addition to the chosen one."
    )
    echo: bool = Field(
        default=False,
        description="Repeat the prompt, with the log-probabilities of the tokens that the task trains.",
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = Field(
        default=None, description="The completion ends before these texts. `logprobs` includes their tokens."
    )
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64, strict=True)] | None = None

    @property
    def scores_prompt(self) -> bool:
        """The request asks for the log-probabilities of the prompt."""
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class Logprobs(BaseModel):
    """One entry per token. It is null for the first token of an echoed prompt, and for tokens that are not trained."""

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
    finish_reason: Literal["stop", "length"]


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
    usage: Usage


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
    max_model_len: int = Field(description="Maximum number of prompt tokens before a generated token.")
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None = None


class TokenizeRequest(Body):
    model: ModelName | None = None
    prompt: UnicodeText
    add_special_tokens: bool = Field(default=True, description="No effect: special tokens are never added.")


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    model: ModelName | None = None
    tokens: TokenIdList


class Detokenized(BaseModel):
    prompt: str


# -- completions -------------------------------------------------------------------------------------------------------

Entry = tuple[int, float | None, list[tuple[int, float]]]
"""A token, its log-probability, and the most probable tokens with theirs."""


async def complete_prompts(predictors: Predictors, predictor: Predictor, request: CompletionRequest) -> Completion:
    """The completions of all prompts. Prompts are scored in batches with other requests, and completed together.

    Raises TooLargeError, BusyError, TokensError, NotFiniteError, CheckpointError.
    """
    from cope_sweep.inference import generate

    batcher = predictors.batcher
    generations = await batcher.prepare(lambda: _generations(predictor, request, predictors.settings))
    cost = _cost(request, generations)
    with batcher.admitted(cost):
        scores = await _score_prompts(predictors, predictor, request, generations)
        cancelled = threading.Event()
        try:
            await batcher.infer(lambda: generate(generations, cancelled.is_set))
        finally:  # the thread goes on after its request is cancelled
            cancelled.set()
        completed = sum(len(generation.tokens) for generation in generations)
        batcher.counts.generated_tokens += completed
        choices = await batcher.prepare(
            lambda: [
                _choice(request, number, generation, score)
                for number, (generation, score) in enumerate(zip(generations, scores, strict=True))
            ]
        )
    prompted = sum(len(generation.prompt_T) for generation in generations)
    return Completion(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=predictor.run.run_id,
        choices=choices,
        usage=Usage(prompt_tokens=prompted, completion_tokens=completed, total_tokens=prompted + completed),
    )


def _generations(predictor: Predictor, request: CompletionRequest, settings: Settings) -> list[Generation]:
    from cope_sweep.inference import Generation, Sampling

    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    sampling = Sampling(request.max_tokens, request.temperature, tuple(stop), request.logprobs or 0)
    generations = []
    for number, prompt in enumerate(request.prompts):
        tokens_T = _prompt_tokens(predictor, prompt, f"prompt {number}")
        if len(tokens_T) > settings.max_tokens:
            raise TooLargeError(
                f"prompt {number} has {len(tokens_T)} tokens; send at most {settings.max_tokens}",
                prompt=number,
                tokens=len(tokens_T),
                limit=settings.max_tokens,
            )
        if request.scores_prompt:
            predictor.check_reach(len(tokens_T) - 1, f"prompt {number} of {len(tokens_T)} tokens")
        # Each completion has its own random numbers, so they do not depend on the other prompts.
        # numpy takes no negative seeds.
        seed = None if request.seed is None else (request.seed % (1 << 64), number)
        generations.append(Generation(predictor, tokens_T, sampling, seed))
    cost = _cost(request, generations)
    if cost > settings.max_request_tokens:
        raise TooLargeError(
            f"the request reads and generates {cost} tokens, but the limit is {settings.max_request_tokens}; send "
            "several requests",
            tokens=cost,
            limit=settings.max_request_tokens,
        )
    return generations


def _prompt_tokens(predictor: Predictor, prompt: str | list[int], name: str) -> np.ndarray:
    from cope_sweep.inference import validate_token_ids

    if not isinstance(prompt, str):
        return validate_token_ids(prompt, predictor.vocabulary_size, name)
    tokens_T = predictor.vocabulary.encode(prompt)
    end_of_text = predictor.vocabulary.end_of_text
    if not len(tokens_T):
        if end_of_text is None:
            raise TokensError(f"{name} is empty; give at least one token", code="too_short", sequence=name, tokens=0)
        return validate_token_ids([end_of_text], predictor.vocabulary_size, name)
    return tokens_T


def _cost(request: CompletionRequest, generations: list[Generation]) -> int:
    """Tokens to read and to generate."""
    scored = sum(len(generation.prompt_T) for generation in generations) if request.scores_prompt else 0
    generated = sum(generation.limit for generation in generations) if request.max_tokens else 0
    return scored + generated


async def _score_prompts(
    predictors: Predictors, predictor: Predictor, request: CompletionRequest, generations: list[Generation]
) -> list[Scores | None]:
    """The scores of each prompt; None for a prompt of one token, and if the request does not ask for them.

    The same forward pass yields the first generated token: clients that only score prompts ask for one token.
    """
    from cope_sweep.inference import Window

    prompt_scores: list[Scores | None] = [None] * len(generations)
    if not request.scores_prompt:
        return prompt_scores
    windows: dict[int, Window] = {}
    for number, generation in enumerate(generations):
        prompt_T = generation.prompt_T
        # A generation that has shortened its prompt starts from other tokens.
        read_last = generation.finish_reason is None and len(generation.ids) == len(prompt_T)
        if read_last or len(prompt_T) > 1:
            windows[number] = Window(prompt_T, np.array(predictor.reading(prompt_T.tolist())), read_last=read_last)
    scored = await predictors.batcher.score(predictor, list(windows.values()), top=request.logprobs or 0)
    for number, scores in zip(windows, scored, strict=True):
        scores.check(predictor.run)
        if scores.next_logits_V is not None:
            generations[number].choose(scores.next_logits_V)
        if len(generations[number].prompt_T) > 1:
            prompt_scores[number] = scores
    return prompt_scores


def _choice(request: CompletionRequest, index: int, generation: Generation, scores: Scores | None) -> Choice:
    vocabulary = generation.predictor.vocabulary
    data = generation.text_bytes
    entries: list[Entry] = [(token.id, token.log_probability, token.top) for token in generation.tokens]
    if request.echo:
        prompt = generation.prompt_T.tolist()
        data = b"".join(map(vocabulary.piece, prompt)) + data
        entries = [*_prompt_entries(generation, scores, request.logprobs or 0), *entries]
    logprobs = None if request.logprobs is None else _logprobs(entries, vocabulary)
    text = data.decode(errors="replace")  # at once: the prompt may end inside a character
    return Choice(index=index, text=text, logprobs=logprobs, finish_reason=generation.finish_reason or "length")


def _prompt_entries(generation: Generation, scores: Scores | None, top: int) -> list[Entry]:
    """The entries of a prompt's tokens. Only trained tokens after the first have log-probabilities."""
    prompt, trained = generation.prompt_T.tolist(), generation.predictor.trained(generation.prompt_T)[1].tolist()
    if scores is None:
        return [(token, None, []) for token in prompt[:1]]
    ids_NK, tops_NK = scores.top_ids_NK[:, :top].tolist(), scores.top_log_probabilities_NK[:, :top].tolist()
    entries: list[Entry] = [(prompt[0], None, [])]
    log_p_N = scores.log_probabilities_N.tolist()
    for token, scored, log_p, ids, tops in zip(prompt[1:], trained[1:], log_p_N, ids_NK, tops_NK, strict=True):
        entries.append((token, log_p, list(zip(ids, tops, strict=True))) if scored else (token, None, []))
    return entries


def _logprobs(entries: list[Entry], vocabulary: Vocabulary) -> Logprobs:
    logprobs, offset = Logprobs(), 0
    # Offsets count characters, and a token may end within one.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token, log_p, top in entries:
        label = vocabulary.label(token)
        logprobs.tokens.append(label)
        logprobs.token_logprobs.append(log_p)
        # The chosen token is always included, with the same float: clients compare them with `==`.
        labelled = None if log_p is None else {vocabulary.label(other): p for other, p in top} | {label: log_p}
        logprobs.top_logprobs.append(labelled)
        logprobs.text_offset.append(offset)
        offset += len(decoder.decode(vocabulary.piece(token)))
    return logprobs


# -- routes ------------------------------------------------------------------------------------------------------------

MAX_MODELS = 1000

models = APIRouter(tags=["OpenAI protocol"], dependencies=[READ], route_class=limited("answers"))
router = APIRouter(tags=["OpenAI protocol"], dependencies=[READ], route_class=limited("models"))
"""Routes that ask a model. The application includes them twice, the second time below `/openai/{run_id}`."""


async def of_run(run_id: Annotated[str, Path(description="A run id.")]) -> None:
    """Document the path parameter of the routes below `/openai/{run_id}`."""


async def _path_run(request: Request) -> str | None:
    run_id: str | None = request.path_params.get("run_id")
    return run_id


PathRun = Annotated[str | None, Depends(_path_run)]
"""The run id in the path; None if it has none."""


class Variant(BaseModel):
    """Parameters of the query that belong to a model `ablation/row`."""

    scale: Scale = None
    set: Sets = []


class ModelQuery(Variant):
    """Parameters of the query of routes where it may name the model."""

    model: Annotated[str | None, Field(max_length=701, description="A run id, or `ablation/row`.")] = None


VariantQuery = Annotated[Variant, Query()]
ModelInQuery = Annotated[ModelQuery, Query()]


@models.get("/v1/models", response_model_exclude_none=True, responses=OPENAI_ERRORS)
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


@models.get("/v1/models/{model}", response_model_exclude_none=True, responses=OPENAI_ERRORS)
def get_model(model: str, components: ComponentsDep) -> Model:
    """One finished run."""
    components.queries.finished(model)
    return _model(components.queries.ask(GetRun(run_id=model, curve=False)))


def _model(run: RunRecord) -> Model:
    return Model(id=run.run_id, created=(run.created_ms or 0) // 1000, ablations=run.ablations, row=run.row)


@router.post("/v1/completions", dependencies=[RequireJson], responses=OPENAI_ERRORS, response_model=Completion)
async def create_completion(
    body: CompletionRequest, components: ComponentsDep, request: Request, run: PathRun, variant: VariantQuery
) -> Response:
    """Continue and score prompts."""

    async def answer() -> str:
        predictor = await _predictor(_model_name(run, body.model), variant, components)
        completion = await complete_prompts(components.predictors, predictor, body)
        return await components.predictors.batcher.prepare(completion.model_dump_json)

    return Response(await components.infer(request, answer), media_type="application/json")


@router.get("/tokenizer_info", responses=OPENAI_ERRORS)
async def get_tokenizer_info(components: ComponentsDep, run: PathRun, query: ModelInQuery) -> TokenizerInfo:
    """The special tokens of a model."""
    predictor = await _predictor(_model_name(run, query.model), query, components)
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


@router.post("/tokenize", dependencies=[RequireJson], responses=OPENAI_ERRORS)
async def tokenize(body: TokenizeRequest, components: ComponentsDep, run: PathRun, query: ModelInQuery) -> Tokens:
    """The token ids of a text. The label of the end-of-text token alone becomes that token."""
    predictor = await _predictor(_model_name(run, body.model or query.model), query, components)
    vocabulary = predictor.vocabulary
    end = vocabulary.end_of_text
    if end is not None and body.prompt == vocabulary.label(end):
        tokens = [end]
    else:
        tokens = (await components.predictors.batcher.prepare(lambda: vocabulary.encode(body.prompt))).tolist()
    return Tokens(tokens=tokens, count=len(tokens), max_model_len=predictor.context + 1)


@router.post("/detokenize", dependencies=[RequireJson], responses=OPENAI_ERRORS)
async def detokenize(
    body: DetokenizeRequest, components: ComponentsDep, run: PathRun, query: ModelInQuery
) -> Detokenized:
    """The text of token ids."""
    from cope_sweep.inference import decode, validate_token_ids

    predictor = await _predictor(_model_name(run, body.model or query.model), query, components)

    def text() -> str:
        return decode(predictor.vocabulary, validate_token_ids(body.tokens, predictor.vocabulary_size))

    return Detokenized(prompt=await components.predictors.batcher.prepare(text))


def _model_name(in_path: str | None, in_body: str | None) -> str:
    """The model that a request names. Raises InvalidError if it names no model, or two different ones."""
    if in_path is not None and in_body is not None and in_body != in_path:
        raise InvalidError(
            f"the path names the run {in_path[:40]}, but `model` is {in_body[:40]!r}; leave out `model`",
            code="two_models",
            path=in_path[:40],
            model=in_body[:40],
        )
    name = in_path or in_body
    if name is None:
        raise InvalidError(
            "the request names no model; add `model`, or use /openai/RUN_ID/ (/v1/models lists the models)",
            code="no_model",
        )
    return name


async def _predictor(name: str, variant: Variant, components: Components) -> Predictor:
    """The model of a run, or of a row's best finished run (`ablation/row`), with the values of the variant."""
    ablation, is_row, row = name.partition("/")
    if is_row:
        return await components.predictor(await components.best_run_id(ablation, row, variant.scale, variant.set))
    check_no_values(variant.scale, variant.set)
    return await components.predictor(name)
