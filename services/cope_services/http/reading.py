"""Routes that read ablations and runs: most are made from the questions of `cope_sweep.api`.

Figures and reports are made one at a time, on a thread of their own: drawing takes seconds.
"""

from __future__ import annotations

import asyncio
import csv
import inspect
import io
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, replace
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field, TypeAdapter, create_model
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from cope_services.http.access import READ
from cope_services.http.caching import CachedRoute, RunFilesRoute, matches_etag
from cope_services.http.components import Accept, Components, ComponentsDep, FinishedRun, IfNoneMatch, PreparePlans
from cope_services.http.errors import BusyError, NotAcceptableError, Responses, error_responses
from cope_services.http.middleware import ASKED
from cope_services.models.predictors import StoredFile, checkpoint_file, checkpoint_listing
from cope_sweep.api.answers import Checkpoint, FigureInfo
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
    Parameter,
    Points,
    Question,
)
from cope_sweep.config import SpecError
from cope_sweep.errors import UserError
from cope_sweep.read.queries import NotFinishedError, NotFoundError
from cope_sweep.read.tables.table import find_format, formats
from cope_sweep.store import QueryError, StoreError

# -- responses ---------------------------------------------------------------------------------------------------------

Name = TypeVar("Name", bound=str)
RowsFormat = Literal["json", "csv"]
_ANY: TypeAdapter[Any] = TypeAdapter(Any, config={"ser_json_inf_nan": "null"})


def json_response(answer: BaseModel | Sequence[BaseModel], *, exclude_unset: bool = False) -> Response:
    """An answer as JSON. It is encoded by the thread that calls, not by the event loop."""
    if isinstance(answer, BaseModel):
        return Response(answer.model_dump_json(exclude_unset=exclude_unset), media_type="application/json")
    return Response(_ANY.dump_json(list(answer)), media_type="application/json")


class Download(FileResponse):
    """A file, which is not read for HEAD."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__({**scope, "method": scope.get(ASKED, scope["method"])}, receive, send)


def download(file: StoredFile, if_none_match: str | None) -> Response:
    """The file or the requested byte range, or 304 if the client has this version."""
    response = Download(file.path, filename=file.path.name, stat_result=file.stat)
    if matches_etag(if_none_match, response.headers["etag"]):
        return Response(status_code=304, headers={"etag": response.headers["etag"]})
    return response


def rows_response(rows: Sequence[Mapping[str, float]], output_format: RowsFormat) -> Response:
    """Rows with any keys. In CSV, the first column is `step`. Numbers that are not finite are null in JSON."""
    if output_format == "json":
        return Response(_ANY.dump_json(list(rows)), media_type="application/json")
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return Response(text.getvalue(), media_type="text/csv")


def accepted(accept: str | None, available: Mapping[Name, str], what: str) -> Name:
    """The name of the media type that an Accept header prefers; the first one without a header.

    Args:
        accept: The header.
        available: Name → media type, the default first.
        what: What is available, for the message.

    Raises NotAcceptableError.
    """
    best = parse_accept_header(accept or "*/*", MIMEAccept).best_match(available.values())
    for name, media in available.items():
        if media == best:
            return name
    known = ", ".join(f"{media} ({name})" for name, media in available.items())
    raise NotAcceptableError(f"{what} is available as {known}; choose one with Accept or ?format=NAME")


MAX_WAITING = 32
"""Figures and reports that wait to be made. Answers that are known do not wait."""


class Pictures:
    """Makes figures and reports, one at a time, on a thread of their own. Its coroutines belong to one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._waiting = 0

    async def make(self, draw: Callable[[], bytes]) -> bytes:
        """Result of `draw`. Raises BusyError."""
        if self._waiting >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} figures and reports are being made; ask again later", 5)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, draw)
        finally:
            self._waiting -= 1


# -- routes that are made from questions -------------------------------------------------------------------------------

WITHOUT_PLANS = (GetDiff, CompareCurves, ListSweeps, GetSweep)
"""Questions about the store alone: they do not wait for plans of ablation files."""


Answerer = Callable[[Components, Any, str | None], Awaitable[Response]]
"""Answers a question; for a file, in the format that the question or else the Accept header names."""


def add_questions(router: APIRouter, *questions: type[Question[Any]]) -> None:
    """Add a GET route for each question that the queries answer."""
    for question in questions:
        add_question(router, question, _ask)


