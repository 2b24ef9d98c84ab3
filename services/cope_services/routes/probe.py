"""Route of probes: what the heads of a model do on a sequence."""

from fastapi import APIRouter, Request

from cope_services.dependencies import ComponentsDep, RequireJson
from cope_services.schemas import INFERENCE_ERRORS, ProbeRequest, ProbeResponse

router = APIRouter(tags=["probes"])


@router.post(
    "/runs/{run_id}/probe",
    dependencies=[RequireJson],
    response_model_exclude_unset=True,
    responses=INFERENCE_ERRORS,
)
async def probe_heads(run_id: str, body: ProbeRequest, components: ComponentsDep, request: Request) -> ProbeResponse:
    """Gates, positions and attention of each head of a finished run's model for one sequence."""

    async def answer() -> ProbeResponse:
        return await components.predictors.probe(await components.predictor(run_id), body)

    return await components.infer(request, answer)
