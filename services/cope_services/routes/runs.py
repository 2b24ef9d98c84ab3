"""Routes of runs: metadata, learning curves, checkpoints, perplexity and probes."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from cope_services.access import INFER, READ
from cope_services.dependencies import ComponentsDep, FinishedRun, IfNoneMatch, RequireJson, RunQueryDep, Scale
from cope_services.perplexity import measure
from cope_services.perplexity_schemas import ModelPerplexity, SequencesRequest
from cope_services.responses import RowsFormat, download, rows_response
from cope_services.schemas import (
    INFERENCE_ERRORS,
    Checkpoint,
    ProbeRequest,
    ProbeResponse,
    Responses,
    error_responses,
)
from cope_sweep.queries.answers import RunDetail, RunPage

router = APIRouter(prefix="/runs", tags=["runs"], dependencies=[READ])
inference = APIRouter(prefix="/runs", tags=["runs"], dependencies=[INFER])
"""The routes that ask a model."""

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


@router.get("")
def list_runs(
    components: ComponentsDep,
    query: RunQueryDep,
    ablation: Annotated[str | None, Query(description="Only the runs of this ablation, in plan order.")] = None,
    scale: Scale = None,
) -> RunPage:
    """All runs that have been started, filtered and sorted; or the runs of an ablation."""
    return components.queries.runs(query, ablation=ablation, scale=scale)


@router.get("/{run_id}")
def get_run(
    run_id: str,
    components: ComponentsDep,
    curve: Annotated[bool, Query(description="Whether to include the logged rows.")] = True,
) -> RunDetail:
    """One run: configuration, state, metrics, facts and logged rows."""
    return components.queries.run(run_id, with_curve=curve)


@router.get(
    "/{run_id}/curve",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/csv": {}}}},
)
def get_curve(run_id: str, components: ComponentsDep, format: RowsFormat = "json") -> Response:  # noqa: A002
    """The logged rows of a run, by step."""
    return rows_response(components.queries.curve(run_id), format)


@router.get("/{run_id}/checkpoint", responses=error_responses(409))
def list_checkpoint(run: FinishedRun, components: ComponentsDep) -> Checkpoint:
    """The checkpoint files of a finished run."""
    return components.checkpoints.listing(run)


@router.head("/{run_id}/checkpoint/{file}", include_in_schema=False)
@router.get("/{run_id}/checkpoint/{file}", response_class=Response, responses=FILE)
def get_checkpoint_file(
    run: FinishedRun, file: str, components: ComponentsDep, if_none_match: IfNoneMatch = None
) -> Response:
    """Download a checkpoint file. Range requests resume an interrupted download (`curl -C - -O URL`)."""
    return download(components.checkpoints.file(run, file), if_none_match)


@inference.post(
    "/{run_id}/perplexity",
    dependencies=[RequireJson],
    response_model_exclude_unset=True,
    responses=INFERENCE_ERRORS,
)
async def measure_perplexity(
    run: FinishedRun, body: SequencesRequest, components: ComponentsDep, request: Request
) -> ModelPerplexity:
    """Perplexity of token ids or texts under the model of a finished run: in total and per sequence."""
    return await components.infer(request, lambda: measure(components.predictors, run, body))


@inference.post(
    "/{run_id}/probe",
    dependencies=[RequireJson],
    response_model_exclude_unset=True,
    responses=INFERENCE_ERRORS,
)
async def probe_heads(
    run: FinishedRun, body: ProbeRequest, components: ComponentsDep, request: Request
) -> ProbeResponse:
    """Gates, positions and attention of each head of a finished run's model for one sequence."""
    return await components.infer(request, lambda: components.predictors.probe(run, body))
