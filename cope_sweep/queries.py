"""Queries over plans and the store, as plain data: what the commands `list`, `plan` and `status` show."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from cope_sweep.errors import UserError
from cope_sweep.plan import Plan, estimates, expand, total_seconds
from cope_sweep.plan.estimate import Shape, run_flops, shape_of
from cope_sweep.spec import Resources, SpecError, load_ablation
from cope_sweep.store import Store


def catalogue(folder: Path, store: Store) -> list[dict[str, Any]]:
    """Every ablation file of a folder with its size and its number of finished runs.

    The entry of a file that is not valid holds its name and the `error`. Raises UserError if the folder has no
    ablation file.
    """
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise UserError(f"no ablation files (*.yaml) in {folder.absolute()}; choose another folder with --ablations")
    return [_catalogue_entry(path, store) for path in paths]


def _catalogue_entry(path: Path, store: Store) -> dict[str, Any]:
    try:
        plan = expand(load_ablation(path))
    except SpecError as error:
        return {"name": path.stem, "error": str(error)}
    content = plan.ablation.content
    return {
        "name": plan.name,
        "title": content.title,
        "reproduces": content.reproduces,
        "hypothesis": content.hypothesis.strip(),
        "rows": len(plan.rows),
        "seeds": len(content.seeds),
        "runs": len(plan.runs),
        "finished": sum(store.run(run.run_id).status == "finished" for run in plan.runs),
        "scales": sorted(content.scales),
    }


def cost(plan: Plan, store: Store) -> dict[str, Any]:
    """The plan's runs with status and estimates, and the estimated wall time of those that are not finished."""
    estimated = estimates(plan, measured_rates(plan, store))
    groups = worker_groups(plan)
    runs: list[dict[str, Any]] = []
    for run in plan.runs:
        estimate = estimated[run.run_id]
        runs.append(
            {
                "run_id": run.run_id,
                "row": plan.row_name(run.run_id),
                "seed": run.seed,
                "status": store.run(run.run_id).status,
                "parameters": estimate.parameters,
                "estimated_s": _rounded(estimate.seconds),
                "estimated_memory_bytes": estimate.memory_bytes,
                "basis": estimate.basis,
            }
        )
    to_do = [estimated[entry["run_id"]] for entry in runs if entry["status"] != "finished"]
    return {
        "ablation": plan.name,
        "worker_groups": groups,
        "finished": len(runs) - len(to_do),
        "to_do": len(to_do),
        "estimated_s": _rounded(total_seconds(to_do, groups)),
        "runs": runs,
    }


def _rounded(seconds: float) -> float:
    """Three significant digits: a run of milliseconds is not rounded to nothing."""
    return float(f"{seconds:.3g}")


def run_status(plan: Plan, store: Store) -> dict[str, Any]:
    """Each run of the plan with its status, last logged step and worker, and the error message of a failed run."""
    runs = []
    for run in plan.runs:
        folder = store.run(run.run_id)
        status, state = folder.status, folder.state
        curve = folder.curve() if status != "pending" else []
        runs.append(
            {
                "run_id": run.run_id,
                "row": plan.row_name(run.run_id),
                "seed": run.seed,
                "status": status,
                "step": int(curve[-1]["step"]) if curve else 0,
                "steps": run.train.steps,
                "worker_id": state.get("worker_id"),
                "message": state.get("message") if status == "failed" else None,
            }
        )
    return {"ablation": plan.name, "runs": runs}


def worker_groups(plan: Plan) -> int:
    """How many worker groups of the plan's size train in parallel on this machine's CPU cores."""
    resources = plan.ablation.content.resources
    if resources.groups != "auto":
        return resources.groups
    return max(1, len(os.sched_getaffinity(0)) // (resources.cpus * resources.workers))


def measured_rates(plan: Plan, store: Store) -> dict[Shape, float]:
    """Shape → median seconds per floating-point operation of the plan's finished runs of that shape."""
    rates: dict[Shape, list[float]] = {}
    for row in plan.rows:
        shape = shape_of(row.runs[0])
        flops: dict[bool, float] = {}
        for run in row.runs:
            result = store.run(run.run_id).result
            if result:
                facts = result["facts"]
                recomputes = bool(facts.get("checkpoint_activations", False))
                if recomputes not in flops:
                    flops[recomputes] = run_flops(run, Resources(checkpoint_activations=recomputes))
                rates.setdefault(shape, []).append(facts["wall_s"] / flops[recomputes])
    return {shape: statistics.median(values) for shape, values in rates.items()}
