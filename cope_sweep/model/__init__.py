"""The transformers that runs train, and their checkpoints."""

from cope_sweep.model.checkpoint import CheckpointError, load_model, load_run, save_model
from cope_sweep.model.packing import Packing
from cope_sweep.model.transformer import Cache, Transformer, check_reach, next_token_loss

__all__ = [
    "Cache",
    "CheckpointError",
    "Packing",
    "Transformer",
    "check_reach",
    "load_model",
    "load_run",
    "next_token_loss",
    "save_model",
]
