"""Training: a run's steps, its state in files, and its way through the ledger. No Ray, no MLflow."""

from cope_sweep.model import CheckpointError, load_model
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.train_run import Outcome, train_run
from cope_sweep.train.trainer import Trainer

__all__ = ["CheckpointError", "Outcome", "Runtime", "Trainer", "load_model", "train_run"]
