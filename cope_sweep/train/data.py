"""Prepares the data that a run's task reads, and checks that all workers read the same."""

from __future__ import annotations

from cope_sweep.config import RunSpec
from cope_sweep.errors import UserError
from cope_sweep.train.collective import gather
from cope_sweep.train.runtime import Runtime


class DataError(UserError):
    """The data differ from those that the run was started on, or from those of other workers."""


def prepare_data(spec: RunSpec, runtime: Runtime) -> str | None:
    """Prepare the task's data and return their fingerprint; None where the task generates its data.

    Raises UserError where the data cannot be used, and DataError where workers read different data.
    """
    task = spec.task
    task.prepare()
    for context in spec.evaluate.contexts:
        for split in task.TESTS:
            task.windows(split, context, spec.evaluate.stride or context)  # raises where a text is too short
    fingerprints = gather(runtime, task.fingerprint())
    if len(set(fingerprints)) > 1:
        listed = ", ".join(f"rank {rank}: {data}" for rank, data in enumerate(fingerprints))
        raise DataError(f"the workers read different data ({listed}); give every node the same files")
    return fingerprints[0]
