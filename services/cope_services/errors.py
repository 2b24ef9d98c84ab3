"""Every error's way to the client, in one place: a status, and `{"error": {"type", "message"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cope_sweep.errors import UserError


class ServiceError(Exception):
    """What a client gets as a problem: subclasses set the status."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"


class NotFoundError(ServiceError):
    status, type = 404, "not_found"


class NotAcceptableError(ServiceError):
    status, type = 406, "not_acceptable"


class ConflictError(ServiceError):
    """The thing exists, and is not yet, or not, in a state to answer this."""

    status, type = 409, "conflict"


class TooLargeError(ServiceError):
    status, type = 413, "too_large"


class MediaTypeError(ServiceError):
    status, type = 415, "unsupported_media_type"


class InvalidError(ServiceError):
    status, type = 422, "invalid_request"


class NotReadyError(ServiceError):
    status, type = 503, "not_ready"


USER_ERRORS: Mapping[str, tuple[int, str]] = {
    "ProbeError": (422, "invalid_request"),
    "TokensError": (422, "invalid_tokens"),
    "SpecError": (409, "invalid_ablation"),
    "CheckpointError": (500, "damaged_checkpoint"),
    "StoreError": (500, "damaged_store"),
}
"""The library's own errors, by the name of their class: importing some of the classes would import torch."""


INVALID_JSON = "the body is not valid JSON"


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem."""

    @app.exception_handler(ServiceError)
    async def service(request: Request, error: ServiceError) -> JSONResponse:
        return problem(error.status, error.type, str(error))

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> JSONResponse:
        names = [cls.__name__ for cls in type(error).__mro__]
        status, kind = next((USER_ERRORS[name] for name in names if name in USER_ERRORS), (500, "internal_error"))
        return problem(status, kind, str(error))

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = error.errors()
        if any(item["type"] == "json_invalid" for item in errors):
            return problem(400, "invalid_json", INVALID_JSON)
        return problem(InvalidError.status, InvalidError.type, "; ".join(map(_said, errors[:5])))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        if status == 400:  # FastAPI's word for a body that its JSON parser stumbled over
            return problem(status, "invalid_json", INVALID_JSON)
        kinds = {404: NotFoundError.type, 413: TooLargeError.type}
        messages = {
            404: f"nothing is at {request.url.path}; /docs lists what there is",
            405: f"{request.method} is not possible at {request.url.path}; /docs lists what is",
        }
        text = messages.get(status, "") if error.detail == status.phrase else str(error.detail)
        return problem(status, kinds.get(status, status.name.lower()), text or status.phrase, error.headers)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> JSONResponse:
        return problem(500, "internal_error", "an error of the server's own; its log has the traceback")


def problem(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The one shape of every error."""
    body = {"error": {"type": kind, "message": message}}
    return JSONResponse(body, status, headers=dict(headers) if headers else None)


def _said(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors, without the value: that can be as large as the request, and need not be JSON."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"
