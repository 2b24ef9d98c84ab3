"""Routes of ablations, runs and sweeps: most are made from the questions of `cope_sweep.api`."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from cope_services.access import READ
from cope_services.cached_route import CachedRoute, ReadRoute, RunFilesRoute
from cope_services.dependencies import (
    Components,
    ComponentsDep,
    FinishedRun,
    IfNoneMatch,
    PreparePlans,
)
from cope_services.pictures import MEDIA_TYPES, REPORT_MEDIA_TYPES, REPORT_POLICY
from cope_services.questions import add_question, add_questions
from cope_services.responses import RowsFormat, download, json_response, rows_response
from cope_services.schemas import Responses, error_responses
from cope_services.tables import accepted, negotiate
from cope_sweep.api.answers import Checkpoint
from cope_sweep.api.questions import (
    CompareCurves,
    ExportRuns,
    GetAblation,
    GetCurves,
    GetDiff,
    GetFigure,
    GetLog,
    GetPlan,
    GetReport,
    GetRun,
    GetSweep,
    GetTable,
    ListAblations,
    ListFigures,
    ListPlannedRuns,
    ListRuns,
    ListSweeps,
    Points,
)
from cope_sweep.read.tables.table import formats

ablations = APIRouter(
    prefix="/ablations",
    tags=["ablations"],
    dependencies=[READ],
    responses={304: {}, **error_responses(409)},
    route_class=CachedRoute,
)

TABLE: Responses = {200: {"content": {each.media_type: {} for each in formats().values()}}, **error_responses(406)}
FIGURE: Responses = {200: {"content": {media: {} for media in MEDIA_TYPES}}, **error_responses(406, 429)}
EXPORT_MEDIA_TYPES: dict[str, Literal["parquet", "csv", "json"]] = {
    "text/csv": "csv", "application/vnd.apache.parquet": "parquet", "application/json": "json",
}  # fmt: skip
EXPORT: Responses = {200: {"content": {media: {} for media in EXPORT_MEDIA_TYPES}}, **error_responses(406)}
REPORT: Responses = {200: {"content": {media: {} for media in REPORT_MEDIA_TYPES}}, **error_responses(406, 429)}


add_questions(ablations, ListAblations, GetAblation, GetPlan, GetCurves, ListPlannedRuns)


async def _table(components: Components, question: GetTable, accept: str | None) -> Response:
    chosen = negotiate(question.format, accept)
    body = await run_in_threadpool(components.tables.table, question, chosen)
    return Response(body, media_type=chosen.media_type)


async def _figure(components: Components, question: GetFigure, accept: str | None) -> Response:
    chosen = question.format or accepted(accept, MEDIA_TYPES, "a figure")
    body = await components.pictures.figure(replace(question, format=chosen))
    return Response(body, media_type=next(media for media, name in MEDIA_TYPES.items() if name == chosen))


async def _report(components: Components, question: GetReport, accept: str | None) -> Response:
    chosen = question.format or accepted(accept, REPORT_MEDIA_TYPES, "a report")
    body = await components.pictures.report(replace(question, format=chosen))
    media = next(media for media, name in REPORT_MEDIA_TYPES.items() if name == chosen)
    return Response(body, media_type=media, headers={"content-security-policy": REPORT_POLICY})


async def _figures(components: Components, question: ListFigures, accept: str | None) -> Response:
    return json_response(await run_in_threadpool(components.pictures.listing, question))


add_question(ablations, GetTable, _table, TABLE)
add_question(ablations, ListFigures, _figures)
add_question(ablations, GetFigure, _figure, FIGURE)
add_question(ablations, GetReport, _report, REPORT)

READING: dict[str, Any] = {"prefix": "/runs", "tags": ["runs"], "dependencies": [READ]}
pages = APIRouter(**READING, responses={304: {}}, route_class=CachedRoute)
exports = APIRouter(**READING, route_class=ReadRoute)
files = APIRouter(**READING, responses={304: {}}, route_class=RunFilesRoute)
checkpoints = APIRouter(**READING, route_class=ReadRoute)

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


add_questions(pages, ListRuns)


async def _export(components: Components, question: ExportRuns, accept: str | None) -> Response:
    chosen = question.format or accepted(accept, EXPORT_MEDIA_TYPES, "an export")
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - it is deleted when it was sent
    remove = BackgroundTask(Path(file.name).unlink, missing_ok=True)
    try:
        with file:
            await run_in_threadpool(components.queries.export, replace(question, format=chosen), file)
    except BaseException:
        await remove()
        raise
    media = next(media for media, name in EXPORT_MEDIA_TYPES.items() if name == chosen)
    return FileResponse(file.name, media_type=media, filename=f"runs.{chosen}", background=remove)


add_question(exports, ExportRuns, _export, EXPORT)
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


comparisons = APIRouter(tags=["runs"], dependencies=[READ], responses={304: {}}, route_class=RunFilesRoute)
add_questions(comparisons, GetDiff, CompareCurves)


sweeps = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[READ], responses={304: {}}, route_class=CachedRoute)
add_questions(sweeps, ListSweeps, GetSweep)
