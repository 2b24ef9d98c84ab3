"""Routes that ask models: perplexity, probes."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from cope_services.http.access import READ
from cope_services.http.components import ComponentsDep, RequireJson
from cope_services.http.errors import INFERENCE_ERRORS, Responses, error_responses
from cope_services.http.reading import negotiate_format
from cope_services.http.work import limited
from cope_services.models.perplexity import compare
from cope_sweep.api.requests import (
    MEDIA_TYPES,
    PerplexityComparison,
    PerplexityRequest,
    ProbeFormat,
    ProbeRequest,
    ProbeResponse,
)

perplexity = APIRouter(tags=["perplexity"], dependencies=[READ], route_class=limited("models"))


@perplexity.post(
    "/perplexity", dependencies=[RequireJson], responses=INFERENCE_ERRORS, response_model=PerplexityComparison
)
async def compare_perplexity(body: PerplexityRequest, components: ComponentsDep, request: Request) -> Response:
    """Perplexity of token ids or texts under one or several models, in total and per sequence.

    A model is a run, or the best run of a row.
    """
    answer = await components.infer(request, lambda: compare(components, body))
    return Response(answer, media_type="application/json")


probes = APIRouter(tags=["probes"], dependencies=[READ], route_class=limited("models"))

ProbeAccept = Annotated[
    str | None, Header(description="`image/svg+xml` or `image/png` for an image. `format` takes precedence.")
]
ProbeFormatName = Annotated[
    ProbeFormat | None, Query(description="svg or png: an image with one row of heatmaps per head, at most 8 heads.")
]

RESPONSES: Responses = {
    200: {"model": ProbeResponse, "content": {MEDIA_TYPES["svg"]: {}, MEDIA_TYPES["png"]: {}}},
    **error_responses(406),
    **INFERENCE_ERRORS,
}


@probes.post("/runs/{run_id}/probe", dependencies=[RequireJson], response_model=None, responses=RESPONSES)
async def probe_heads(
    run_id: str,
    body: ProbeRequest,
    components: ComponentsDep,
    request: Request,
    format: ProbeFormatName = None,  # noqa: A002 - the name in the query
    accept: ProbeAccept = None,
) -> Response:
    """Gates, positions and attention of each head of a finished run's model on one sequence, as JSON or an image."""
    output_format = format or negotiate_format(accept, MEDIA_TYPES, "a probe")

    async def answer() -> bytes:
        return await components.predictors.probe(await components.predictor(run_id), body, output_format)

    content = await components.infer(request, answer)
    return Response(content, media_type=MEDIA_TYPES[output_format], headers={"vary": "Accept"})
