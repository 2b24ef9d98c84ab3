"""Routes of the OpenAI protocol, for clients that speak it, such as lm-evaluation-harness.

    /v1/completions                   the request names the model, a run id
    /openai/{run_id}/v1/completions   the path does, for clients whose other requests cannot

`router` has the first, `run_router` the second.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from cope_services.http.access import INFER, READ
from cope_services.http.components import Components, ComponentsDep, PreparePlans, RequireJson
from cope_services.http.errors import INTERNAL_ERROR, InvalidError, ServiceError, error_object
from cope_services.http.schemas import Responses
from cope_services.models.completions import complete, parts
from cope_services.models.openai_schemas import (
    OPENAI_ERRORS,
    Completion,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    Model,
    ModelList,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
)
from cope_services.models.predictors import service_errors
from cope_sweep.api.answers import RunSummary
from cope_sweep.api.questions import GetRun, ListRuns

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor

MAX_MODELS = 1000
END_OF_STREAM = b"data: [DONE]\n\n"

COMPLETION_RESPONSES: Responses = {200: {"model": Completion, "content": {"text/event-stream": {}}}, **OPENAI_ERRORS}

ModelParameter = Annotated[str | None, Query(max_length=200, description="A run id.")]

router = APIRouter(tags=["OpenAI protocol"])
run_router = APIRouter(prefix="/openai/{run_id}", tags=["OpenAI protocol, one run"])


# -- the model is in the request


@router.get("/v1/models", dependencies=[READ, PreparePlans], response_model_exclude_none=True, responses=OPENAI_ERRORS)
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


@router.get(
    "/v1/models/{model}", dependencies=[READ, PreparePlans], response_model_exclude_none=True, responses=OPENAI_ERRORS
)
def get_model(model: str, components: ComponentsDep) -> Model:
    """One finished run."""
    components.queries.finished(model)
    return _model(components.queries.ask(GetRun(model, curve=False)))


@router.post("/v1/completions", dependencies=[INFER, RequireJson], responses=COMPLETION_RESPONSES, response_model=None)
async def create_completion(body: CompletionRequest, components: ComponentsDep, request: Request) -> Response:
    """Continue and score prompts. With `stream`, the response is a stream of server-sent events."""
    return await _complete(body.model, body, components, request)


@router.get("/tokenizer_info", dependencies=[INFER], responses=OPENAI_ERRORS)
async def get_tokenizer_info(components: ComponentsDep, model: ModelParameter = None) -> TokenizerInfo:
    """The special tokens of a model."""
    return await _tokenizer_info(model, components)


@router.post("/tokenize", dependencies=[INFER, RequireJson], responses=OPENAI_ERRORS)
async def tokenize(body: TokenizeRequest, components: ComponentsDep, model: ModelParameter = None) -> Tokens:
    """The ids of a text. A text that is nothing but the end-of-text token is that token."""
    return await _tokenize(body.model or model, body, components)


@router.post("/detokenize", dependencies=[INFER, RequireJson], responses=OPENAI_ERRORS)
async def detokenize(body: DetokenizeRequest, components: ComponentsDep, model: ModelParameter = None) -> Detokenized:
    """The text of token ids."""
    return await _detokenize(body.model or model, body, components)


# -- the model is in the path


@run_router.post(
    "/v1/completions", dependencies=[INFER, RequireJson], responses=COMPLETION_RESPONSES, response_model=None
)
async def create_run_completion(
    run_id: str, body: CompletionRequest, components: ComponentsDep, request: Request
) -> Response:
    """Like `/v1/completions`."""
    return await _complete(_one(run_id, body.model), body, components, request)


@run_router.get("/tokenizer_info", dependencies=[INFER], responses=OPENAI_ERRORS)
async def get_run_tokenizer_info(run_id: str, components: ComponentsDep) -> TokenizerInfo:
    """Like `/tokenizer_info`."""
    return await _tokenizer_info(run_id, components)


@run_router.post("/tokenize", dependencies=[INFER, RequireJson], responses=OPENAI_ERRORS)
async def tokenize_for_run(run_id: str, body: TokenizeRequest, components: ComponentsDep) -> Tokens:
    """Like `/tokenize`."""
    return await _tokenize(_one(run_id, body.model), body, components)


@run_router.post("/detokenize", dependencies=[INFER, RequireJson], responses=OPENAI_ERRORS)
async def detokenize_for_run(run_id: str, body: DetokenizeRequest, components: ComponentsDep) -> Detokenized:
    """Like `/detokenize`."""
    return await _detokenize(_one(run_id, body.model), body, components)


# -- what both do


def _one(run_id: str, named: str | None) -> str:
    """The run of the path. Raises InvalidError where the request names another one."""
    if named not in (None, run_id):
        raise InvalidError(
            f"the path is of the run {run_id[:40]}, but `model` is {named[:40]!r}; send the same or none"
        )
    return run_id


def _model(run: RunSummary) -> Model:
    return Model(id=run.run_id, created=(run.created_ms or 0) // 1000, ablations=run.ablations, row=run.row)


async def _predictor(model: str | None, components: Components) -> "Predictor":
    if model is None:
        raise InvalidError("no model is named: send `model`, or use /openai/RUN_ID/; /v1/models lists the models")
    return await components.predictor(model)


async def _waiting(model: str | None, components: Components) -> "Predictor":
    """`_predictor`, if not too many requests wait."""
    with components.predictors.batcher.entered():
        return await _predictor(model, components)


async def _complete(model: str | None, body: CompletionRequest, components: Components, request: Request) -> Response:
    predictor = await components.infer(request, lambda: _predictor(model, components))
    if not body.stream:
        completion = await components.infer(request, lambda: complete(components.predictors, predictor, body))
        return Response(completion.model_dump_json(), media_type="application/json")
    stream = parts(components.predictors, predictor, body)
    # Errors before the first part have a status.
    first = await components.infer(request, lambda: anext(stream))
    return StreamingResponse(_events(first, stream, body), media_type="text/event-stream")


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
            except ServiceError as error:
                yield b"data: " + error_object(error.status, error.code, str(error)) + b"\n\n"
                return
            except Exception:
                yield b"data: " + error_object(500, "internal_error", INTERNAL_ERROR) + b"\n\n"
                raise  # for the server's log
        yield END_OF_STREAM


async def _tokenizer_info(model: str | None, components: Components) -> TokenizerInfo:
    predictor = await _waiting(model, components)
    with service_errors():
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


async def _tokenize(model: str | None, body: TokenizeRequest, components: Components) -> Tokens:
    predictor = await _waiting(model, components)
    with service_errors():
        vocabulary = predictor.vocabulary
        end = vocabulary.end_of_text
        if end is not None and body.prompt == vocabulary.label(end):
            tokens = [end]
        else:
            tokens = (await components.predictors.batcher.prepare(lambda: vocabulary.encode(body.prompt))).tolist()
    return Tokens(tokens=tokens, count=len(tokens), max_model_len=predictor.context + 1)


async def _detokenize(model: str | None, body: DetokenizeRequest, components: Components) -> Detokenized:
    from cope_sweep.inference import decode, validate_token_ids

    predictor = await _waiting(model, components)
    with service_errors():
        tokens_T = validate_token_ids(body.tokens, predictor.vocabulary_size)
        return Detokenized(prompt=decode(predictor.vocabulary, tokens_T))
