"""Maps every error to a status and a body: problem details (RFC 9457), or OpenAI's error object on its routes.

It also adds them to the OpenAPI document.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from cope_sweep.config import SpecError
from cope_sweep.errors import (
    CheckpointError,
    ClusterError,
    InvalidValue,
    JsonValue,
    NotFinishedError,
    NotFiniteError,
    NotFoundError,
    ProbeError,
    TokensError,
    UserError,
)
from cope_sweep.store import QueryError, StoreError
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import IndexUnavailable

LOG = logging.getLogger("cope_services.errors")


class HttpError(UserError):
    """An error with its HTTP status and headers."""

    status: ClassVar[int] = 500
    default_code = "internal_error"

    def __init__(
        self, message: str, headers: Mapping[str, str] | None = None, /, *, code: str | None = None, **data: JsonValue
    ) -> None:
        super().__init__(message, code=code, **data)
        self.headers = headers or {}


class NotAcceptableError(HttpError):
    status, default_code = 406, "not_acceptable"


class TooLargeError(HttpError):
    status, default_code = 413, "too_large"


class MediaTypeError(HttpError):
    status, default_code = 415, "unsupported_media_type"


class InvalidError(HttpError):
    status, default_code = 422, "invalid_request"


class ConflictError(HttpError):
    status, default_code = 409, "conflict"


class BusyError(HttpError):
    status, default_code = 429, "too_many_requests"

    def __init__(self, message: str, retry_after_s: int, **data: JsonValue) -> None:
        super().__init__(message, {"retry-after": str(retry_after_s)}, code=None, **data)


class ClientGoneError(HttpError):
    """The client has closed the connection and receives no response."""

    status, default_code = 499, "client_gone"


class NotReadyError(HttpError):
    status, default_code = 503, "not_ready"


class NoClusterError(HttpError):
    status, default_code = 503, "no_cluster"


class TimeLimitError(HttpError):
    status, default_code = 504, "time_limit"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request took longer than {limit_s:g} s; send a smaller one, or try again later")


USER_ERRORS: dict[type[UserError], int] = {
    NotFoundError: 404,
    NotFinishedError: 409,
    InvalidValue: 422,
    ProbeError: 422,
    TokensError: 422,
    NotFiniteError: 409,
    CheckpointError: 409,
    ClusterError: 503,
    SpecError: 409,
    QueryError: 422,
    IndexUnavailable: 503,
    DamagedError: 409,
    StoreError: 500,
    UserError: 500,
}
"""Error class of `cope_sweep` → status. An error has the status of its nearest base class here."""


def status_of(error: UserError) -> int:
    if isinstance(error, HttpError):
        return error.status
    return next(USER_ERRORS[cls] for cls in type(error).__mro__ if cls in USER_ERRORS)


def path_below(scope: Scope) -> str:
    """The path of a request, without the prefix at which the service is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


PROBLEM_JSON = "application/problem+json"
OPENAI_PATH = re.compile(r"(/openai/[^/]+)?/(v1/|tokenizer_info$|tokenize$|detokenize$)")
INTERNAL_ERROR = "internal server error; the server's log has the traceback"
INDEX_ERROR = "the index of runs does not answer, or cannot be used; the server's log has the reason"
INVALID_JSON = "the body is not valid JSON"


