"""JSON schemas of requests, and of responses that are not answers of `cope_sweep.read.queries`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Responses = dict[int | str, dict[str, Any]]


class ProblemDetails(BaseModel):
    """The body of every error response (RFC 9457, `application/problem+json`)."""

    type: Literal["about:blank"] = "about:blank"
    title: str = Field(description="The phrase of the status.")
    status: int
    detail: str = Field(description="What is wrong, where, and what to do.")
    code: str = Field(description="The kind of error, for programs: `not_found`, `invalid_request`, …")


def error_responses(*statuses: int) -> Responses:
    """The documentation of a route's error responses."""
    return {status: {"model": ProblemDetails} for status in statuses}


INFERENCE_ERRORS = error_responses(409, 413, 415, 429, 504)
"""Answers of a route that asks a model, besides the errors of all routes."""


class Health(BaseModel):
    status: str
