"""Cost of a run's training step on this machine, from a few steps in this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import time

import torch

from cope_sweep.config import RunSpec
from cope_sweep.config.estimate import StepCost
from cope_sweep.train.data import prepare_data
from cope_sweep.train.memory import peak_bytes, reset_peak
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer

WARM_UP_STEPS = 1
"""Steps that are not timed: the first one may build kernels and allocates the optimiser's state."""

CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""In the message of a plain RuntimeError: torch 2.15 has no error of its own for it on a CPU."""


def measure_step(spec: RunSpec, runtime: Runtime, *, workers: int = 1, steps: int = 5) -> StepCost:
    """Train `steps` steps of `spec` and evaluate once, without writing anything.

    Prepares the task's data, which may take longer than the steps.

    Args:
        spec: The run. Its seed, learning rate and number of steps do not matter.
        runtime: How a worker executes runs; `rank` and `world_size` are not used.
        workers: How many workers share a batch. This process takes the share of one; communication is not measured.
        steps: Number of timed steps.

    Raises:
        UserError: The data cannot be used.
        ValueError: An encoding has no position for the task's longest sequence.
    """
    share = spec.train.model_copy(
        update={"batch": math.ceil(spec.train.batch / workers), "steps": WARM_UP_STEPS + steps}
    )
    parts = {name: getattr(spec, name) for name in RunSpec.model_fields}
    short = RunSpec.model_validate(parts | {"train": share.model_copy(update={"warmup": 0})})
    prepare_data(short, runtime)
    _free_memory()
    reset_peak(runtime.device)
    try:
        step_s = _median_step_s(Trainer(short, runtime))
    except (torch.OutOfMemoryError, MemoryError):
        step_s = math.inf
    except RuntimeError as error:
        if CPU_OUT_OF_MEMORY not in str(error):
            raise
        step_s = math.inf
    peak = peak_bytes(runtime.device)
    _free_memory()
    return StepCost(step_s, peak)


def _median_step_s(trainer: Trainer) -> float:
    durations = []
    while not trainer.done:
        started_s = time.perf_counter()
        trainer.train_step()
        trainer.wait()
        durations.append(time.perf_counter() - started_s)
    trainer.evaluate(trainer.spec.train.batch)
    trainer.close()
    timed = sorted(durations[WARM_UP_STEPS:])
    return timed[len(timed) // 2]


def _free_memory() -> None:
    """Give the memory of earlier trainers back, so that it is not counted again."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # The C library keeps freed memory for later. Not every C library can give it back.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
