"""What happened, kept: the ledger (the truth), and MLflow (what people browse)."""

from cope_sweep.record.event import Event, Status
from cope_sweep.record.ledger import Ledger, RunFolder, StoreError

__all__ = ["Event", "Ledger", "RunFolder", "Status", "StoreError"]
