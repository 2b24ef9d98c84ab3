"""The status and the cost of a plan, from the index."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from cope_sweep.api.answers import PlanCost, RunCost
from cope_sweep.config import Plan, Resources, RunSpec, estimates, plan_of_recorded, suggested_estimates, total_seconds
from cope_sweep.config.estimate import RAY_START_S, RunShape, StepCost, run_flops, shape_of, training_flops
from cope_sweep.config.explain import suggest
from cope_sweep.errors import NotFinishedError, NotFoundError, UserError
from cope_sweep.read.tables.row_names import find_rows
from cope_sweep.read.tables.runs import training_command
from cope_sweep.store import RunRecord, Status, Store

WALL_S, RECOMPUTES = "wall_s", "checkpoint_activations"
ENDED: tuple[Status, ...] = ("finished", "stopped")
"""Runs that the same command does not train again."""
LEAST_LOAD = 0.5
"""Load per core from which on other programs are taken to slow down training."""
GPU_DEVICES = Path("/dev")
"""The folder of the GPUs' device files, `nvidia0`, …"""


def recorded_plan(plan: Plan, store: Store) -> Plan:
    """The plan with the rows that sweeps of its ablation were suggested by its search, if that chooses as it goes."""
    if not plan.open_samples:
        return plan
    return plan_of_recorded(plan.ablation, store.index.recorded_rows(plan.name))


def finished_run(plan: Plan, store: Store, rows: Collection[str] = (), seed: int | None = None) -> RunSpec:
    """The first finished run of these rows, or of all, and of a seed, or of any. Raises UserError where none is."""
    known = [row.name for row in plan.rows]
    named = {name: find_rows(plan, name) for name in rows}
    if unknown := [name for name, found in named.items() if not found]:
        message = f"{plan.name} has no row {unknown[0]!r}{suggest(unknown[0], known)}"
        raise UserError(message, code="unknown_row", row=unknown[0], allowed=known)
    chosen = [row for found in named.values() for row in found] or plan.rows
    runs = [run for row in chosen for run in row.runs if seed in (None, run.seed)]
    statuses = store.index.statuses(run.run_id for run in runs)
    for run in runs:
        if statuses.get(run.run_id) == "finished":
            return run
    which = (f" with seed {seed}" if seed is not None else "") + (f" of {', '.join(rows)}" if rows else "")
    raise UserError(
        f"no run{which} of {plan.name} is finished in the store {store.location}; train it with: "
        f"{training_command(plan, store)}",
        code="not_finished",
        ablation=plan.name,
        rows=list(rows),
        seed=seed,
    )


def best_of_row(plan: Plan, store: Store, row: str) -> str:
    """The id of the row's finished run with the best value of the primary metric.

    Raises NotFoundError for an unknown row, NotFinishedError where no run is finished.
    """
    rows, name = find_rows(plan, row), plan.ablation.cli_args
    if not rows:
        known = [each.name for each in plan.rows]
        hint = suggest(row, known) or f"; its rows are {', '.join(map(repr, known[:20]))}"
        raise NotFoundError(f"{name} has no row {row[:80]!r}{hint}", ablation=plan.name, row=row[:80])
    metric = plan.ablation.content.primary_metric
    records = store.index.records([run.run_id for each in rows for run in each.runs])
    values = {
        run_id: value
        for run_id, record in records.items()
        if record.status == "finished" and (value := record.value(metric.name)) is not None and math.isfinite(value)
    }
    if not values:
        others = [scale for scale in plan.ablation.content.scales if scale != plan.ablation.scale]
        hint = f"; its scales are {', '.join(others)}" if others else ""
        raise NotFinishedError(
            f"{name}: no finished run of the row {row!r} has the metric {metric.name}{hint}",
            ablation=plan.name,
            row=row,
            metric=metric.name,
        )
    choose = min if metric.goal == "min" else max
    return choose(sorted(values), key=values.__getitem__)


