"""Route that compares the perplexity of several models."""

from fastapi import APIRouter, Request

from cope_services.access import INFER
from cope_services.dependencies import ComponentsDep, RequireJson
from cope_services.perplexity import compare
from cope_services.perplexity_schemas import PerplexityComparison, PerplexityRequest
from cope_services.schemas import INFERENCE_ERRORS

router = APIRouter(prefix="/perplexity", tags=["perplexity"])


@router.post("", dependencies=[INFER, RequireJson], response_model_exclude_unset=True, responses=INFERENCE_ERRORS)
async def compare_perplexity(
    body: PerplexityRequest, components: ComponentsDep, request: Request
) -> PerplexityComparison:
    """Perplexity of token ids or texts under several models: runs, or the best runs of rows."""
    return await components.infer(request, lambda: compare(components.queries, components.predictors, body))
