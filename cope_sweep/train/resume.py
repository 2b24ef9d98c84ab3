"""A training to go on with, in one file: `resume.safetensors` holds parameters, AdamW's moments, the step, and
the losses not yet reported, with what the run is to know of its earlier attempts.

A finished model's checkpoint is `cope_sweep.model.checkpoint`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cope_sweep.model.checkpoint import CheckpointError, distinct, read_tensors
from cope_sweep.train.trainer import Trainer


def save_resume(path: Path, trainer: Trainer, notes: Mapping[str, Any]) -> None:
    """Write everything that `load_resume` needs to go on to the bit; `notes` (JSON) are handed back to it."""
    tensors = {f"model/{name}": value for name, value in distinct(trainer.model.state_dict()).items()}
    for index, moments in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"adam/{index}/{name}": value for name, value in moments.items()}
    if trainer.losses:
        tensors["losses"] = torch.stack(trainer.losses)
    metadata = {"step": str(trainer.step), "run_id": trainer.spec.run_id, "notes": json.dumps(notes)}
    save_file(tensors, path, metadata=metadata)


def load_resume(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Put `trainer` where `save_resume` left it; its notes. Raises CheckpointError for a file that cannot be it."""
    tensors = read_tensors(path, trainer.runtime.device)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("run_id") != trainer.spec.run_id:
            raise CheckpointError(f"{path}: of run {metadata.get('run_id')}, not {trainer.spec.run_id}")
        model = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
        if trainer.spec.model.tied:
            model["head.weight"] = model["embedding.weight"]
        trainer.model.load_state_dict(model)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("adam/"):
                _, index, moment = name.split("/")
                state.setdefault(int(index), {})[moment] = value
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict() | {"state": state})
        trainer.losses = list(tensors.get("losses", ()))
        trainer.step = int(metadata["step"])
        notes: dict[str, Any] = json.loads(metadata.get("notes", "{}"))
    except (RuntimeError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: does not fit run {trainer.spec.run_id} ({error})") from error
    return notes
