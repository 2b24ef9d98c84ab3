"""Errors of the queries."""

from cope_sweep.errors import NotFoundError, UserError

__all__ = ["NotFinishedError", "NotFoundError"]


class NotFinishedError(UserError):
    """The run exists and is not finished."""
