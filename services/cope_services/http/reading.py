"""Routes that read ablations and runs. Their parameters are the questions of `cope_sweep.api`."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import getdoc
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Response
from fastapi.concurrency import iterate_in_threadpool
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel, TypeAdapter
from starlette.types import Message, Receive, Scope, Send
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from cope_services.http.access import READ
from cope_services.http.caching import cached, matches_etag
from cope_services.http.components import (
    Accept,
    Components,
    ComponentsDep,
    FinishedRun,
    IfNoneMatch,
    WithETag,
)
from cope_services.http.errors import InvalidError, NotAcceptableError, Responses, error_responses
from cope_services.http.middleware import ORIGINAL_METHOD
from cope_services.http.work import limited
from cope_services.models.predictors import StoredFile, checkpoint_file, checkpoint_listing
from cope_sweep.api.answers import (
    AblationDetail,
    AblationSummary,
    Checkpoint,
    ClaimResult,
    CurvePage,
    CurvesOfRuns,
    FigureInfo,
    MlflowPage,
    PlanCost,
    RunDetail,
    RunLog,
    RunsDiff,
)
from cope_sweep.api.formats import FigureFormat, ReportFormat, RunsFormat, TableFormat
from cope_sweep.api.questions import (
    AblationName,
    CompareCurves,
    CurvesOptions,
    ExportRuns,
    FigureName,
    FigureOptions,
    GetAblation,
    GetCurves,
    GetDiff,
    GetFigure,
    GetLog,
    GetMlflowPage,
    GetPlan,
    GetReport,
    GetRun,
    GetTable,
    ListAblations,
    ListClaims,
    ListFigures,
    ListRuns,
    LogOptions,
    MaxPoints,
    Question,
    ReportOptions,
    RunIdOrPrefix,
    RunOptions,
    ScaleOptions,
    TableOptions,
)
from cope_sweep.config import SpecError
from cope_sweep.errors import NotFinishedError, NotFoundError, UserError
from cope_sweep.read.tables import FORMATS
from cope_sweep.store import QueryError, RunPage, StoreError

# -- responses ---------------------------------------------------------------------------------------------------------

N = TypeVar("N", bound=str)
RowsFormat = Literal["json", "csv"]
_ANY: TypeAdapter[Any] = TypeAdapter(Any, config={"ser_json_inf_nan": "null"})


def json_response(answer: BaseModel | Sequence[BaseModel], *, exclude_unset: bool = False) -> Response:
    """An answer as JSON, encoded by the calling thread instead of the event loop."""
    if isinstance(answer, BaseModel):
        return Response(answer.model_dump_json(exclude_unset=exclude_unset), media_type="application/json")
    return Response(_ANY.dump_json(list(answer)), media_type="application/json")


STALLED_S = 60.0
"""A client that reads nothing of a download or an export for this time is disconnected, so that others get its slot."""
CHUNK_BYTES = 1 << 16


def _disconnecting(send: Send) -> Send:
    """`send`, which raises TimeoutError if the client does not read."""

    async def limited_send(message: Message) -> None:
        async with asyncio.timeout(STALLED_S):
            await send(message)

    return limited_send


class Download(FileResponse):
    """A file; a HEAD request does not read it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "method": scope.get(ORIGINAL_METHOD, scope["method"])}
        with suppress(TimeoutError):
            await super().__call__(scope, receive, _disconnecting(send))


