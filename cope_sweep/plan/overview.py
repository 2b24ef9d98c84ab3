"""Where ablations and their runs stand: what `list`, `plan` and `status` show, as plain data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cope_sweep.errors import UserError
from cope_sweep.plan.estimate import estimates, total_seconds
from cope_sweep.plan.expand import Plan, expand
from cope_sweep.record import Ledger
from cope_sweep.spec import SpecError, load_ablation


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
    expected = estimates(plan, ledger)
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


def standing(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    """The plan's runs: how far, where, and why what failed did."""
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
                "where": state.get("where"),
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
