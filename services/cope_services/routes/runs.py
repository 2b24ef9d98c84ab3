"""Routes of runs: metadata, learning curves and checkpoints."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from cope_services.access import READ
from cope_services.dependencies import ComponentsDep, FinishedRun, IfNoneMatch, RunQueryDep, Scale
from cope_services.responses import RowsFormat, download, rows_response
from cope_services.schemas import Checkpoint, Responses, error_responses
from cope_sweep.queries.answers import RunDetail, RunPage

router = APIRouter(prefix="/runs", tags=["runs"], dependencies=[READ])

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
