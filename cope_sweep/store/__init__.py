"""What sweeps and runs leave behind: the store (a folder per run, the source of truth) and its copy in MLflow."""

from cope_sweep.store.artifacts import RunFolder, Store, StoreError
from cope_sweep.store.event import Event, Status

__all__ = ["Event", "RunFolder", "Status", "Store", "StoreError"]