def add_question(
    router: APIRouter, question: type[Question[Any]], answer: Answerer, responses: Responses | None = None
) -> None:
    """Add a GET route for a question. The prefix of the router is the begin of its path."""
    model = question.answer_type()
    documented: dict[str, Any] = {"response_class": Response} if model is bytes else {"response_model": model}
    route = router.get(question.path.removeprefix(router.prefix), responses=responses, **documented)
    route(_endpoint(question, answer))


def _endpoint(question: type[Question[Any]], respond: Answerer) -> Any:
    """The function that answers a question; its signature tells FastAPI the parameters."""
    in_path = [each for each in question.parameters() if each.in_path]

    async def answer(
        components: Components, query: BaseModel, if_none_match: str | None, accept: str | None = None, **names: str
    ) -> Response:
        asked = question(**names, **dict(query))
        await _prepare(components, asked)
        return await respond(components, asked, accept)

    own = {
        "components": ComponentsDep,
        **{each.name: Annotated[each.kind, Path(description=each.description)] for each in in_path},
        "query": Annotated[_query_model(question), Query()],
        **({"accept": Accept} if question.answer_type() is bytes else {}),
        "if_none_match": IfNoneMatch,
    }
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=None if name in ("accept", "if_none_match") else inspect.Parameter.empty,
        )
        for name, kind in own.items()
    ]
    answer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    answer.__name__, answer.__doc__ = _function_name(question), question.__doc__
    return answer


def _query_model(question: type[Question[Any]]) -> Any:
    """The parameters of a question's query.

    They are one model: FastAPI validates each parameter of a function on its own, which takes longer than the answer.
    """
    fields: dict[str, Any] = {each.name: _field(each) for each in question.parameters() if not each.in_path}
    return create_model(question.__name__, **fields)


def _field(parameter: Parameter) -> tuple[Any, Any]:
    default = ... if parameter.default is MISSING else parameter.default
    return Annotated[parameter.kind, Field(description=parameter.description)], default


