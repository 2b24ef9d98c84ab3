"""The index of a store: an SQL database that answers what is asked of many runs."""

from cope_sweep.config.filters import Filter
from cope_sweep.store.index.database import (
    IndexDamagedError,
    IndexUnavailable,
    IndexUnusable,
    OtherFormatError,
    waiting,
)
from cope_sweep.store.index.index import Index, InTrainingError, in_training
from cope_sweep.store.index.model import (
    Activity,
    Lease,
    QueryError,
    Refusal,
    Renewal,
    RunQuery,
    SweepPlace,
    Variant,
)

__all__ = [
    "Activity",
    "Filter",
    "InTrainingError",
    "Index",
    "IndexDamagedError",
    "IndexUnavailable",
    "IndexUnusable",
    "Lease",
    "OtherFormatError",
    "QueryError",
    "Refusal",
    "Renewal",
    "RunQuery",
    "SweepPlace",
    "Variant",
    "in_training",
    "waiting",
]  # fmt: skip
