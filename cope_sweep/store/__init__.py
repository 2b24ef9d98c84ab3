"""The store: the files of each run, and the index over all of them.

Modules are imported when their names are used: a client of the service needs only the names of statuses.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cope_sweep.store.artifacts import Attempt, RunFolder
    from cope_sweep.store.budget import Budget
    from cope_sweep.store.errors import StoreError
    from cope_sweep.store.event import Event, Status
    from cope_sweep.store.index import (
        Filter,
        Lease,
        QueryError,
        Refusal,
        Renewal,
        RunPage,
        RunQuery,
        RunRecord,
    )
    from cope_sweep.store.records import ACTIVE, SweepProgress, SweepSummary
    from cope_sweep.store.store import Store
    from cope_sweep.store.submissions import Submission, read_submission, write_submission
    from cope_sweep.store.sweeps import SweepRecord, SweepRun

_MODULES = {
    "ACTIVE": "records",
    "Attempt": "artifacts",
    "RunFolder": "artifacts",
    "StoreError": "errors",
    "Event": "event",
    "Status": "event",
    "Filter": "index",
    "Lease": "index",
    "QueryError": "index",
    "Refusal": "index",
    "Renewal": "index",
    "RunPage": "index",
    "RunQuery": "index",
    "RunRecord": "index",
    "SweepProgress": "records",
    "SweepSummary": "records",
    "Store": "store",
    "Budget": "budget",
    "Submission": "submissions",
    "read_submission": "submissions",
    "write_submission": "submissions",
    "SweepRecord": "sweeps",
    "SweepRun": "sweeps",
}

__all__ = [
    "ACTIVE", "Attempt", "Budget", "Event", "Filter", "Lease", "QueryError", "Refusal", "Renewal", "RunFolder",
    "RunPage", "RunQuery", "RunRecord", "Status", "Store", "StoreError", "Submission", "SweepProgress", "SweepRecord",
    "SweepRun", "SweepSummary", "read_submission", "write_submission",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
