"""Maps every error to a status and the body `{"error": {"type", "message"}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cope_sweep.errors import UserError
from cope_sweep.queries import NotFinishedError, NotFoundError
from cope_sweep.spec import SpecError
from cope_sweep.store import QueryError, StoreError
from cope_sweep.store.index import IndexUnavailable


class ServiceError(Exception):
    """An error with the status and the type that the client receives."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response."""
        return {}


class NotAcceptableError(ServiceError):
    status, type = 406, "not_acceptable"


class TooLargeError(ServiceError):
    status, type = 413, "too_large"


class MediaTypeError(ServiceError):
    status, type = 415, "unsupported_media_type"


class InvalidError(ServiceError):
    status, type = 422, "invalid_request"


class InvalidTokensError(ServiceError):
    status, type = 422, "invalid_tokens"


class ConflictError(ServiceError):
    status, type = 409, "conflict"


class NotFiniteOutputError(ServiceError):
    status, type = 409, "not_finite"


class BusyError(ServiceError):
    status, type = 429, "too_many_requests"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        return {"retry-after": str(self.retry_after_s)}


class DamagedCheckpointError(ServiceError):
    status, type = 500, "damaged_checkpoint"


class NotReadyError(ServiceError):
    status, type = 503, "not_ready"


class NoClusterError(ServiceError):
    status, type = 503, "no_cluster"


class TimeLimitError(ServiceError):
    status, type = 504, "time_limit"


NOT_FOUND = "not_found"
USER_ERRORS: Mapping[type[UserError], tuple[int, str]] = {
    NotFoundError: (404, NOT_FOUND),
    NotFinishedError: (409, "conflict"),
    SpecError: (409, "invalid_ablation"),
    QueryError: (422, InvalidError.type),
    IndexUnavailable: (503, NotReadyError.type),
    StoreError: (500, "damaged_store"),
    UserError: (500, "internal_error"),
}
"""Status and type of the errors of `cope_sweep`. `predictors` maps the errors of modules that import torch."""

OPENAI_PATH = re.compile(r"(/openai/[^/]+)?/(v1/|tokenizer_info$|tokenize$|detokenize$)")
INTERNAL_ERROR = "internal server error; the server's log has the traceback"
INVALID_JSON = "the body is not valid JSON"


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error with a ProblemDetails body."""

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return respond(request, error.status, error.type, str(error), error.headers)

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> Response:
        status, kind = next(USER_ERRORS[cls] for cls in type(error).__mro__ if cls in USER_ERRORS)
        return respond(request, status, kind, str(error))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        if any(item["type"] == "json_invalid" for item in errors):
            return respond(request, 400, "invalid_json", INVALID_JSON)
        message = "; ".join(map(_validation_message, errors[:5]))
        return respond(request, InvalidError.status, InvalidError.type, message)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        if status == 400:  # FastAPI raises it for a body that its JSON parser rejects
            return respond(request, status, "invalid_json", INVALID_JSON)
        types = {404: NOT_FOUND, 413: TooLargeError.type}
        messages = {
            404: f"there is no {request.url.path}; /docs lists all paths",
            405: f"{request.url.path} does not support {request.method}; /docs lists all methods",
        }
        text = messages.get(status, "") if error.detail == status.phrase else str(error.detail)
        kind = types.get(status, status.name.lower())
        return respond(request, status, kind, text or status.phrase, error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return respond(request, 500, "internal_error", INTERNAL_ERROR)


def respond(
    request: Request, status: int, error_type: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A response with a ProblemDetails body, or on a route of the OpenAI protocol with OpenAI's error object."""
    if not OPENAI_PATH.match(request.url.path):
        return error_response(status, error_type, message, headers)
    # OpenAI answers 400 where this service answers 422.
    content = error_object(status, error_type, message)
    headers = dict(headers) if headers else None
    return Response(content, 400 if status == 422 else status, headers, media_type="application/json")


def error_object(status: int, error_type: str, message: str) -> bytes:
    """OpenAI's error object as JSON. Its `code` is the type of error of this service."""
    openai_type = "server_error" if status >= 500 else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": openai_type, "param": None, "code": error_type}}).encode()


def error_response(
    status: int, error_type: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response with a ProblemDetails body."""
    body = {"error": {"type": error_type, "message": message}}
    return JSONResponse(body, status, headers=dict(headers) if headers else None)


def _validation_message(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors, without the value, which may be large and need not be valid JSON."""
    # Alternatives of a field have the names of pydantic's validators, as in `list[str]`: they say nothing to a client.
    parts = [part for part in error["loc"] if isinstance(part, int) or "[" not in part]
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    return f"{location}: {error['msg'][0].lower()}{error['msg'][1:]}"
