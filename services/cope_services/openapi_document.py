"""Completes the OpenAPI document with what no single route declares: the media type of errors, and common errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from cope_services.errors import PROBLEM_JSON

PROBLEM = {"$ref": "#/components/schemas/ProblemDetails"}
COMMON_ERRORS = (500, 503)
"""Errors of all routes: an error in the server; a folder or the index that cannot be read."""
BODY_ERRORS = (400, 413, 415)
"""Errors of the routes with a body: invalid JSON, too many bytes, and another media type than JSON."""


def complete(app: FastAPI) -> None:
    """Make the document of `app` complete. It is made once, when a client asks for it."""
    incomplete = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            for operations in incomplete()["paths"].values():
                for operation in operations.values():
                    _complete_operation(operation)
        return incomplete()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's way to extend the document


def _complete_operation(operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if "4XX" in responses:  # the OpenAI protocol declares all its errors
        return
    for status in (*COMMON_ERRORS, *(BODY_ERRORS if "requestBody" in operation else ())):
        responses.setdefault(str(status), {"description": HTTPStatus(status).phrase})
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {PROBLEM_JSON: {"schema": PROBLEM}}
    operation["responses"] = dict(sorted(responses.items()))
