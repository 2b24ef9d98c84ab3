"""Runs that continue a finished, shorter run: the same run with more steps, where the learning rate allows it.

Training depends on `train.steps` only through the learning rate. With a constant rate, the first steps of the longer
run are those of the shorter one, to the bit, so the longer run may start from the state that the shorter one left.
It is a run of its own, which names the shorter one as its parent.

What the shorter run has to keep for that is the resume file of its last step, written before the last loss is logged
and before the last evaluation. The longer run then copies the rows of the curve before that step, restores the file and
logs that step itself: whether it evaluates there, and on how many sequences, differs between both.
"""

from __future__ import annotations

from collections.abc import Iterable

from cope_sweep.config.run import RunSpec
from cope_sweep.optim import Constant


def parent_ids(run: RunSpec, steps: Iterable[int]) -> dict[str, int]:
    """Run id → number of steps of the runs that `run` can continue, the longest first.

    `steps` are the numbers of steps that occur in the store. An id is a hash, so nothing has to be searched: those ids
    that the store has as finished runs are the parents. Empty where the learning rate does not allow a continuation.
    """
    if not isinstance(run.train.schedule, Constant):
        return {}
    shorter = sorted({number for number in steps if run.train.warmup <= number < run.train.steps}, reverse=True)
    return {_with_steps(run, number).run_id: number for number in shorter}


def _with_steps(run: RunSpec, steps: int) -> RunSpec:
    # Not `model_copy` of the run: that would copy its run id, too.
    parts = {name: getattr(run, name) for name in RunSpec.model_fields}
    return RunSpec.model_validate(parts | {"train": run.train.model_copy(update={"steps": steps})})
