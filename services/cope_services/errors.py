"""Maps every error to a status and the body `{"error": {"type", "message"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from fastapi import FastAPI, Request
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


class DamagedCheckpointError(ServiceError):
    status, type = 500, "damaged_checkpoint"


class NotReadyError(ServiceError):
    status, type = 503, "not_ready"


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

INVALID_JSON = "the body is not valid JSON"


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error with a ProblemDetails body."""

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> JSONResponse:
        return error_response(error.status, error.type, str(error))

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> JSONResponse:
        status, kind = next(USER_ERRORS[cls] for cls in type(error).__mro__ if cls in USER_ERRORS)
        return error_response(status, kind, str(error))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = error.errors()
        if any(item["type"] == "json_invalid" for item in errors):
            return error_response(400, "invalid_json", INVALID_JSON)
        return error_response(InvalidError.status, InvalidError.type, "; ".join(map(_validation_message, errors[:5])))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        if status == 400:  # FastAPI raises it for a body that its JSON parser rejects
            return error_response(status, "invalid_json", INVALID_JSON)
        types = {404: NOT_FOUND, 413: TooLargeError.type}
        messages = {
            404: f"there is no {request.url.path}; /docs lists all paths",
            405: f"{request.url.path} does not support {request.method}; /docs lists all methods",
        }
        text = messages.get(status, "") if error.detail == status.phrase else str(error.detail)
        return error_response(status, types.get(status, status.name.lower()), text or status.phrase, error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(500, "internal_error", "internal server error; the server's log has the traceback")


def error_response(
    status: int, error_type: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response with a ProblemDetails body."""
    body = {"error": {"type": error_type, "message": message}}
    return JSONResponse(body, status, headers=dict(headers) if headers else None)


def _validation_message(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors, without the value, which may be large and need not be valid JSON."""
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    return f"{location}: {error['msg'][0].lower()}{error['msg'][1:]}"
