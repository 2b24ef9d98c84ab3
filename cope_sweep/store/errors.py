"""Errors of the store."""

from cope_sweep.errors import UserError


class StoreError(UserError):
    """The store cannot be used; the message says which path, why, and what to do."""

    default_code = "damaged_store"


class StoreUnreachable(StoreError):
    """The object store does not answer, or refuses the request."""

    default_code = "unreachable_store"


class FencedError(StoreError):
    """A newer attempt owns the run's folder: this one may not write to it any more."""

    default_code = "fenced"


class DamagedError(StoreError):
    """A file of a run cannot be read, or has not the content that it should have."""

    default_code = "damaged_file"
