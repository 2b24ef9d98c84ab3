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
from cope_services.questions import add_questions
from cope_services.responses import RowsFormat, download, rows_response
from cope_services.schemas import Responses, error_responses
from cope_sweep.api.answers import Checkpoint
from cope_sweep.api.questions import GetLog, GetRun, ListRuns, Points

READING: dict[str, Any] = {"prefix": "/runs", "tags": ["runs"], "dependencies": [READ]}
pages = APIRouter(**READING, responses={304: {}}, route_class=CachedRoute)
files = APIRouter(**READING, responses={304: {}}, route_class=RunFilesRoute)
checkpoints = APIRouter(**READING, route_class=ReadRoute)

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


add_questions(pages, ListRuns)
add_questions(files, GetRun, GetLog)


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
    points: Annotated[Points, Query(description="At most so many points; spikes stay. Default: all.")] = None,
    format: RowsFormat = "json",  # noqa: A002
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The logged rows of a run, by step."""
    return rows_response(components.queries.curve(run_id, metric, points), format)


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
