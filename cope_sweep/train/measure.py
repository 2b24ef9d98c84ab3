"""Measures what a training step costs on this machine: of one run in this process, or of all shapes of a plan.

Shapes of a plan are measured in a separate process, which may run out of memory. Linux ends a process that does,
without any error in it, and may choose another one of this machine. So the process is watched, and ended before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch

from cope_sweep.config import Plan, Resources, RunSpec
from cope_sweep.config.estimate import RunShape, StepCost, shape_of
from cope_sweep.errors import UserError
from cope_sweep.registry import load_plugins
from cope_sweep.train.facts import peak_bytes, reset_peak
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer
from cope_sweep.train.workers import prepare_data

WARM_UP_STEPS = 1
"""Steps that are not timed: the first one may build kernels and allocates the optimiser's state."""

CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Part of the message of a plain RuntimeError: torch 2.15 has no specific error for it on a CPU."""


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
        with runtime.applied():
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


RESERVED_BYTES = 512 * 2**20
"""Memory that is left for other processes of the machine."""
WATCH_INTERVAL_S = 0.05
"""Time between two readings of the memory of the process, in which it can grow by about 100 MB."""
CGROUP = Path("/sys/fs/cgroup")


def measure_plan(
    plan: Plan,
    *,
    steps: int = 5,
    limit_bytes: float = math.inf,
    on_shape: Callable[[str, int, int], None] = lambda row, number, total: None,
) -> dict[RunShape, StepCost]:
    """Shape → measured cost, for every distinct shape of the plan's rows and examples. Give it to `estimates`.

    Args:
        plan: The plan. Each row is measured with its resources.
        steps: Number of timed steps of each shape.
        limit_bytes: The most memory that the process may use; the free memory of the machine is a limit, too.
        on_shape: Called before each measurement with the name of the first row of that shape, the number of the shape
            and how many there are.

    Raises:
        UserError: The data of a task cannot be used.
    """
    rows = {shape_of(row.runs[0]): row for row in reversed((*plan.rows, *plan.examples))}
    costs: dict[RunShape, StepCost] = {}
    with contextlib.closing(_Measurer(tuple(plan.ablation.content.plugins), steps, limit_bytes)) as measurer:
        for number, (shape, row) in enumerate(reversed(rows.items()), start=1):
            on_shape(row.name, number, len(rows))
            costs[shape] = measurer.measure(row.runs[0], plan.resources_of(row))
    return costs


class _Measurer:
    """A process that measures one run after another. After it has ended, the next run gets a new one."""

    def __init__(self, plugins: tuple[str, ...], steps: int, limit_bytes: float) -> None:
        self.settings = (plugins, steps)
        self.limit_bytes = limit_bytes
        self.process: BaseProcess | None = None
        self.connection: Connection | None = None

    def measure(self, run: RunSpec, resources: Resources) -> StepCost:
        """Cost of a step of `run` with these resources. Raises what the measurement raised."""
        process, connection = self._started()
        connection.send((run, resources))
        peak_bytes = 0
        with contextlib.suppress(EOFError, ConnectionError):
            while not connection.poll(WATCH_INTERVAL_S):
                used_bytes = _used_bytes(process.pid)
                peak_bytes = max(peak_bytes, used_bytes)
                if used_bytes > self.limit_bytes or _left_bytes() < RESERVED_BYTES:
                    process.kill()
            answer = connection.recv()
            if isinstance(answer, Exception):
                raise answer
            cost: StepCost = answer
            return cost
        process.join()
        self.process = None
        if process.exitcode != -9:  # neither this process nor Linux has ended it for its memory
            raise UserError(
                f"the process that measured {run.run_id} ended with exit code {process.exitcode}; "
                "`cope-sweep run … --local` shows what it prints, and `plan` without --measure estimates without it",
                code="measurement_crashed",
                run_id=run.run_id,
                exit_code=process.exitcode,
            )
        return StepCost(math.inf, peak_bytes)

    def _started(self) -> tuple[BaseProcess, Connection]:
        if self.process is None or self.connection is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other = context.Pipe()
            self.process = context.Process(target=_serve, args=(other, *self.settings), daemon=True)
            self.process.start()
            other.close()
        return self.process, self.connection

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, plugins: tuple[str, ...], steps: int) -> None:
    """Measure each run that is sent with its resources, and send its cost or an exception."""
    load_plugins(plugins)
    for run, resources in _received(connection):
        try:
            runtime = Runtime.of(resources, worker_id="measure")
            answer: object = measure_step(run, runtime, workers=resources.workers, steps=steps)
        except Exception as error:
            answer = error
        connection.send(answer)


def _received(connection: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError):
        while True:
            yield connection.recv()


def _used_bytes(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _left_bytes() -> float:
    """The memory that is free, on the machine and in its container."""
    free_bytes = float(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            free_bytes = min(free_bytes, int(limit) - int(used) + _cached_bytes())
    return free_bytes


def _cached_bytes() -> int:
    """Files that the container holds in memory, which counts them as used."""
    fields = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    return int(fields["inactive_file"]) + int(fields["active_file"])
