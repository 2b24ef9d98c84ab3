"""Runs: what they are, how they learned, their checkpoints, and what those say about tokens."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from cope_services.deps import FinishedRun, IfNoneMatch, JsonOnly, Limit, Offset, PartsDep, Scale, StatusFilter
from cope_services.responses import RowsFormat, download, rows
from cope_services.schemas import (
    Checkpoint,
    PerplexityRequest,
    PerplexityResponse,
    ProbeRequest,
    ProbeResponse,
    Responses,
    RunDetail,
    RunPage,
    problems,
)

router = APIRouter(prefix="/runs", tags=["runs"])

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **problems(409)}


@router.get("")
def list_runs(
    parts: PartsDep,
    status: StatusFilter = None,
    ablation: Annotated[str | None, Query(description="Only runs that it contains, in its order.")] = None,
    scale: Scale = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> RunPage:
    """Every run that was ever begun, by id; or an ablation's."""
    return parts.library.runs(status=status, ablation=ablation, scale=scale, limit=limit, offset=offset)


@router.get("/{run_id}")
def get_run(
    run_id: str,
    parts: PartsDep,
    curve: Annotated[bool, Query(description="Whether to have the logged rows with it.")] = True,
) -> RunDetail:
    """One run: what was trained, how it stands, what came of it."""
    return parts.library.run(run_id, with_curve=curve)


@router.get(
    "/{run_id}/curve",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/csv": {}}}},
)
def get_curve(run_id: str, parts: PartsDep, format: RowsFormat = "json") -> Response:  # noqa: A002
    """The logged rows of a run, by step."""
    return rows(parts.library.curve(run_id), format)


@router.get("/{run_id}/checkpoint", responses=problems(409))
def list_checkpoint(run: FinishedRun, parts: PartsDep) -> Checkpoint:
    """The files of a finished run's model."""
    return parts.checkpoints.listing(run)


@router.head("/{run_id}/checkpoint/{file}", include_in_schema=False)
@router.get("/{run_id}/checkpoint/{file}", response_class=Response, responses=FILE)
def get_checkpoint_file(run: FinishedRun, file: str, parts: PartsDep, if_none_match: IfNoneMatch = None) -> Response:
    """Download a file; a Range goes on with a download that broke off (`curl -C - -O URL`)."""
    return download(parts.checkpoints.file(run, file), if_none_match)


@router.post(
    "/{run_id}/perplexity",
    dependencies=[JsonOnly],
    response_model_exclude_unset=True,
    responses=problems(409, 413, 415),
)
async def measure_perplexity(run: FinishedRun, body: PerplexityRequest, parts: PartsDep) -> PerplexityResponse:
    """Perplexity of token ids under a finished run's model: in all, and for each sequence."""
    return await parts.predictors.measure(run, body)


@router.post(
    "/{run_id}/probe",
    dependencies=[JsonOnly],
    response_model_exclude_unset=True,
    responses=problems(409, 413, 415),
)
async def probe_heads(run: FinishedRun, body: ProbeRequest, parts: PartsDep) -> ProbeResponse:
    """What each head of a finished run's model counts in a sequence, and where it looks."""
    return await parts.predictors.probe(run, body)
