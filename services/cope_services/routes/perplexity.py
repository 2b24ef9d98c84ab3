"""Routes of perplexity: of the model of one run, and of several models."""

from fastapi import APIRouter, Request, Response

from cope_services.access import INFER
from cope_services.dependencies import ComponentsDep, RequireJson
from cope_services.perplexity import compare, measure
from cope_services.perplexity_schemas import (
    ModelPerplexity,
    PerplexityComparison,
    PerplexityRequest,
    SequencesRequest,
)
from cope_services.schemas import INFERENCE_ERRORS

router = APIRouter(tags=["perplexity"], dependencies=[INFER])


@router.post("/perplexity", dependencies=[RequireJson], responses=INFERENCE_ERRORS, response_model=PerplexityComparison)
async def compare_perplexity(body: PerplexityRequest, components: ComponentsDep, request: Request) -> Response:
    """Perplexity of token ids or texts under several models: runs, or the best runs of rows."""
    queries, predictors = components.queries, components.predictors
    answer = await components.infer(request, lambda: compare(queries, predictors, body))
    return Response(answer, media_type="application/json")


@router.post(
    "/runs/{run_id}/perplexity", dependencies=[RequireJson], responses=INFERENCE_ERRORS, response_model=ModelPerplexity
)
async def measure_perplexity(
    run_id: str, body: SequencesRequest, components: ComponentsDep, request: Request
) -> Response:
    """Perplexity of token ids or texts under the model of a finished run: in total and per sequence."""

    async def answer() -> bytes:
        return await measure(components.predictors, await components.predictor(run_id), body)

    return Response(await components.infer(request, answer), media_type="application/json")
