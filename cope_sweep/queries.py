"""Queries over plans and the store: what `list`, `plan` and `status` show, as plain data."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from cope_sweep.errors import UserError
from cope_sweep.plan import Plan, estimates, expand, total_seconds
from cope_sweep.plan.estimate import Shape, run_flops, shape_of
from cope_sweep.record import Ledger
from cope_sweep.spec import Resources, SpecError, load_ablation


def catalogue(folder: Path, ledger: Ledger) -> list[dict[str, Any]]:
    """Every ablation file of a folder, and how far it is; one that cannot be used carries its `error`.

    Raises UserError where there is none.
    """
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise UserError(f"no ablation files (*.yaml) in {folder.absolute()}; choose the folder with --ablations")
    return [_entry(path, ledger) for path in paths]


def _entry(path: Path, ledger: Ledger) -> dict[str, Any]:
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
        "finished": sum(ledger.run(run.run_id).status == "finished" for run in plan.runs),
        "scales": sorted(content.scales),
    }


def cost(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    """The plan's runs with their status and estimates, and what those still to do take together."""
    expected = estimates(plan, measured_rates(plan, ledger))
    groups = worker_groups(plan)
    runs: list[dict[str, Any]] = []
    for run in plan.runs:
        estimate = expected[run.run_id]
        runs.append(
            {
                "run_id": run.run_id,
                "row": plan.row_name(run.run_id),
                "seed": run.seed,
                "status": ledger.run(run.run_id).status,
                "parameters": estimate.parameters,
                "estimated_s": round(estimate.seconds, 1),
                "estimated_memory_bytes": estimate.memory_bytes,
                "basis": estimate.basis,
            }
        )
    todo = [expected[entry["run_id"]] for entry in runs if entry["status"] != "finished"]
    return {
        "ablation": plan.name,
        "worker_groups": groups,
        "finished": len(runs) - len(todo),
        "to_do": len(todo),
        "estimated_s": round(total_seconds(todo, groups), 1),
        "runs": runs,
    }


def run_status(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    """Each run of the plan: status, step, worker, and the message of one that failed."""
    runs = []
    for run in plan.runs:
        folder = ledger.run(run.run_id)
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
    """How many groups this machine would train side by side."""
    resources = plan.ablation.content.resources
    if resources.groups != "auto":
        return resources.groups
    return max(1, len(os.sched_getaffinity(0)) // (resources.cpus * resources.workers))


def measured_rates(plan: Plan, ledger: Ledger) -> dict[Shape, float]:
    """Shape → median seconds per floating-point operation of this plan's finished runs."""
    rates: dict[Shape, list[float]] = {}
    for run in plan.runs:
        result = ledger.run(run.run_id).result
        if result:
            facts = result["facts"]
            resources = Resources(checkpoint_activations=facts.get("checkpoint_activations", False))
            rates.setdefault(shape_of(run), []).append(facts["wall_s"] / run_flops(run, resources))
    return {shape: statistics.median(values) for shape, values in rates.items()}
