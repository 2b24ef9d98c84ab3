"""The status and the cost of a plan, from the index."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import psutil

from cope_sweep.api.ablations import PlanCost, RunCost
from cope_sweep.config import (
    Estimate,
    Plan,
    Resources,
    RunSpec,
    estimates,
    expand,
    plan_of_recorded,
    suggested_estimates,
    total_seconds,
    with_overrides,
)
from cope_sweep.config.estimate import RAY_START_S, RunShape, run_flops, shape_of, training_flops
from cope_sweep.config.explain import suggest
from cope_sweep.errors import NotFinishedError, NotFoundError, UserError
from cope_sweep.read.tables.results import training_command
from cope_sweep.read.tables.row_names import find_rows, rows_named
from cope_sweep.store import RunRecord, Status, Store
from cope_sweep.store.provenance import usable_cpus

WALL_S, RECOMPUTES = "wall_s", "checkpoint_activations"
LEAST_LOAD = 0.5
"""From this load per core on, other programs are assumed to slow down training."""
GPU_DEVICES = Path("/dev")
"""The folder of device files such as `nvidia0`."""


def recorded_plan(plan: Plan, store: Store) -> Plan:
    """The plan as a store has it.

    Of a folder of results, with the `--set` of its results, unless the plan has its own. If its search chooses rows
    during the sweep, with the rows that sweeps have recorded so far.
    """
    kept = store.kept(plan)
    if kept and kept.assignments and not plan.ablation.assignments:
        with suppress(UserError):  # a key that the ablation has no longer: the results are stale
            plan = expand(with_overrides(plan.ablation, assignments=kept.assignments))
    if not plan.open_samples:
        return plan
    return plan_of_recorded(plan.ablation, store.index.recorded_rows(plan.name))


def finished_run(
    plan: Plan, store: Store, rows: Collection[str] = (), seed: int | None = None, other_values: Callable[[], str] = str
) -> RunSpec:
    """The first finished run of these rows (empty: of any row) and this seed (None: any). Raises UserError.

    `other_values` says for the message what `Queries.other_values` says.
    """
    candidates = [row for name in rows for row in rows_named(plan, name, UserError)]
    runs = [run for row in candidates or plan.rows for run in row.runs if seed in (None, run.seed)]
    statuses = store.index.statuses(run.run_id for run in runs)
    for run in runs:
        if statuses.get(run.run_id) == "finished":
            return run
    which = (f" with seed {seed}" if seed is not None else "") + (f" of {', '.join(rows)}" if rows else "")
    raise UserError(
        f"no run{which} of {plan.name} is finished in the store {store.location}; train it with: "
        f"{training_command(plan, store)}{_clause(other_values())}",
        code="not_finished",
        ablation=plan.name,
        rows=list(rows),
        seed=seed,
    )


def best_of_row(plan: Plan, store: Store, row: str, other_values: Callable[[], str] = str) -> str:
    """The id of the row's finished run with the best value of the primary metric.

    `other_values` says for the message what `Queries.other_values` says.

    Raises NotFoundError for an unknown row, NotFinishedError if no run is finished.
    """
    rows, name = find_rows(plan, row), plan.ablation.cli_args
    if not rows:
        allowed = [planned.name for planned in plan.rows]
        message = f"{name} has no row {row[:80]!r}{suggest(row, allowed)}"
        raise NotFoundError(message, ablation=plan.name, row=row[:80], allowed=allowed)
    metric = plan.ablation.content.measured_metric
    records = store.index.records([run.run_id for matching in rows for run in matching.runs])
    values = {}
    for run_id, record in records.items():
        value = record.value(metric.name) if record.status == "finished" else None
        if value is not None and math.isfinite(value):
            values[run_id] = value
    if not values:
        others = [scale for scale in plan.ablation.content.scales if scale != plan.ablation.scale]
        hint = f"; its scales are {', '.join(others)}" if others else ""
        raise NotFinishedError(
            f"{name}: no finished run of the row {row!r} has the metric {metric.name}; train it with: "
            f"{training_command(plan, store)}{hint}{_clause(other_values())}",
            ablation=plan.name,
            row=row,
            metric=metric.name,
        )
    choose = min if metric.goal == "min" else max
    return choose(sorted(values), key=values.__getitem__)


def _clause(text: str) -> str:
    return f"; {text}" if text else ""


def plan_cost(
    plan: Plan,
    store: Store,
    *,
    leave_out: Collection[Status] = (),
    max_runs: int | None = None,
    start_s: float = RAY_START_S,
    groups: int | None = None,
) -> PlanCost:
    """The plan's runs with status and estimates, and the estimated wall time of the runs still to do.

    Args:
        plan: The plan.
        store: The store.
        leave_out: Statuses of further runs that are not to do, beside the plan's `done_statuses`.
        max_runs: Maximum number of runs to do; None: no limit.
        start_s: Seconds until the first run starts.
        groups: The number of runs that are trained at the same time; None: as many as this machine's cores train.
    """
    not_trained = {*plan.done_statuses, *leave_out}
    plan = recorded_plan(plan, store)
    records = store.index.records((run.run_id for run in plan.runs), values=False)
    estimated = estimates(plan, measured_rates(plan, store))
    resources = plan.ablation.content.resources
    may_use_gpu = resources.device != "cpu" and resources.gpus != 0
    lacks_gpu = may_use_gpu and not has_gpu()
    # The size of a GPU's memory is unknown here.
    memory_limit_bytes = math.inf if may_use_gpu and not lacks_gpu else psutil.virtual_memory().total
    # Once for each row: the seeds of a row differ in nothing else.
    flops = {run.run_id: count for row in plan.rows for count in [training_flops(row.runs[0])] for run in row.runs}
    runs: list[RunCost] = []
    to_do: list[Estimate] = []
    for run in plan.runs:
        estimate = estimated[run.run_id]
        record = (records.get(run.run_id) or RunRecord(run_id=run.run_id)).as_counted()
        is_to_do = record.status not in not_trained and (max_runs is None or len(to_do) < max_runs)
        if is_to_do:
            to_do.append(estimate)
        runs.append(
            RunCost(
                **record.progress() | {"steps": run.train.steps},
                row=plan.row_name(run.run_id),
                seed=run.seed,
                parameters=estimate.parameters,
                training_tokens=run.training_tokens,
                training_flops=flops[run.run_id],
                estimated_s=_rounded(estimate.seconds),
                estimated_memory_bytes=estimate.memory_bytes,
                basis=estimate.basis,
                to_do=is_to_do,
                fits=estimate.memory_bytes * resources.workers <= memory_limit_bytes,
                resources=resources.shape,
            )
        )
    suggested = [] if "pending" in not_trained else suggested_estimates(plan, estimated)
    to_do = [*to_do, *suggested][:max_runs]
    groups = groups or worker_groups(plan)
    counts = Counter(run.status for run in runs)
    alone_s = start_s + total_seconds(to_do, groups) if to_do else 0.0
    slower, busy = _contention()
    return PlanCost(
        ablation=plan.name,
        worker_groups=groups,
        counts=counts,
        finished=counts.get("finished", 0),
        to_do=len(to_do),
        to_suggest=len(suggested),
        basis=f"{to_do[0].basis}; {start_s:.0f} s until the first run starts{busy}" if to_do else None,
        estimated_s=_rounded(slower * alone_s),
        least_s=_rounded(alone_s),
        lacks_gpu=lacks_gpu,
        runs=runs,
    )


def has_gpu() -> bool:
    """Whether this machine has a GPU that this process may use. Does not import torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(GPU_DEVICES.glob("nvidia[0-9]*"))


