"""The state of an unfinished training in one file, `resume.safetensors`, which is written while the training goes on.

    model/<name>                                parameters; a tied weight once
    optimizer/<optimiser>/<index>/<name>        state tensors of each torch optimiser, by parameter index
    losses                                      losses that were not reported yet

The metadata hold the step, the run id, notes of the caller (JSON), state values that are not tensors, and a CRC-32 of
all that: a disk may return other bytes than were written. Older files have no checksum; they can be loaded.

The checkpoint of a finished model is another file, see `cope_sweep.model.checkpoint`.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cope_sweep.errors import CheckpointError
from cope_sweep.model.checkpoint import distinct, read_tensors
from cope_sweep.optim import uncompiled
from cope_sweep.store import AttemptWriter
from cope_sweep.train.trainer import Trainer
from cope_sweep.train.workers import place_steps

OptimizerState = dict[int, dict[str, Any]]
"""A torch optimiser's state by parameter index and name."""


@dataclass(frozen=True)
class ResumeState:
    """The content of a resume file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    copied: torch.cuda.Event | None = None
    """The end of the copy from a GPU; None for a state that needs no waiting."""


def write_state(path: Path, state: ResumeState) -> None:
    """Write a state to a file. Raises OSError."""
    if state.copied is not None:
        state.copied.synchronize()
    save_file(state.tensors, path, metadata=state.metadata | {"crc32": _checksum(state.tensors, state.metadata)})


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A CRC-32 of metadata and tensors, whatever their order and device, as hexadecimal digits."""
    crc = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def snapshot_state(trainer: Trainer, notes: Mapping[str, Any], *, copy: bool = False) -> ResumeState:
    """The trainer's whole state and `notes`, which have to be JSON values.

    With `copy`, training may go on before it is written. A copy from a GPU goes to pinned memory of the host and does
    not block this thread. Raises TypeError for optimiser state that is neither a tensor nor a JSON value.
    """
    tensors = {f"model/{name}": value for name, value in distinct(trainer.model.state_dict()).items()}
    values: dict[str, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                group: dict[str, Any] = tensors if isinstance(value, Tensor) else values
                group[f"optimizer/{number}/{index}/{name}"] = value
    if trainer.losses:
        tensors["losses"] = torch.stack(trainer.losses)
    metadata = {
        "step": str(trainer.step),
        "run_id": trainer.spec.run_id,
        "notes": json.dumps(notes),
        "optimizer_values": json.dumps(values),
    }
    if not copy:
        return ResumeState(tensors, metadata)
    if trainer.device.type != "cuda":
        return ResumeState({name: value.clone() for name, value in tensors.items()}, metadata)
    pinned = {name: torch.empty_like(value, device="cpu", pin_memory=True) for name, value in tensors.items()}
    for name, value in tensors.items():
        pinned[name].copy_(value, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return ResumeState(pinned, metadata, copied)


def load_state(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Restore the state that `write_state` wrote; training continues to the bit. Returns the notes.

    Raises CheckpointError where the file is damaged or belongs to another run.
    """
    tensors = read_tensors(path, trainer.runtime.device)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        checksum = metadata.pop("crc32", None)
        if checksum not in (None, _checksum(tensors, metadata)):
            raise CheckpointError(
                f"{path}: damaged: its content does not match its checksum {checksum}",
                code="wrong_checksum",
                file=str(path),
            )
        if metadata.get("run_id") != trainer.spec.run_id:
            raise CheckpointError(
                f"{path}: belongs to run {metadata.get('run_id')}, not to run {trainer.spec.run_id}",
                code="another_run",
                file=str(path),
                run_id=metadata.get("run_id"),
                expected=trainer.spec.run_id,
            )
        model = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
        if trainer.spec.model.tied:
            model["head.weight"] = model["embedding.weight"]
        trainer.model.load_state_dict(model)
        states = _optimizer_states(tensors | json.loads(metadata.get("optimizer_values", "{}")))
        for number, optimizer in enumerate(trainer.optimizers):
            # Not `optimizer.state_dict()`: one whose state is divided among workers has to collect it first.
            groups = uncompiled.state_dict(optimizer)["param_groups"]
            optimizer.load_state_dict({"param_groups": groups, "state": states[number]})
            place_steps(optimizer)
        trainer.losses = list(tensors.get("losses", ()))
        trainer.step = int(metadata["step"])
        notes: dict[str, Any] = json.loads(metadata.get("notes", "{}"))
    except (RuntimeError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: does not fit run {trainer.spec.run_id} ({error})",
            code="does_not_fit",
            file=str(path),
            run_id=trainer.spec.run_id,
        ) from error
    return notes


def _optimizer_states(entries: Mapping[str, Any]) -> defaultdict[int, OptimizerState]:
    """The state of each torch optimiser, by its number, from the entries of a file."""
    states: defaultdict[int, OptimizerState] = defaultdict(dict)
    for name, value in entries.items():
        kind, *path = name.split("/")
        if kind == "optimizer":
            number, index, key = path
            states[int(number)].setdefault(int(index), {})[key] = value
    return states


COPIED_BYTES = 2**28
"""On a CPU, a larger state is written before the next step: its copy would add to the peak memory of the training."""


class ResumeWriter:
    """Writes the resume file of one run, at most one at a time.

    The state is copied at once and written by a thread. The file is replaced when it is complete, so a process that is
    killed leaves the one before. An error of the thread is raised by the next call.
    """

    def __init__(self, files: AttemptWriter) -> None:
        self._files = files
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="resume")
        self._pending: Future[None] | None = None
        self.saved_s = time.monotonic()
        """Time at which the last file was complete, or this object was made, on the monotonic clock."""
        self.duration_s = 0.0
        """Duration of writing the last file."""

    @property
    def busy(self) -> bool:
        """A file is being written. Raises the error of one that could not be written."""
        if self._pending is not None and self._pending.done():
            self.wait()
        return self._pending is not None

    def write(self, trainer: Trainer, notes: Mapping[str, Any]) -> None:
        """Write the trainer's state after what is pending. Raises OSError and FencedError of earlier files, too."""
        self.wait()
        started_s = time.monotonic()
        on_cpu = trainer.device.type == "cpu"
        # Weights, and the two moments of AdamW.
        size_bytes = sum(3 * parameter.nbytes for parameter in trainer.model.parameters())
        if on_cpu and size_bytes > COPIED_BYTES:
            self._write(snapshot_state(trainer, notes), started_s)
        else:
            self._pending = self._executor.submit(self._write, snapshot_state(trainer, notes, copy=True), started_s)

    def wait(self) -> None:
        """Wait for the pending file. Raises OSError and FencedError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the pending file and end the thread. An error is dropped: use it after another error, or `wait`."""
        with contextlib.suppress(Exception):
            self.wait()
        self._executor.shutdown()

    def _write(self, state: ResumeState, started_s: float) -> None:
        with self._files.save_resume() as path:
            write_state(path, state)
        self.saved_s = time.monotonic()
        self.duration_s = self.saved_s - started_s
