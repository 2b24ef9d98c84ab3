"""Probes the shapes of a plan: what a step of each distinct shape costs on this machine."""

from __future__ import annotations

from collections.abc import Callable

from cope_sweep.plan import Plan
from cope_sweep.plan.estimate import Shape, shape_of
from cope_sweep.train.probe_step import StepProbe, probe_step
from cope_sweep.train.runtime import Runtime


def probe_plan(
    plan: Plan, *, steps: int = 5, on_probe: Callable[[str, int, int], None] = lambda row, number, total: None
) -> dict[Shape, StepProbe]:
    """Shape → measured cost, for every distinct shape of the plan's rows and examples. Give it to `estimates`.

    Runs train in this process, with the resources of their rows. `on_probe` is called before each probe with the
    name of the first row of that shape, the number of the probe and how many there are.

    Raises UserError where the data of a task cannot be used.
    """
    rows = {shape_of(row.runs[0]): row for row in reversed((*plan.rows, *plan.examples))}
    probes = {}
    for number, (shape, row) in enumerate(reversed(rows.items()), start=1):
        on_probe(row.name, number, len(rows))
        resources = plan.resources_of(row)
        runtime = Runtime.of(resources, worker_id="probe")
        probes[shape] = probe_step(row.runs[0], runtime, workers=resources.workers, steps=steps)
    return probes
