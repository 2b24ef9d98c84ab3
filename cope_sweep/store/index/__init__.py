"""The index of a store: an SQL database that answers what is asked of many runs."""

from cope_sweep.store.index.database import (
    IndexDamagedError,
    IndexUnavailable,
    IndexUnusable,
    OtherFormatError,
    waiting,
)
from cope_sweep.store.index.index import Index
from cope_sweep.store.index.model import (
    Activity,
    Filter,
    Lease,
    Place,
    QueryError,
    Refusal,
    Renewal,
    RunQuery,
)

__all__ = [
    "Activity", "Filter", "Index", "IndexDamagedError", "IndexUnavailable", "IndexUnusable", "Lease",
    "OtherFormatError", "Place", "QueryError", "Refusal", "Renewal", "RunQuery", "waiting",
]  # fmt: skip
