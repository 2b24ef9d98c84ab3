"""What the runs of a plan name outside of themselves: files, folders and downloads."""

from __future__ import annotations

from collections.abc import Iterator

from cope_sweep.config.expand import Plan
from cope_sweep.config.source import SpecError


def check_paths(plan: Plan, allowed: Plan | None = None) -> None:
    """Raise SpecError where a run names a file, a folder or a download, unless a run of `allowed` names it too.

    Downloads have the access of the operator, who may have private datasets.
    """
    known = set(_paths(allowed)) if allowed is not None else set()
    for key, value in _paths(plan):
        if (key, value) not in known:
            raise SpecError(
                f"{plan.name}: {key}: {value!r} is a path on the machines that train, or a download with their "
                "access, which a request may not name; remove the key, and name a corpus that is in their "
                "$COPE_SWEEP_DATA",
                code="path_of_another_machine",
                ablation=plan.name,
                key=key,
                value=value,
            )


def _paths(plan: Plan) -> Iterator[tuple[str, str]]:
    """Key and value of what names places, of each distinct task of the plan."""
    seen = {id(run.task): run.task for row in (*plan.rows, *plan.examples) for run in row.runs}
    for task in seen.values():
        for name, value in task.places.items():
            yield f"task.{name}", value