def _function_name(question: type[Question[Any]]) -> str:
    """`list_runs` of `ListRuns`: the id of the operation begins with it."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in question.__name__).lstrip("_")


async def _prepare(components: Components, question: Question[Any]) -> None:
    """Return when the plans are made that the question needs."""
    if isinstance(question, WITHOUT_PLANS):
        return
    name = getattr(question, "name", None) or getattr(question, "ablation", None)
    await components.plans.prepare(None if isinstance(question, ListRuns) else name, getattr(question, "scale", None))


async def _ask(components: Components, question: Question[Any], accept: str | None) -> Response:
    """The answer as JSON."""

    def answer() -> Response:
        chosen = isinstance(question, ListRuns) and bool(question.fields)
        return json_response(components.queries.ask(question), exclude_unset=chosen)

    return await run_in_threadpool(answer)


# -- routes ------------------------------------------------------------------------------------------------------------

ablations = APIRouter(
    prefix="/ablations",
    tags=["ablations"],
    dependencies=[READ],
    responses={304: {}, **error_responses(409)},
    route_class=CachedRoute,
)

TABLE_TYPES = {name: each.media_type for name, each in formats().items()}
FIGURE_TYPES: dict[Literal["svg", "png", "pdf", "csv"], str] = {
    "svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf", "csv": "text/csv",
}  # fmt: skip
REPORT_TYPES: dict[Literal["html", "markdown"], str] = {"html": "text/html", "markdown": "text/markdown"}
EXPORT_TYPES: dict[Literal["csv", "parquet", "json"], str] = {
    "csv": "text/csv", "parquet": "application/vnd.apache.parquet", "json": "application/json",
}  # fmt: skip
RUNS_URL = "/api/v1/runs"
"""Where the numbers of HTML tables lead to."""


def _files(types: Mapping[Any, str], *errors: int) -> Responses:
    """The documentation of a route that answers with a file of one of these media types."""
    return {200: {"content": {media: {} for media in types.values()}}, **error_responses(406, *errors)}


async def _table(components: Components, question: GetTable, accept: str | None) -> Response:
    chosen = find_format(question.format or accepted(accept, TABLE_TYPES, "a table"))

    def make() -> bytes:
        # The runs of committed results are not in the store.
        runs_url = None if question.committed else RUNS_URL
        return chosen.file(components.queries.table(question), runs=question.runs, runs_url=runs_url)

    return Response(await run_in_threadpool(make), media_type=chosen.media_type)


async def _figure(components: Components, question: GetFigure, accept: str | None) -> Response:
    chosen = question.format or accepted(accept, FIGURE_TYPES, "a figure")

    def draw() -> bytes:
        from cope_sweep.read.figures.available import draw_available

        if question.committed:
            kept = components.queries.committed(question.name, question.scale)
            asked = replace(question, format=None, metric=tuple(question.metric), row=tuple(question.row))
            plain = GetFigure(question.name, question.figure, scale=question.scale, committed=True)
            # Maps can only be shown as they were drawn: what is kept has no checkpoints.
            if chosen == "svg" and asked == plain and (picture := kept.picture(plain.figure)):
                return picture
        try:
            results = kept if question.committed else components.queries.results(question.name, question.scale)
            return draw_available(results, replace(question, format=chosen))
        except (NotFoundError, QueryError, SpecError, StoreError):
            raise
        except UserError as error:  # no finished run, no checkpoint, no such mark in the tokens
            raise NotFinishedError(str(error)) from error

    return Response(await components.pictures.make(draw), media_type=FIGURE_TYPES[chosen])


async def _report(components: Components, question: GetReport, accept: str | None) -> Response:
    chosen = question.format or accepted(accept, REPORT_TYPES, "a report")
    query = urlencode({"format": "svg"} | ({"scale": question.scale} if question.scale else {}))

    def draw() -> bytes:
        from cope_sweep.read.reports import ReportError
        from cope_sweep.read.reports.document import report_file

        try:
            return report_file(
                components.queries.results(question.name, question.scale),
                replace(question, format=chosen),
                lambda figure: f"{_figures_url(question.name)}{quote(figure)}?{query}",
            )
        except ReportError as error:
            raise NotFinishedError(str(error)) from error

    return Response(await components.pictures.make(draw), media_type=REPORT_TYPES[chosen])


async def _figures(components: Components, question: ListFigures, accept: str | None) -> Response:
    def listing() -> Response:
        from cope_sweep.read.figures.available import available_figures

        name, scale = question.name, question.scale
        query = f"?{urlencode({'scale': scale})}" if scale else ""
        found = [
            FigureInfo(
                name=each.name,
                title=each.title,
                kind=each.kind,
                declared=each.declared,
                formats=["png", "svg", "pdf", "csv"],
                url=f"{_figures_url(name)}{quote(each.name)}{query}",
            )
            for each in available_figures(components.queries.load(name, scale).plan)
        ]
        return json_response(found)

    return await run_in_threadpool(listing)


def _figures_url(ablation: str) -> str:
    return f"/api/v1/ablations/{quote(ablation, safe='')}/figures/"


async def _export(components: Components, question: ExportRuns, accept: str | None) -> Response:
    chosen = question.format or accepted(accept, EXPORT_TYPES, "an export")
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - it is deleted when it was sent
    remove = BackgroundTask(FilePath(file.name).unlink, missing_ok=True)
    try:
        with file:
            await run_in_threadpool(components.queries.export, replace(question, format=chosen), file)
    except BaseException:
        await remove()
        raise
    return FileResponse(file.name, media_type=EXPORT_TYPES[chosen], filename=f"runs.{chosen}", background=remove)


add_questions(ablations, ListAblations, GetAblation, GetPlan, GetCurves, ListPlannedRuns)
add_question(ablations, GetTable, _table, _files(TABLE_TYPES))
add_question(ablations, ListFigures, _figures)
add_question(ablations, GetFigure, _figure, _files(FIGURE_TYPES, 429))
add_question(ablations, GetReport, _report, _files(REPORT_TYPES, 429))

READING: dict[str, Any] = {"prefix": "/runs", "tags": ["runs"], "dependencies": [READ]}
pages = APIRouter(**READING, responses={304: {}}, route_class=CachedRoute)
exports = APIRouter(**READING)
files = APIRouter(**READING, responses={304: {}}, route_class=RunFilesRoute)
checkpoints = APIRouter(**READING)

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


add_questions(pages, ListRuns)
add_question(exports, ExportRuns, _export, _files(EXPORT_TYPES))
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
def list_checkpoint(run: FinishedRun) -> Checkpoint:
    """The checkpoint files of a finished run."""
    return checkpoint_listing(run)


@checkpoints.get("/{run_id}/checkpoint/{file}", response_class=Response, responses=FILE)
def get_checkpoint_file(run: FinishedRun, file: str, if_none_match: IfNoneMatch = None) -> Response:
    """Download a checkpoint file. Range requests resume an interrupted download (`curl -C - -O URL`)."""
    return download(checkpoint_file(run, file), if_none_match)


comparisons = APIRouter(tags=["runs"], dependencies=[READ], responses={304: {}}, route_class=RunFilesRoute)
add_questions(comparisons, GetDiff, CompareCurves)


ROUTERS = (ablations, pages, exports, files, checkpoints)
