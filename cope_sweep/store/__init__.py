"""The store: the files of each run, and the index over all of them."""

from cope_sweep.records import (
    ACTIVE,
    ENDED,
    STATUSES,
    SWEEP_ID,
    Budget,
    Event,
    RunPage,
    RunRecord,
    Status,
    SweepPage,
    SweepProgress,
    SweepSummary,
    new_sweep_id,
)
from cope_sweep.store.artifacts import AttemptWriter, RunFolder
from cope_sweep.store.errors import StoreError
from cope_sweep.store.index import Filter, Lease, QueryError, Refusal, Renewal, RunQuery
from cope_sweep.store.parquet import ParquetStore, open_store
from cope_sweep.store.store import Store
from cope_sweep.store.submissions import Submission, read_submission, write_submission
from cope_sweep.store.sweeps import SweepRecord, SweepRun

__all__ = [
    "ACTIVE", "ENDED", "STATUSES", "SWEEP_ID", "AttemptWriter", "Budget", "Event", "Filter", "Lease",
    "ParquetStore",
    "QueryError", "Refusal", "Renewal", "RunFolder", "RunPage", "RunQuery", "RunRecord", "Status", "Store",
    "StoreError", "Submission", "SweepPage", "SweepProgress", "SweepRecord", "SweepRun", "SweepSummary",
    "new_sweep_id", "open_store", "read_submission", "write_submission",
]  # fmt: skip
