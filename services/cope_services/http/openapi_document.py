"""Completes the OpenAPI document with what no single route declares: the media type of errors, and common errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from cope_services.http.errors import PROBLEM_JSON

PROBLEM = {"$ref": "#/components/schemas/ProblemDetails"}
COMMON_ERRORS = (421, 500, 503)
"""Errors of all routes: a host that is not this service; an error in the server; a folder that cannot be read."""
KEY_ERRORS = (401, 403)
"""Errors of the routes that need a key."""
BODY_ERRORS = (400, 403, 413, 415)
"""Errors of the routes with a body: invalid JSON, another origin, too slow, too many bytes, not declared as JSON."""
HEADERS = {
    "401": ("WWW-Authenticate", "The scheme, `Bearer`, and what is wrong with the key.", {"type": "string"}),
    "429": ("Retry-After", "Seconds after which to try again.", {"type": "integer", "minimum": 1}),
}
"""Headers that errors always have."""


def complete(document: dict[str, Any]) -> None:
    """Complete a document, in place."""
    for operations in document["paths"].values():
        for operation in operations.values():
            _complete_operation(operation)


def _complete_operation(operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if "4XX" in responses:  # the OpenAI protocol declares all its errors
        return
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
