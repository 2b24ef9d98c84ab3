"""Training: a run's steps, its state in files, and its way through the ledger. No Ray, no MLflow."""

from cope_sweep.model import CheckpointError, load_model
from cope_sweep.train.execute import Outcome, execute
from cope_sweep.train.execution import Execution
from cope_sweep.train.trainer import Trainer

__all__ = ["CheckpointError", "Execution", "Outcome", "Trainer", "execute", "load_model"]
