"""The commands `list`, `plan` and `schema`. They train nothing and need no torch."""

from __future__ import annotations

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    IndexOpt,
    Json,
    ScaleOpt,
    Sets,
    StoreOpt,
    load_plan,
    open_store,
)
from cope_sweep.cli.output import duration, escaped, grid, make_console, print_json, quantity, size
from cope_sweep.errors import UserError


def list_ablations(
    ablations: AblationsDir = ABLATIONS, root: StoreOpt = STORE, index: IndexOpt = None, as_json: Json = False
) -> None:
    """List the ablations, the table or figure that each reproduces, and how many of its runs are finished.

    Example: `cope-sweep list`
    """
    from cope_sweep.queries import AblationFiles, Queries

    try:
        entries = Queries(open_store(root, index), AblationFiles(ablations)).ablations()
    except OSError:
        entries = []
    if not entries:
        raise UserError(f"no ablation files (*.yaml) in {ablations.absolute()}; choose another folder with --ablations")
    if as_json:
        print_json([entry.model_dump(exclude_none=True) for entry in entries])
        return
    table = grid("ablation", "title", "reproduces", "rows × seeds", "finished", "others")
    for entry in entries:
        if entry.error is not None:
            table.add_row(escaped(entry.name), f"[red]{escaped(entry.error)}[/red]")
        else:
            others = ", ".join(
                f"{number} {status}" for status, number in entry.counts.items() if status not in ("finished", "pending")
            )
            texts = (entry.name, entry.title, entry.reproduces)
            counts = (f"{entry.rows} × {entry.seeds}", f"{entry.finished} of {entry.runs}", others)
            table.add_row(*map(escaped, texts), *counts)
    make_console().print(table)


def plan(
    ablation: AblationArg,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: Json = False,
) -> None:
    """Show the runs of an ablation: status, parameters, and an estimate of time and memory. Nothing is trained.

    Example: `cope-sweep plan quickstart --set train.steps=1000`
    """
    from cope_sweep.queries import plan_cost

    costs = plan_cost(load_plan(ablation, ablations, scale, sets), open_store(root, index))
    if as_json:
        print_json(costs.model_dump())
        return
    table = grid("run", "row", "seed", "status", "parameters", "time", "memory")
    for run in costs.runs:
        cells = (run.run_id, escaped(run.row), str(run.seed), run.status, quantity(run.parameters))
        table.add_row(*cells, duration(run.estimated_s), size(run.estimated_memory_bytes))
    console = make_console()
    console.print(table)
    groups = costs.worker_groups
    stopped = f", {costs.counts['stopped']} stopped early" if "stopped" in costs.counts else ""
    text = f"{costs.finished} finished{stopped}, {costs.to_do} to do"
    if costs.to_do:
        text += f" ({costs.to_suggest} still to be suggested)" if costs.to_suggest else ""
        text += f": about {duration(costs.estimated_s)} on {groups} worker group{'s' * (groups > 1)} ({costs.basis})"
    console.print(text)


def schema() -> None:
    """Print the JSON Schema of ablation files. Editors use it for completion and checks.

    Example: `cope-sweep schema > ablations/schema.json`
    """
    from cope_sweep.spec.schema import ablation_schema

    print_json(ablation_schema())
