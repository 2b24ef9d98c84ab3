"""Routes of ablations, runs and sweeps: most are made from the questions of `cope_sweep.api`."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response

from cope_services.access import READ
from cope_services.cached_route import CachedRoute, ReadRoute, RunFilesRoute
from cope_services.dependencies import (
    Accept,
    ComponentsDep,
    FinishedRun,
    IfNoneMatch,
    PreparePlan,
    PreparePlans,
    Scale,
)
from cope_services.pictures import MEDIA_TYPES, REPORT_MEDIA_TYPES, REPORT_POLICY
from cope_services.questions import add_questions
from cope_services.responses import RowsFormat, download, json_response, rows_response
from cope_services.schemas import FigureFormat, FigureInfo, Responses, error_responses
from cope_services.tables import accepted, negotiate
from cope_sweep.api.answers import Checkpoint
from cope_sweep.api.questions import (
    CompareCurves,
    GetAblation,
    GetCurves,
    GetDifference,
    GetLog,
    GetRun,
    GetStatus,
    GetSweep,
    ListAblations,
    ListPlannedRuns,
    ListRuns,
    ListSweeps,
    Points,
)
from cope_sweep.results.formats import formats

ablations = APIRouter(
    prefix="/ablations",
    tags=["ablations"],
    dependencies=[READ],
    responses={304: {}, **error_responses(409)},
    route_class=CachedRoute,
)

TABLE: Responses = {200: {"content": {each.media_type: {} for each in formats().values()}}, **error_responses(406)}
FIGURE: Responses = {200: {"content": {media: {} for media in MEDIA_TYPES}}, **error_responses(406, 429)}
REPORT: Responses = {200: {"content": {media: {} for media in REPORT_MEDIA_TYPES}}, **error_responses(406, 429)}


add_questions(ablations, ListAblations, GetAblation, GetStatus, GetCurves, ListPlannedRuns)


@ablations.get("/{name}/table", response_class=Response, responses=TABLE, dependencies=[PreparePlan])
def get_table(
    name: str,
    components: ComponentsDep,
    format: Annotated[  # noqa: A002
        str | None,
        Query(description="Default: by the Accept header, else JSON.", json_schema_extra={"enum": list(formats())}),
    ] = None,
    scale: Scale = None,
    runs: Annotated[bool, Query(description="CSV and Parquet: one line per run instead of one per row.")] = False,
    compare: Annotated[
        str | None,
        Query(description="Compare the rows with this one, or with the published numbers: `paper`.", max_length=500),
    ] = None,
    accept: Accept = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The result table: mean ± standard deviation over seeds, and the published numbers."""
    chosen = negotiate(format, accept)
    body = components.tables.table(name, scale, chosen, runs=runs, against=compare)
    return Response(body, media_type=chosen.media_type)


@ablations.get("/{name}/figures", response_model=list[FigureInfo], dependencies=[PreparePlan])
def list_figures(
    name: str, components: ComponentsDep, scale: Scale = None, if_none_match: IfNoneMatch = None
) -> Response:
    """The figures of an ablation: those that its file declares, and those that any ablation has."""
    return json_response(components.pictures.listing(name, scale))


@ablations.get("/{name}/figures/{figure}", response_class=Response, responses=FIGURE, dependencies=[PreparePlan])
async def get_figure(
    name: str,
    figure: str,
    components: ComponentsDep,
    scale: Scale = None,
    format: Annotated[  # noqa: A002
        FigureFormat | None, Query(description="Default: by the Accept header, else SVG; csv: what is drawn.")
    ] = None,
    accept: Accept = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """A figure of the finished runs, or its data."""
    names = {value: media for media, value in MEDIA_TYPES.items()}
    chosen = format or accepted(accept, MEDIA_TYPES, "a figure")
    body = await components.pictures.figure(name, scale, figure, chosen)
    return Response(body, media_type=names[chosen])


@ablations.get("/{name}/report", response_class=Response, responses=REPORT, dependencies=[PreparePlan])
async def get_report(
    name: str,
    components: ComponentsDep,
    scale: Scale = None,
    format: Annotated[  # noqa: A002
        Literal["html", "markdown"] | None, Query(description="Default: by the Accept header, else HTML.")
    ] = None,
    accept: Accept = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Report on the finished runs: table with comparisons, figures, what is missing, and what made the runs."""
    names = {value: media for media, value in REPORT_MEDIA_TYPES.items()}
    chosen = format or accepted(accept, REPORT_MEDIA_TYPES, "a report")
    body = await components.pictures.report(name, scale, chosen)
    return Response(body, media_type=names[chosen], headers={"content-security-policy": REPORT_POLICY})


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


comparisons = APIRouter(tags=["runs"], dependencies=[READ], responses={304: {}}, route_class=RunFilesRoute)
add_questions(comparisons, GetDifference, CompareCurves)


sweeps = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[READ], responses={304: {}}, route_class=CachedRoute)
add_questions(sweeps, ListSweeps, GetSweep)
