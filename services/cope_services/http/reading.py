"""Routes that read: one for each question of `cope_sweep.api`, and those that answer in another way.

This module has no `from __future__ import annotations`: FastAPI could not evaluate the annotations of the functions in
`_answer_as_json` and `_answer_as_file`, which name a local variable, if they were texts.
"""

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import getdoc
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
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
    AskedQueries,
    ComponentsDep,
    FinishedRun,
    IfNoneMatch,
    WithETag,
)
from cope_services.http.errors import NotAcceptableError, Responses, error_responses
from cope_services.http.middleware import ORIGINAL_METHOD, answered_head
from cope_services.http.work import limited
from cope_services.models.predictors import StoredFile, checkpoint_file, checkpoint_listing
from cope_sweep.api import ablations, figures, runs, sweeps, tables
from cope_sweep.api.figures import FigureName
from cope_sweep.api.question import AblationName, Question, RunIdOrPrefix, arguments_of, committed_of, fields_of
from cope_sweep.api.runs import Checkpoint, ExportRuns, ListRuns, MaxPoints
from cope_sweep.api.sweeps import SweepId
from cope_sweep.config import SpecError
from cope_sweep.errors import NotFinishedError, NotFoundError, UserError
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
        if await answered_head(self, scope, send):
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
        available: Format → media type, the default first.
        what: What is available, for the message.

    Raises NotAcceptableError.
    """
    best = parse_accept_header(accept or "*/*", MIMEAccept).best_match(available.values())
    for name, media in available.items():
        if media == best:
            return name
    choices = ", ".join(f"{media} ({name})" for name, media in available.items())
    raise NotAcceptableError(f"{what} is available as {choices}; choose one with Accept or ?format=NAME")


# -- questions ---------------------------------------------------------------------------------------------------------


async def _name(name: AblationName) -> None: ...


async def _figure(figure: FigureName) -> None: ...


async def _run_id(run_id: RunIdOrPrefix) -> None: ...


async def _sweep_id(sweep_id: SweepId) -> None: ...


PATH_PARAMETERS = {
    "name": Depends(_name), "figure": Depends(_figure), "run_id": Depends(_run_id), "sweep_id": Depends(_sweep_id),
}  # fmt: skip
"""FastAPI checks and documents a parameter of the path if a function declares it."""


def _answer_as_json(question: type[Question[Any]], query_model: type[BaseModel]) -> Callable[..., Response]:

    def respond(request: Request, query: Annotated[query_model, Query()], queries: AskedQueries) -> Response:  # type: ignore[valid-type]
        return json_response(queries.ask(question(**request.path_params, **fields_of(question, query))))

    return respond


def _answer_as_file(question: type[Question[Any]], query_model: type[BaseModel]) -> Callable[..., Response]:
    def respond(
        request: Request,
        query: Annotated[query_model, Query()],  # type: ignore[valid-type]
        queries: AskedQueries,
        accept: Accept = None,
    ) -> Response:
        fields = fields_of(question, query)
        fields["format"] = fields["format"] or negotiate_format(accept, question.MEDIA_TYPES, "the answer")
        try:
            content = queries.ask(question(**request.path_params, **fields))
        except (NotFoundError, QueryError, SpecError, StoreError):
            raise
        except UserError as error:  # no finished run, no checkpoint, no such mark in the tokens
            raise NotFinishedError(str(error), code=error.code, **error.data) from error
        return Response(content, media_type=question.MEDIA_TYPES[fields["format"]])

    return respond


def _documented_file(types: Mapping[str, str]) -> Responses:
    """The responses of a route that answers with a file of one of these media types."""
    return {200: {"content": {media: {} for media in types.values()}}, **error_responses(406)}


def router_of(tag: str, *questions: type[Question[Any]], errors: Sequence[int] = ()) -> APIRouter:
    """A route for each question: a GET of its path. The fields that are not in the path are the query's.

    So is `committed`, where the question has it: it says which store is asked (`asked_queries`). `errors` are the
    statuses with which answers may fail.
    """
    router = APIRouter(tags=[tag], dependencies=[READ])
    for question in questions:
        in_path = [PATH_PARAMETERS[name] for name in question.model_fields if name in question.path_fields()]
        query_model = arguments_of(question, question.path_fields(), committed_of(question))
        options: dict[str, Any] = {
            "name": question.operation(),
            "description": getdoc(question),
            "responses": error_responses(*errors) | ({304: {}} if question.FROM_INDEX else {}),
            "dependencies": [WithETag, *in_path] if question.FROM_INDEX else in_path,
            "route_class_override": cached(question.WORK) if question.FROM_INDEX else limited(question.WORK),
        }
        if question.MEDIA_TYPES:
            options["responses"] |= _documented_file(question.MEDIA_TYPES)
            respond = _answer_as_file(question, query_model)
            router.add_api_route(question.PATH, respond, response_class=Response, **options)
        else:
            respond = _answer_as_json(question, query_model)
            router.add_api_route(question.PATH, respond, response_model=question.answer_type(), **options)
    return router


about_ablations = router_of("ablations", *ablations.QUESTIONS, *tables.QUESTIONS, *figures.QUESTIONS, errors=[409])
about_runs = router_of("runs", *runs.QUESTIONS, errors=[409])
about_sweeps = router_of("sweeps", *sweeps.QUESTIONS)

# -- pages and exports of runs -----------------------------------------------------------------------------------------

pages = APIRouter(
    tags=["runs"],
    responses={304: {}, **error_responses(409)},
    dependencies=[READ, WithETag],
    route_class=cached("answers"),
)
exports = APIRouter(tags=["runs"], responses=error_responses(409), dependencies=[READ], route_class=limited("exports"))


@pages.get(ListRuns.PATH, response_model=RunPage, description=getdoc(ListRuns))
def list_runs(query: Annotated[ListRuns, Query()], components: ComponentsDep) -> Response:
    # Fields that were not chosen are unset: null would say that a run has no value.
    return json_response(components.queries.ask(query), exclude_unset=bool(query.fields))


@exports.get(
    ExportRuns.PATH,
    description=getdoc(ExportRuns),
    response_class=Response,
    responses=_documented_file(ExportRuns.MEDIA_TYPES),
)
def export_runs(query: Annotated[ExportRuns, Query()], components: ComponentsDep, accept: Accept = None) -> Response:
    chosen = query.format or negotiate_format(accept, ExportRuns.MEDIA_TYPES, "an export")
    question = query.model_copy(update={"format": chosen})
    return Export(components.queries.export_chunks(question), ExportRuns.MEDIA_TYPES[chosen], f"runs.{chosen}")


# -- files of runs, which can change while the index does not, so there is no ETag -------------------------------------

files = APIRouter(prefix="/runs", tags=["runs"], dependencies=[READ], route_class=limited("answers"))
checkpoints = APIRouter(prefix="/runs", tags=["runs"], dependencies=[READ], route_class=limited("downloads"))
FILE: Responses = {200: {"content": {"application/octet-stream": {}}}, 206: {}, 304: {}, **error_responses(409)}


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


ROUTERS = (about_ablations, pages, exports, about_runs, files, checkpoints, about_sweeps)
"""`exports` before `about_runs`: `export` is no id of a run."""
