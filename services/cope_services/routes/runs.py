"""Routes of runs: metadata, learning curves, logs and checkpoints."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from cope_services.access import READ
from cope_services.cached_route import CachedRoute, ReadRoute, RunFilesRoute
from cope_services.dependencies import (
    ComponentsDep,
    FinishedRun,
    IfNoneMatch,
    PreparePlans,
)
from cope_services.responses import RowsFormat, download, json_response, rows_response
from cope_services.routes.diff import Points
from cope_services.run_pages import AllRuns, run_page
from cope_services.schemas import Responses, error_responses
from cope_sweep.queries.answers import Checkpoint, RunDetail, RunLog, RunPage

READING: dict[str, Any] = {"prefix": "/runs", "tags": ["runs"], "dependencies": [READ]}
pages = APIRouter(**READING, responses={304: {}}, route_class=CachedRoute)
files = APIRouter(**READING, responses={304: {}}, route_class=RunFilesRoute)
checkpoints = APIRouter(**READING, route_class=ReadRoute)

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


@pages.get("", response_model=RunPage)
async def list_runs(components: ComponentsDep, parameters: AllRuns, if_none_match: IfNoneMatch = None) -> Response:
    """All runs that have been started, filtered and sorted; or the runs of an ablation."""
    return await run_page(components, parameters, parameters.ablation)


@files.get("/{run_id}", response_model=RunDetail, dependencies=[PreparePlans])
def get_run(
    run_id: str,
    components: ComponentsDep,
    curve: Annotated[bool, Query(description="Whether to include the logged rows.")] = True,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """One run: configuration, state, attempts, metrics, facts and logged rows; why it failed."""
    return json_response(components.queries.run(run_id, with_curve=curve))


@files.get(
    "/{run_id}/curve",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/csv": {}}}},
    dependencies=[PreparePlans],
)
def get_curve(
    run_id: str,
    components: ComponentsDep,
    metric: Annotated[list[str], Query(max_length=50, description="Only these metrics. Default: all.")] = [],  # noqa: B006
    points: Points = None,
    format: RowsFormat = "json",  # noqa: A002
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The logged rows of a run, by step."""
    return rows_response(components.queries.curve(run_id, metric, points), format)


@files.get("/{run_id}/logs", response_model=RunLog, dependencies=[PreparePlans])
def get_logs(
    run_id: str,
    components: ComponentsDep,
    tail: Annotated[int, Query(ge=0, le=10_000, description="Number of lines from the end.")] = 200,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The end of a run's log, of its last MiB: its attempts, evaluations, and errors with their tracebacks."""
    return json_response(components.queries.log(run_id, tail))


@checkpoints.get("/{run_id}/checkpoint", responses=error_responses(409))
def list_checkpoint(run: FinishedRun, components: ComponentsDep) -> Checkpoint:
    """The checkpoint files of a finished run."""
    return components.checkpoints.listing(run)


@checkpoints.get("/{run_id}/checkpoint/{file}", response_class=Response, responses=FILE)
def get_checkpoint_file(
    run: FinishedRun, file: str, components: ComponentsDep, if_none_match: IfNoneMatch = None
) -> Response:
    """Download a checkpoint file. Range requests resume an interrupted download (`curl -C - -O URL`)."""
    return download(components.checkpoints.file(run, file), if_none_match)