def _contention() -> tuple[float, str]:
    """The factor by which other programs on this machine slow down training, and the reason as text."""
    cores = usable_cpus()
    load = os.getloadavg()[0]
    if load < LEAST_LOAD * cores:
        return 1.0, ""
    return 1 + load / cores, f"; other programs use this machine: load {load:.1f} on {cores} cores"


def _rounded(seconds: float) -> float:
    """The time with three significant digits, so that milliseconds are not rounded to 0."""
    return float(f"{seconds:.3g}")


def worker_groups(plan: Plan) -> int:
    """The number of worker groups that train in parallel on this machine's CPU cores."""
    resources = plan.ablation.content.resources
    if resources.groups != "auto":
        return resources.groups
    return max(1, usable_cpus() // (resources.cpus * resources.workers))


def measured_rates(plan: Plan, store: Store) -> dict[RunShape, float]:
    """Shape → median seconds per floating-point operation over the plan's finished runs with this shape."""
    facts = store.index.facts((run.run_id for run in plan.runs), (WALL_S, RECOMPUTES))
    rates: dict[RunShape, list[float]] = {}
    for row in plan.rows:
        facts_of_row = (facts.get(run.run_id, (None, None)) for run in row.runs)
        measured = [(wall_s, recomputes) for wall_s, recomputes in facts_of_row if isinstance(wall_s, (int, float))]
        if not measured:
            continue
        rates_of_shape = rates.setdefault(shape_of(row.runs[0]), [])
        flops: dict[bool, float] = {}  # whether activations are recomputed → operations, equal for all seeds
        for wall_s, recomputes in measured:
            if bool(recomputes) not in flops:
                resources = Resources(checkpoint_activations=bool(recomputes))
                flops[bool(recomputes)] = run_flops(row.runs[0], resources)
            rates_of_shape.append(float(wall_s) / flops[bool(recomputes)])
    return {shape: statistics.median(values) for shape, values in rates.items()}
