"""Sequences of a task's splits, as a checkpoint is probed on them."""

from __future__ import annotations

from cope_sweep.inference.probe.matrices import ProbeError
from cope_sweep.tasks import IGNORED, Task


def split_sequences(task: Task, split: str | None, index: int, count: int = 1) -> list[list[int]]:
    """`count` sequences of token ids from `index` on, without padding; without split, of the first test set.

    Raises ProbeError for a split that the task does not have, and an index beyond its end.
    """
    try:
        batch = task.sequences(split or task.TESTS[0], 0, index, count)  # 0: the seed of every run's test sets
    except ValueError as error:
        raise ProbeError(f"the split: {error}") from error
    if not len(batch):
        raise ProbeError(f"the split has no sequence {index}; choose a smaller index")
    ends_N = [(row_T != IGNORED).nonzero()[0][-1] + 1 for row_T in batch.targets_NT]
    return [row_T[:end].tolist() for row_T, end in zip(batch.inputs_NT, ends_N, strict=True)]