def plan_cost(
    plan: Plan,
    store: Store,
    timed: Mapping[RunShape, StepCost] | None = None,
    *,
    leave_out: Collection[Status] = ENDED,
    max_runs: int | None = None,
    start_s: float = RAY_START_S,
) -> PlanCost:
    """The plan's runs with status and estimates, and the estimated wall time of those that are to do.

    Args:
        plan: The plan.
        store: The store.
        timed: RunShape → what a few of its steps cost on this machine.
        leave_out: Statuses of runs that are not to do.
        max_runs: How many runs are to do at most; None: no limit.
        start_s: Seconds until the first run begins.
    """
    plan = recorded_plan(plan, store)
    records = store.index.records((run.run_id for run in plan.runs), values=False)
    estimated = estimates(plan, measured_rates(plan, store), timed)
    groups = _groups(plan)
    common = plan.ablation.content.resources
    may_use_gpu = common.device != "cpu" and common.gpus != 0
    lacks_gpu = may_use_gpu and not has_gpu()
    # The memory of a GPU is not known here.
    memory_limit_bytes = math.inf if may_use_gpu and not lacks_gpu else psutil.virtual_memory().total
    runs = []
    for run in plan.runs:
        estimate, resources = estimated[run.run_id], plan.own_resources.get(run.run_id, common)
        record = records.get(run.run_id) or RunRecord(run_id=run.run_id)
        runs.append(
            RunCost(
                run_id=run.run_id,
                row=plan.row_name(run.run_id),
                seed=run.seed,
                status=record.status,
                step=record.step,
                steps=run.train.steps,
                worker_id=record.worker_id,
                message=record.message,
                parameters=estimate.parameters,
                training_tokens=run.training_tokens,
                training_flops=training_flops(run),
                estimated_s=_rounded(estimate.seconds),
                least_s=_rounded(estimate.least_s),
                estimated_memory_bytes=estimate.memory_bytes,
                basis=estimate.basis,
                fits=estimate.fits and estimate.memory_bytes * resources.workers <= memory_limit_bytes,
                resources=resources.shape,
            )
        )
    suggested = [] if "pending" in leave_out else suggested_estimates(plan, estimated)
    wanted = [run.run_id for run in runs if run.status not in leave_out]
    to_do = [(estimated[run_id], groups(plan.own_resources.get(run_id, common))) for run_id in wanted]
    to_do = [*to_do, *((estimate, groups(common)) for estimate in suggested)][:max_runs]
    counts = Counter(run.status for run in runs)
    least = [(replace(estimate, seconds=estimate.least_s), parallel) for estimate, parallel in to_do]
    slower, busy = _contention()
    return PlanCost(
        ablation=plan.name,
        worker_groups=worker_groups(plan),
        counts=counts,
        finished=counts.get("finished", 0),
        to_do=len(to_do),
        to_suggest=len(suggested),
        basis=f"{to_do[0][0].basis}; {start_s:.0f} s until the first run begins{busy}" if to_do else None,
        estimated_s=_rounded(slower * (start_s + total_seconds(to_do))) if to_do else 0.0,
        least_s=_rounded(start_s + total_seconds(least)) if to_do else 0.0,
        lacks_gpu=lacks_gpu,
        runs=runs,
    )


def has_gpu() -> bool:
    """Whether this machine has a GPU that this process may use. Does not import torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(GPU_DEVICES.glob("nvidia[0-9]*"))


def _contention() -> tuple[float, str]:
    """How many times longer training takes if the other programs of this machine go on, and why, for people."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    if load < LEAST_LOAD * cores:
        return 1.0, ""
    return 1 + load / cores, f"; other programs use this machine: load {load:.1f} on {cores} cores"


def _rounded(seconds: float) -> float:
    """Three significant digits: a run of milliseconds is not rounded to nothing."""
    return float(f"{seconds:.3g}")


def worker_groups(plan: Plan) -> int:
    """The number of worker groups of the plan's size that train in parallel on this machine's CPU cores; of several
    sizes, the largest number.
    """
    groups = _groups(plan)
    return max(groups(plan.resources_of(row)) for row in (*plan.rows, *plan.examples))


def _groups(plan: Plan) -> Callable[[Resources], int]:
    """Resources → number of worker groups that train a plan's runs in parallel on this machine's CPU cores."""
    groups, cpus = plan.ablation.content.resources.groups, len(os.sched_getaffinity(0))
    return lambda each: max(1, cpus // (each.cpus * each.workers)) if groups == "auto" else groups


def measured_rates(plan: Plan, store: Store) -> dict[RunShape, float]:
    """Shape → median seconds per floating-point operation of the plan's finished runs of that shape."""
    facts = store.index.facts((run.run_id for run in plan.runs), (WALL_S, RECOMPUTES))
    rates: dict[RunShape, list[float]] = {}
    for row in plan.rows:
        known = (facts.get(run.run_id, (None, None)) for run in row.runs)
        measured = [(wall_s, recomputes) for wall_s, recomputes in known if isinstance(wall_s, (int, float))]
        if not measured:
            continue
        own = rates.setdefault(shape_of(row.runs[0]), [])
        flops: dict[bool, float] = {}  # by whether activations are recomputed; the seed does not change them
        for wall_s, recomputes in measured:
            if bool(recomputes) not in flops:
                resources = Resources(checkpoint_activations=bool(recomputes))
                flops[bool(recomputes)] = run_flops(row.runs[0], resources)
            own.append(float(wall_s) / flops[bool(recomputes)])
    return {shape: statistics.median(values) for shape, values in rates.items()}
