"""Route of probes: what the heads of a model do on a sequence."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from cope_services.access import INFER
from cope_services.dependencies import ComponentsDep, RequireJson
from cope_services.errors import NotAcceptableError
from cope_services.probe_schemas import MEDIA_TYPES, ProbeFormat, ProbeRequest, ProbeResponse
from cope_services.schemas import INFERENCE_ERRORS, Responses, error_responses

router = APIRouter(tags=["probes"], dependencies=[INFER])

Accept = Annotated[str | None, Header(description="`image/svg+xml` or `image/png`: a picture. `format` has priority.")]
FormatName = Annotated[
    ProbeFormat | None, Query(description="svg or png: a picture, a row of heatmaps for each head, of at most 8 heads.")
]

RESPONSES: Responses = {
    200: {"model": ProbeResponse, "content": {MEDIA_TYPES["svg"]: {}, MEDIA_TYPES["png"]: {}}},
    **error_responses(406),
    **INFERENCE_ERRORS,
}


@router.post("/runs/{run_id}/probe", dependencies=[RequireJson], response_model=None, responses=RESPONSES)
async def probe_heads(
    run_id: str,
    body: ProbeRequest,
    components: ComponentsDep,
    request: Request,
    format: FormatName = None,  # noqa: A002
    accept: Accept = None,
) -> Response:
    """Gates, positions and attention of each head of a finished run's model for one sequence: arrays or a picture."""
    output_format = format or _negotiated(accept)

    async def answer() -> bytes:
        return await components.predictors.probe(await components.predictor(run_id), body, output_format)

    content = await components.infer(request, answer)
    return Response(content, media_type=MEDIA_TYPES[output_format], headers={"vary": "Accept"})


def _negotiated(accept: str | None) -> ProbeFormat:
    """The format that the client prefers. Raises NotAcceptableError."""
    media = parse_accept_header(accept or "*/*", MIMEAccept).best_match(MEDIA_TYPES.values())
    for name, media_type in MEDIA_TYPES.items():
        if media_type == media:
            return name
    known = ", ".join(MEDIA_TYPES.values())
    raise NotAcceptableError(f"a probe is available as {known}; choose one with Accept or ?format=NAME")