def install_error_handlers(app: FastAPI, hide: Callable[[str], str] = str) -> None:
    """Make `app` answer every error with problem details, or on routes of the OpenAI protocol with its error object.

    `hide` removes what clients should not see from a message. Starlette's file responses answer an invalid `Range` in
    plain text.
    """

    @app.exception_handler(UserError)
    async def known_error(request: Request, error: UserError) -> Response:
        headers = error.headers if isinstance(error, HttpError) else None
        if isinstance(error, IndexUnavailable) or (isinstance(error, StoreError) and "index" in error.data):
            LOG.warning("%s", error)  # the database is the operator's: clients learn neither its name nor its errors
            return error_response(request.scope, status_of(error), error.code, INDEX_ERROR, headers)
        data = error.shown_data(hide)
        return error_response(request.scope, status_of(error), error.code, hide(str(error)), headers, data)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        if any(item["type"] == "json_invalid" for item in errors):
            return error_response(request.scope, 400, "invalid_json", INVALID_JSON)
        message = "; ".join(map(_validation_message, errors[:5]))
        keys = [_location(item) for item in errors[:5]]
        code = InvalidError.default_code
        return error_response(request.scope, InvalidError.status, code, message, data={"keys": keys})

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        if status == 400:  # FastAPI raises it for a body that its JSON parser rejects
            return error_response(request.scope, status, "invalid_json", INVALID_JSON)
        detail = "" if error.detail == status.phrase else str(error.detail)
        code = TooLargeError.default_code if status == 413 else status.name.lower()
        return error_response(request.scope, status, code, detail, error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return error_response(request.scope, 500, "internal_error", INTERNAL_ERROR)


def error_response(
    scope: Scope,
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    data: Mapping[str, JsonValue] | None = None,
) -> Response:
    """The response to a failed request. An empty `detail` is replaced by a sentence about the status."""
    detail = detail or _status_detail(scope, status)
    headers = dict(headers) if headers else None
    if not OPENAI_PATH.match(path_below(scope)):
        return Response(problem_details(status, code, detail, data or {}), status, headers, media_type=PROBLEM_JSON)
    # OpenAI answers 400 where this service answers 422.
    content = error_object(status, code, detail)
    return Response(content, 400 if status == 422 else status, headers, media_type="application/json")


def problem_details(status: int, code: str, detail: str, data: Mapping[str, JsonValue]) -> bytes:
    """Problem details as JSON. The type about:blank means that the title is the phrase of the status (RFC 9457)."""
    # 499 comes from nginx; no standard defines it.
    title = "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
    problem = {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code, "data": data}
    return json.dumps(problem).encode()


def error_object(status: int, code: str, message: str) -> bytes:
    """OpenAI's error object as JSON."""
    openai_type = "server_error" if status >= 500 else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": openai_type, "param": None, "code": code}}).encode()


def _status_detail(scope: Scope, status: int) -> str:
    path = path_below(scope)
    match status:
        case 404:
            return f"there is no {path}; /docs lists all paths"
        case 405:
            return f"{path} does not support {scope['method']}; /docs lists all methods"
    return HTTPStatus(status).phrase


def _validation_message(error: Mapping[str, Any]) -> str:
    """The message of a pydantic error, without the value, which may be large or invalid JSON."""
    message = error["msg"].removeprefix("Value error, ")  # pydantic's prefix for errors of our validators
    return f"{_location(error)}: {message[0].lower()}{message[1:]}"


def _location(error: Mapping[str, Any]) -> str:
    # Alternatives of a field are named after pydantic's validators (`list[str]`), which mean nothing to a client.
    parts = [part for part in error["loc"] if isinstance(part, int) or "[" not in part]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


# -- documentation -----------------------------------------------------------------------------------------------------

Responses = dict[int | str, dict[str, Any]]


class ProblemDetails(BaseModel):
    """The body of every error response (RFC 9457, `application/problem+json`)."""

    type: Literal["about:blank"] = "about:blank"
    title: str = Field(description="The phrase of the HTTP status.")
    status: int
    detail: str = Field(description="What is wrong, where, and what to do.")
    code: str = Field(description="The kind of error, for programs: `not_found`, `unknown_row`, …")
    data: dict[str, Any] = Field(description="The values that `detail` names, for programs.")


def error_responses(*statuses: int) -> Responses:
    """The documentation of a route's error responses."""
    return {status: {"model": ProblemDetails} for status in statuses}


INFERENCE_ERRORS = error_responses(409, 413, 415, 429, 504)
"""Errors of the routes that ask models, in addition to the errors of all routes."""

PROBLEM = {"$ref": "#/components/schemas/ProblemDetails"}
COMMON_ERRORS = (421, 431, 500, 503)
"""Errors of all routes: unknown host, headers too long, internal error, unreadable folder."""
KEY_ERRORS = (401, 403)
"""Errors of the routes that need a key."""
BODY_ERRORS = (400, 403, 413, 415)
"""Errors of the routes with a body: invalid JSON, another origin, body too large, wrong Content-Type."""
HEADERS = {
    "401": ("WWW-Authenticate", "The scheme, `Bearer`, and the reason for the refusal.", {"type": "string"}),
    "429": ("Retry-After", "Seconds to wait before trying again.", {"type": "integer", "minimum": 1}),
}
"""Headers that errors always have."""


def add_common_errors(document: dict[str, Any]) -> None:
    """Add the errors that no route declares, and their media type, to the OpenAPI document, in place."""
    for operation in (operation for operations in document["paths"].values() for operation in operations.values()):
        responses = operation["responses"]
        if "4XX" in responses:  # the OpenAI protocol declares all its errors
            continue
        common = {*COMMON_ERRORS}
        common.update(KEY_ERRORS if "security" in operation else ())
        common.update(BODY_ERRORS if "requestBody" in operation else ())
        for status in common:
            responses.setdefault(str(status), {"description": HTTPStatus(status).phrase})
        for status, response in responses.items():
            if status >= "400":
                response["content"] = {PROBLEM_JSON: {"schema": PROBLEM}}
            if status in HEADERS:
                name, description, schema = HEADERS[status]
                response["headers"] = {name: {"description": description, "required": True, "schema": schema}}
        operation["responses"] = dict(sorted(responses.items()))