class Export(StreamingResponse):
    """A file that is made while it is sent, until the client leaves. A HEAD request makes nothing of it."""

    def __init__(self, chunks: Iterator[bytes], media_type: str, filename: str) -> None:
        super().__init__(
            _small(chunks),
            media_type=media_type,
            headers={"content-disposition": f'attachment; filename="{filename}"'},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(ORIGINAL_METHOD) == "HEAD":
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body"})
            return
        with suppress(TimeoutError):
            await super().__call__(scope, receive, _disconnecting(send))


async def _small(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same in small chunks, since the event loop compresses them. Each chunk is made in a thread."""
    async for chunk in iterate_in_threadpool(chunks):
        for start in range(0, len(chunk), CHUNK_BYTES):
            yield chunk[start : start + CHUNK_BYTES]


def download(file: StoredFile, if_none_match: str | None) -> Response:
    """The file, the requested byte range, or 304 if the client has this version."""
    response = Download(file.path, filename=file.path.name, stat_result=file.stat)
    if matches_etag(if_none_match, response.headers["etag"]):
        return Response(status_code=304, headers={"etag": response.headers["etag"]})
    return response


def rows_response(rows: Sequence[Mapping[str, float]], output_format: RowsFormat) -> Response:
    """Rows with arbitrary keys. In CSV, `step` is the first column. In JSON, numbers that are not finite are null."""
    if output_format == "json":
        return Response(_ANY.dump_json(list(rows)), media_type="application/json")
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return Response(text.getvalue(), media_type="text/csv")


def negotiate_format(accept: str | None, available: Mapping[N, str], what: str) -> N:
    """The name of the media type that an Accept header prefers; without a header, the first one.

    Args:
        accept: The header.
        available: Name of a format → media type, the default first.
        what: What is available, for the message.

    Raises NotAcceptableError.
    """
    best = parse_accept_header(accept or "*/*", MIMEAccept).best_match(available.values())
    for name, media in available.items():
        if media == best:
            return name
    choices = ", ".join(f"{media} ({name})" for name, media in available.items())
    raise NotAcceptableError(f"{what} is available as {choices}; choose one with Accept or ?format=NAME")


# -- ablations ---------------------------------------------------------------------------------------------------------

ABLATIONS: dict[str, Any] = {
    "tags": ["ablations"], "dependencies": [READ, WithETag], "responses": {304: {}, **error_responses(409)},
}  # fmt: skip
ablations = APIRouter(prefix="/ablations", route_class=cached("tables"), **ABLATIONS)
drawings = APIRouter(prefix="/ablations", route_class=cached("drawings"), **ABLATIONS)
reports = APIRouter(prefix="/ablations", route_class=cached("reports"), **ABLATIONS)
claims = APIRouter(prefix="/claims", route_class=cached("tables"), **ABLATIONS)


def answer(components: Components, question: Question[Any]) -> Response:
    """The answer to a question as JSON."""
    chosen = isinstance(question, ListRuns) and bool(question.fields)
    return json_response(components.queries.ask(question), exclude_unset=chosen)


@ablations.get("", response_model=list[AblationSummary], description=getdoc(ListAblations))
def list_ablations(components: ComponentsDep) -> Response:
    return answer(components, ListAblations())


@ablations.get("/{name}", response_model=AblationDetail, description=getdoc(GetAblation))
def get_ablation(name: AblationName, query: Annotated[ScaleOptions, Query()], components: ComponentsDep) -> Response:
    return answer(components, GetAblation(name=name, **dict(query)))


@ablations.get("/{name}/plan", response_model=PlanCost, description=getdoc(GetPlan))
def get_plan(name: AblationName, query: Annotated[ScaleOptions, Query()], components: ComponentsDep) -> Response:
    return answer(components, GetPlan(name=name, **dict(query)))


@ablations.get("/{name}/curves", response_model=CurvePage, description=getdoc(GetCurves))
def get_curves(name: AblationName, query: Annotated[CurvesOptions, Query()], components: ComponentsDep) -> Response:
    return answer(components, GetCurves(name=name, **dict(query)))


@ablations.get("/{ablation}/runs", response_model=RunPage)
def list_planned_runs(
    ablation: AblationName, query: Annotated[ListRuns, Query()], components: ComponentsDep
) -> Response:
    """The runs of an ablation in plan order, including pending ones; with a filter or order, only runs that started."""
    if query.ablation not in (None, ablation):
        raise InvalidError(
            f"the path names the ablation {ablation[:80]!r}; leave out the parameter `ablation`", ablation=ablation[:80]
        )
    return answer(components, query.model_copy(update={"ablation": ablation}))


TABLE_TYPES: dict[TableFormat, str] = {name: table_format.media_type for name, table_format in FORMATS.items()}
FIGURE_TYPES: dict[FigureFormat, str] = {
    "svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf", "csv": "text/csv",
}  # fmt: skip
REPORT_TYPES: dict[ReportFormat, str] = {"html": "text/html", "markdown": "text/markdown"}
EXPORT_TYPES: dict[RunsFormat, str] = {
    "csv": "text/csv", "parquet": "application/vnd.apache.parquet", "json": "application/json",
}  # fmt: skip
"""Format → media type, the default first."""


def _documented_file(types: Mapping[Any, str], *errors: int) -> dict[str, Any]:
    """Arguments of a route that answers with a file of one of these media types."""
    content: dict[str, Any] = {media: {} for media in types.values()}
    return {"response_class": Response, "responses": {200: {"content": content}, **error_responses(406, *errors)}}


@ablations.get("/{name}/table", description=getdoc(GetTable), **_documented_file(TABLE_TYPES))
def get_table(
    name: AblationName, query: Annotated[TableOptions, Query()], components: ComponentsDep, accept: Accept = None
) -> Response:
    chosen = query.format or negotiate_format(accept, TABLE_TYPES, "a table")
    question = GetTable(name=name, **{**dict(query), "format": chosen})
    return Response(components.queries.ask(question), media_type=TABLE_TYPES[chosen])


@ablations.get("/{name}/figures", response_model=list[FigureInfo], description=getdoc(ListFigures))
def list_figures(name: AblationName, query: Annotated[ScaleOptions, Query()], components: ComponentsDep) -> Response:
    return answer(components, ListFigures(name=name, **dict(query)))


@drawings.get("/{name}/figures/{figure}", description=getdoc(GetFigure), **_documented_file(FIGURE_TYPES))
def get_figure(
    name: AblationName,
    figure: FigureName,
    query: Annotated[FigureOptions, Query()],
    components: ComponentsDep,
    accept: Accept = None,
) -> Response:
    chosen = query.format or negotiate_format(accept, FIGURE_TYPES, "a figure")
    question = GetFigure(name=name, figure=figure, **{**dict(query), "format": chosen})
    return Response(_draw(components, question), media_type=FIGURE_TYPES[chosen])


@reports.get("/{name}/report", description=getdoc(GetReport), **_documented_file(REPORT_TYPES))
def get_report(
    name: AblationName, query: Annotated[ReportOptions, Query()], components: ComponentsDep, accept: Accept = None
) -> Response:
    chosen = query.format or negotiate_format(accept, REPORT_TYPES, "a report")
    question = GetReport(name=name, **{**dict(query), "format": chosen})
    return Response(_draw(components, question), media_type=REPORT_TYPES[chosen])


def _draw(components: Components, question: GetFigure | GetReport) -> bytes:
    try:
        return components.queries.ask(question)
    except (NotFoundError, QueryError, SpecError, StoreError):
        raise
    except UserError as error:  # no finished run, no checkpoint, no such mark in the tokens
        raise NotFinishedError(str(error), code=error.code, **error.data) from error


@claims.get("", response_model=list[ClaimResult], description=getdoc(ListClaims))
def list_claims(query: Annotated[ListClaims, Query()], components: ComponentsDep) -> Response:
    return answer(components, query)


mlflow = APIRouter(prefix="/ablations", tags=["ablations"], dependencies=[READ], route_class=limited("answers"))
"""Asks MLflow: its answer can change while the index does not, so there is no ETag."""


@mlflow.get("/{name}/mlflow", response_model=MlflowPage, description=getdoc(GetMlflowPage))
def get_mlflow_page(name: AblationName, components: ComponentsDep) -> Response:
    return answer(components, GetMlflowPage(name=name))


# -- runs --------------------------------------------------------------------------------------------------------------

READING: dict[str, Any] = {"tags": ["runs"], "dependencies": [READ]}
CACHED: dict[str, Any] = {"tags": ["runs"], "dependencies": [READ, WithETag], "responses": {304: {}}}
pages = APIRouter(prefix="/runs", route_class=cached("answers"), **CACHED)
exports = APIRouter(prefix="/runs", route_class=limited("exports"), **READING)
files = APIRouter(prefix="/runs", route_class=limited("answers"), **READING)
"""Answers from the files of runs, which can change while the index does not, so there is no ETag."""
checkpoints = APIRouter(prefix="/runs", route_class=limited("downloads"), **READING)
differences = APIRouter(route_class=cached("tables"), **CACHED)
curves = APIRouter(route_class=limited("tables"), **READING)

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


@pages.get("", response_model=RunPage, description=getdoc(ListRuns))
def list_runs(query: Annotated[ListRuns, Query()], components: ComponentsDep) -> Response:
    return answer(components, query)


@exports.get("/export", description=getdoc(ExportRuns), **_documented_file(EXPORT_TYPES))
def export_runs(query: Annotated[ExportRuns, Query()], components: ComponentsDep, accept: Accept = None) -> Response:
    chosen = query.format or negotiate_format(accept, EXPORT_TYPES, "an export")
    question = query.model_copy(update={"format": chosen})
    return Export(components.queries.export_chunks(question), EXPORT_TYPES[chosen], f"runs.{chosen}")


@files.get("/{run_id}", response_model=RunDetail, description=getdoc(GetRun))
def get_run(run_id: RunIdOrPrefix, query: Annotated[RunOptions, Query()], components: ComponentsDep) -> Response:
    return answer(components, GetRun(run_id=run_id, **dict(query)))


@files.get("/{run_id}/logs", response_model=RunLog, description=getdoc(GetLog))
def get_log(run_id: RunIdOrPrefix, query: Annotated[LogOptions, Query()], components: ComponentsDep) -> Response:
    return answer(components, GetLog(run_id=run_id, **dict(query)))


@files.get(
    "/{run_id}/curve",
    response_class=Response,
    responses={200: {"content": {"application/json": {}, "text/csv": {}}}},
)
def get_curve(
    run_id: str,
    components: ComponentsDep,
    metric: Annotated[list[str], Query(max_length=50, description="Only these metrics. Default: all.")] = [],  # noqa: B006
    points: Annotated[MaxPoints, Query(description="Maximum number of points; spikes are kept. Default: all.")] = None,
    format: RowsFormat = "json",  # noqa: A002
) -> Response:
    """The logged values of a run, by step."""
    return rows_response(components.queries.curve(run_id, metric, points), format)


@checkpoints.get("/{run_id}/checkpoint", responses=error_responses(409))
def list_checkpoint(run: FinishedRun) -> Checkpoint:
    """The checkpoint files of a finished run."""
    return checkpoint_listing(run)


@checkpoints.get("/{run_id}/checkpoint/{file}", response_class=Response, responses=FILE)
def get_checkpoint_file(run: FinishedRun, file: str, if_none_match: IfNoneMatch = None) -> Response:
    """Download a checkpoint file. Range requests resume an interrupted download (`curl -C - -O URL`)."""
    return download(checkpoint_file(run, file), if_none_match)


@differences.get("/diff", response_model=RunsDiff, description=getdoc(GetDiff))
def get_diff(query: Annotated[GetDiff, Query()], components: ComponentsDep) -> Response:
    return answer(components, query)


@curves.get("/curves", response_model=CurvesOfRuns, description=getdoc(CompareCurves))
def compare_curves(query: Annotated[CompareCurves, Query()], components: ComponentsDep) -> Response:
    return answer(components, query)


ROUTERS = (ablations, drawings, reports, claims, mlflow, pages, exports, files, checkpoints)
"""`exports` before `files`: `export` is no id of a run."""
