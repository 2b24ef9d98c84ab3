"""Routes that read ablations and runs: most are made from the questions of `cope_sweep.api`.

Figures and reports are made one at a time, on a thread of their own: drawing takes seconds.
"""

from __future__ import annotations

import csv
import inspect
import io
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
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
from cope_sweep.api.answers import Checkpoint
from cope_sweep.api.questions import (
    CompareCurves,
    ExportRuns,
    FigureFormat,
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
    Question,
)
from cope_sweep.config import SpecError
from cope_sweep.errors import NotFinishedError, NotFoundError, UserError
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
    """Makes figures and reports, one at a time. Its coroutines belong to one event loop."""

    def __init__(self) -> None:
        self._one = CapacityLimiter(1)

    async def make(self, draw: Callable[[], bytes]) -> bytes:
        """Result of `draw`. Raises BusyError."""
        statistics = self._one.statistics()
        if statistics.borrowed_tokens + statistics.tasks_waiting >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} figures and reports are being made; ask again later", 5)
        return await run_sync(draw, limiter=self._one)


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
    # They are one model: FastAPI validates each parameter of a function on its own, which takes longer than the answer.
    in_query: dict[str, Any] = {
        each.name: (
            Annotated[each.kind, Field(description=each.description)],
            ... if each.default is MISSING else each.default,
        )
        for each in question.parameters()
        if not each.in_path
    }

    async def answer(
        components: Components, query: BaseModel, if_none_match: str | None, accept: str | None = None, **names: str
    ) -> Response:
        asked = question(**names, **dict(query))
        if not isinstance(asked, WITHOUT_PLANS):
            name = getattr(asked, "name", None) or getattr(asked, "ablation", None)
            await components.prepare(None if isinstance(asked, ListRuns) else name, getattr(asked, "scale", None))
        return await respond(components, asked, accept)

    own = {
        "components": ComponentsDep,
        **{each.name: Annotated[each.kind, Path(description=each.description)] for each in in_path},
        "query": Annotated[create_model(question.__name__, **in_query), Query()],
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


def _function_name(question: type[Question[Any]]) -> str:
    """`list_runs` of `ListRuns`: the id of the operation begins with it."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in question.__name__).lstrip("_")


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

FIGURE_TYPES: dict[FigureFormat, str] = {
    "svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf", "csv": "text/csv",
}  # fmt: skip
TYPES: dict[type[Question[Any]], tuple[str, Mapping[Any, str]]] = {
    GetTable: ("a table", {name: each.media_type for name, each in formats().items()}),
    GetFigure: ("a figure", FIGURE_TYPES),
    GetReport: ("a report", {"html": "text/html", "markdown": "text/markdown"}),
    ExportRuns: (
        "an export",
        {"csv": "text/csv", "parquet": "application/vnd.apache.parquet", "json": "application/json"},
    ),
}
"""Question → what it asks for, and the media types of the formats of that, the default first."""


def add_file(router: APIRouter, question: type[Question[Any]], answer: Answerer, *errors: int) -> None:
    """Add a GET route for a question that is answered by a file."""
    content: dict[str, Any] = {media: {} for media in TYPES[question][1].values()}
    add_question(router, question, answer, {200: {"content": content}, **error_responses(406, *errors)})


def _in_format(question: Any, accept: str | None) -> tuple[Any, str]:
    """The question for a file in the format that it names, or else the Accept header, and the media type of that."""
    what, types = TYPES[type(question)]
    chosen = question.format or accepted(accept, types, what)
    return replace(question, format=chosen), types[chosen]


async def _table(components: Components, question: GetTable, accept: str | None) -> Response:
    if question.format:
        find_format(question.format)  # raises QueryError for a name that is none
    asked, media_type = _in_format(question, accept)
    return Response(await run_in_threadpool(components.queries.ask, asked), media_type=media_type)


async def _drawn(components: Components, question: GetFigure | GetReport, accept: str | None) -> Response:
    """A figure or a report."""
    asked, media_type = _in_format(question, accept)

    def draw() -> bytes:
        try:
            content: bytes = components.queries.ask(asked)
            return content
        except (NotFoundError, QueryError, SpecError, StoreError):
            raise
        except UserError as error:  # no finished run, no checkpoint, no such mark in the tokens
            raise NotFinishedError(str(error)) from error

    return Response(await components.pictures.make(draw), media_type=media_type)


async def _export(components: Components, question: ExportRuns, accept: str | None) -> Response:
    asked, media_type = _in_format(question, accept)
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - it is deleted when it was sent
    remove = BackgroundTask(FilePath(file.name).unlink, missing_ok=True)
    try:
        with file:
            await run_in_threadpool(components.queries.export, asked, file)
    except BaseException:
        await remove()
        raise
    return FileResponse(file.name, media_type=media_type, filename=f"runs.{asked.format}", background=remove)


add_questions(ablations, ListAblations, GetAblation, GetPlan, GetCurves, ListPlannedRuns)
add_file(ablations, GetTable, _table)
add_questions(ablations, ListFigures)
add_file(ablations, GetFigure, _drawn, 429)
add_file(ablations, GetReport, _drawn, 429)

READING: dict[str, Any] = {"prefix": "/runs", "tags": ["runs"], "dependencies": [READ]}
pages = APIRouter(**READING, responses={304: {}}, route_class=CachedRoute)
exports = APIRouter(**READING)
files = APIRouter(**READING, responses={304: {}}, route_class=RunFilesRoute)
checkpoints = APIRouter(**READING)

FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


add_questions(pages, ListRuns)
add_file(exports, ExportRuns, _export)
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
