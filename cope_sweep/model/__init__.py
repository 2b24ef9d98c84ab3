"""The transformers that runs train, and their checkpoints."""

from cope_sweep.errors import CheckpointError
from cope_sweep.model.checkpoint import load_model, save_model
from cope_sweep.model.loss import next_token_loss, perplexity
from cope_sweep.model.packing import Packing
from cope_sweep.model.transformer import Cache, Transformer, check_reach

__all__ = [
    "Cache",
    "CheckpointError",
    "Packing",
    "Transformer",
    "check_reach",
    "load_model",
    "next_token_loss",
    "perplexity",
    "save_model",
]
