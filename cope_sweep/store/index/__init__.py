"""The index of a store: an SQL database that answers what is asked of many runs."""

from cope_sweep.store.index.database import IndexUnavailable, IndexUnusable, waiting
from cope_sweep.store.index.index import Index
from cope_sweep.store.index.model import (
    Filter,
    Lease,
    QueryError,
    Refusal,
    RunPage,
    RunQuery,
    RunRecord,
    SweepSummary,
)

__all__ = [
    "Filter", "Index", "IndexUnavailable", "IndexUnusable", "Lease", "QueryError", "Refusal",
    "RunPage", "RunQuery", "RunRecord", "SweepSummary", "waiting",
]  # fmt: skip
