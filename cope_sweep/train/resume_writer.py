"""Writes resume files while the training goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cope_sweep.store import RunFolder
from cope_sweep.train.resume import ResumeState, take_state, write_state
from cope_sweep.train.trainer import Trainer

COPIED_BYTES = 2**28
"""On a CPU, a larger state is written before the next step: its copy would add to the peak memory of the training."""


class ResumeWriter:
    """Writes the resume file of one run, at most one at a time.

    The state is copied at once and written by a thread. The file is replaced when it is complete, so a process that is
    killed leaves the one before. An error of the thread is raised by the next call.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="resume")
        self._pending: Future[None] | None = None
        self.saved_s = time.monotonic()
        """When the last file was complete, or when this object was made, on the monotonic clock."""
        self.duration_s = 0.0
        """How long the last file took."""

    @property
    def busy(self) -> bool:
        """Whether a file is being written. Raises the error of one that could not be written."""
        if self._pending is not None and self._pending.done():
            self.wait()
        return self._pending is not None

    def write(self, trainer: Trainer, notes: Mapping[str, Any]) -> None:
        """Write the trainer's state after what is pending. Raises OSError and FencedError of earlier files, too."""
        self.wait()
        started_s = time.monotonic()
        on_cpu = trainer.device.type == "cpu"
        size_bytes = sum(3 * parameter.nbytes for parameter in trainer.model.parameters())
        if on_cpu and size_bytes > COPIED_BYTES:
            self._write(take_state(trainer, notes), started_s)
        else:
            self._pending = self._executor.submit(self._write, take_state(trainer, notes, copy=True), started_s)

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
        with self._folder.writing_resume() as path:
            write_state(path, state)
        self.saved_s = time.monotonic()
        self.duration_s = self.saved_s - started_s
