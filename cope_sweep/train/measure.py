"""Measures the shapes of a plan: what a step of each distinct shape costs on this machine.

Shapes are measured in a process of their own, which may run out of memory. Linux ends a process that does, without any
error in it, and may choose another one of this machine. So the process is watched, and ended before.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cope_sweep.config import Plan, Resources, RunSpec
from cope_sweep.config.estimate import Shape, StepCost, shape_of
from cope_sweep.errors import UserError
from cope_sweep.registry import load_plugins

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

RESERVED_BYTES = 512 * 2**20
"""Memory that is left to the other processes of the machine."""
WATCH_INTERVAL_S = 0.05
"""Time between two looks at the memory of the process, in which it can grow by about 100 MB."""
CGROUP = Path("/sys/fs/cgroup")


def measure_plan(
    plan: Plan,
    *,
    steps: int = 5,
    limit_bytes: float = math.inf,
    on_shape: Callable[[str, int, int], None] = lambda row, number, total: None,
) -> dict[Shape, StepCost]:
    """Shape → measured cost, for every distinct shape of the plan's rows and examples. Give it to `estimates`.

    Args:
        plan: The plan. Each row is measured with its resources.
        steps: Number of timed steps of each shape.
        limit_bytes: The most memory that the process may use, besides what the machine has left.
        on_shape: Called before each measurement with the name of the first row of that shape, the number of the shape
            and how many there are.

    Raises:
        UserError: The data of a task cannot be used.
    """
    rows = {shape_of(row.runs[0]): row for row in reversed((*plan.rows, *plan.examples))}
    costs: dict[Shape, StepCost] = {}
    with contextlib.closing(_Measurer(tuple(plan.ablation.content.plugins), steps, limit_bytes)) as measurer:
        for number, (shape, row) in enumerate(reversed(rows.items()), start=1):
            on_shape(row.name, number, len(rows))
            costs[shape] = measurer.measure(row.runs[0], plan.resources_of(row))
    return costs


class _Measurer:
    """A process that measures one run after another. After it has died, the next run gets a new one."""

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
                "`cope-sweep run … --local` shows what it prints, and `plan` without --measure estimates without it"
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
    from cope_sweep.train.measure_step import measure_step
    from cope_sweep.train.runtime import Runtime

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
    left = float(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            left = min(left, int(limit) - int(used) + _cached_bytes())
    return left


def _cached_bytes() -> int:
    """Files that the container holds in memory, which counts them as used."""
    fields = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    return int(fields["inactive_file"]) + int(fields["active_file"])
