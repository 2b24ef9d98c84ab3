"""Errors of the store."""

from cope_sweep.errors import UserError


class StoreError(UserError):
    """The store cannot be used; the message says which path, why, and what to do."""
