"""What sweeps and runs leave behind: the files of each run, the index over all of them, and the copy in MLflow."""

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import StoreError
from cope_sweep.store.event import Event, Status
from cope_sweep.store.index import Filter, Lease, QueryError, Refusal, RunPage, RunQuery, RunRecord, SweepSummary
from cope_sweep.store.leases import LeaseHolder
from cope_sweep.store.store import Store
from cope_sweep.store.submissions import Submission, read_submission, write_submission
from cope_sweep.store.sweeps import SweepRecord, SweepRun

__all__ = [
    "Event", "Filter", "Lease", "LeaseHolder", "QueryError", "Refusal", "RunFolder", "RunPage", "RunQuery", "RunRecord",
    "Status", "Store", "StoreError", "Submission", "SweepRecord", "SweepRun", "SweepSummary", "read_submission",
    "write_submission",
]  # fmt: skip
