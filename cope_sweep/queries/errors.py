"""Errors of the queries."""

from cope_sweep.errors import UserError


class NotFoundError(UserError):
    """There is no such ablation, run or sweep."""


class NotFinishedError(UserError):
    """The run exists and is not finished."""
