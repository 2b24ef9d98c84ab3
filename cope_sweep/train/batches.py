"""Training batches: a background thread makes each worker's share of the next steps while the current step runs.

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.kernels.dropout import sequence_seeds
from cope_sweep.tasks import IGNORED, Batch, Task
from cope_sweep.train.runtime import Runtime

AHEAD = 2
"""Shares that are made before they are needed."""


class BatchPart(NamedTuple):
    """The input of one forward pass."""

    inputs_NT: Tensor
    targets_NT: Tensor
    seeds_N: Tensor
    """The seeds of the sequences' dropout masks."""


@dataclass(frozen=True)
class BatchShare:
    """Sequences that one worker processes in a step, in the memory of the host."""

    parts: list[BatchPart]
    targets: int
    """Number of targets in this share."""
    tokens: int
    """Number of tokens in the whole batch, over all workers."""


class Batches:
    """The shares of one worker, by step. A share is made in the background, at most `AHEAD` steps early."""

    def __init__(self, spec: RunSpec, runtime: Runtime) -> None:
        self._spec, self._runtime = spec, runtime
        self._executor: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[int, Future[BatchShare]]] = deque()

    def take(self, step: int) -> BatchShare:
        """The share of step `step`, counted from 0. Raises what its task raised."""
        if self._executor is None:
            # The thread ends with this object, or when the process ends.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
        if self._pending and self._pending[0][0] != step:  # the trainer was set to another step
            self._drop()
        first = self._pending[-1][0] + 1 if self._pending else step
        last = min(step + AHEAD, max(step, self._spec.train.steps - 1))
        for each in range(first, last + 1):
            self._pending.append((each, self._executor.submit(make_share, self._spec, self._runtime, each)))
        return self._pending.popleft()[1].result()

    def close(self) -> None:
        """End the thread. A later `take` starts another one."""
        self._drop()
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None

    def _drop(self) -> None:
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()


def make_share(spec: RunSpec, runtime: Runtime, step: int) -> BatchShare:
    """One worker's share of the batch of a step, counted from 0; the workers' shares in order are the batch."""
    size = spec.train.batch
    own = own_sequences(spec.task, "train", spec.seed, step * size, size, runtime)
    targets = int((own.targets_NT != IGNORED).sum())
    # All workers must run a backward pass: one without a sequence takes one without targets.
    parts = list(in_parts(own, runtime.micro_batch)) or [_without_targets(spec, step * size)]
    first = own_range(step * size, size, runtime).start
    tensors = []
    for part in parts:
        seeds_N = sequence_seeds(spec.seed, range(first, first + len(part)))
        made = (torch.from_numpy(part.inputs_NT), torch.from_numpy(part.targets_NT), seeds_N)
        tensors.append(BatchPart(*(each.pin_memory() if runtime.device == "cuda" else each for each in made)))
        first += len(part)
    return BatchShare(tensors, targets, size * parts[0].inputs_NT.shape[1])


def own_sequences(task: Task, split: str, seed: int, start: int, count: int, runtime: Runtime) -> Batch:
    """The sequences that a worker takes of `start` … `start + count − 1`; it generates no others. It may be empty."""
    own = own_range(start, count, runtime)
    # A task always generates something; an empty batch still has the names of its units.
    return task.sequences(split, seed, own.start, max(1, len(own)))[: len(own)]


def own_range(start: int, count: int, runtime: Runtime) -> range:
    """The indices that a worker takes of `count` from `start`: one after another, so that it generates only its own.

    Shares differ by at most one; rank 0, whose memory is recorded, never has the smaller one.
    """
    first, last = (-(-count * rank // runtime.world_size) for rank in (runtime.rank, runtime.rank + 1))
    return range(start + first, start + last)


def in_parts(share: Batch, at_once: int | None) -> Iterator[Batch]:
    """The share in parts of `at_once` sequences; None: in one part. None of no sequences."""
    size = at_once or max(1, len(share))
    for start in range(0, len(share), size):
        yield share[start : start + size]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; from pinned memory, the copy does not block this thread."""
    return tensor.to(device, non_blocking=True)


def _without_targets(spec: RunSpec, index: int) -> Batch:
    batch = spec.task.sequences("train", spec.seed, index, 1)
    return Batch(batch.inputs_NT, np.full_like(batch.targets_NT, IGNORED), np.zeros_like(batch.answers_NT))
