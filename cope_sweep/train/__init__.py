"""Training: the steps of a run, its resume file, and its record in the store. Imports neither Ray nor MLflow."""

from cope_sweep.train.loop import Outcome, StopRequest, train_run
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer

__all__ = ["Outcome", "Runtime", "StopRequest", "Trainer", "train_run"]
