"""What sweeps and runs leave behind: the ledger (a folder per run, the source of truth) and its copy in MLflow."""

from cope_sweep.record.event import Event, Status
from cope_sweep.record.ledger import Ledger, RunFolder, StoreError

__all__ = ["Event", "Ledger", "RunFolder", "Status", "StoreError"]
