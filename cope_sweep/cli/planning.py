"""`list`, `plan`, `schema`: before anything is trained."""

from __future__ import annotations

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    Json,
    ScaleOpt,
    Sets,
    Store,
    escaped,
    grid,
    load_plan,
    make_console,
    print_json,
)


def list_ablations(ablations: AblationsDir = ABLATIONS, store: Store = STORE, as_json: Json = False) -> None:
    """The ablations, what they ask, and how far they are.

    Example: `cope-sweep list`
    """
    from cope_sweep.queries import catalogue
    from cope_sweep.record import Ledger

    entries = catalogue(ablations, Ledger(store))
    if as_json:
        print_json(entries)
        return
    shown = grid("ablation", "title", "re-makes", "rows × seeds", "finished")
    for entry in entries:
        if "error" in entry:
            shown.add_row(entry["name"], f"[red]{escaped(entry['error'])}[/red]")
        else:
            size, done = f"{entry['rows']} × {entry['seeds']}", f"{entry['finished']} of {entry['runs']}"
            shown.add_row(entry["name"], escaped(entry["title"]), escaped(entry["reproduces"]), size, done)
    make_console().print(shown)


def plan(
    ablation: AblationArg,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: Store = STORE,
    as_json: Json = False,
) -> None:
    """What a run of the ablation would train: done, to do, parameters, time and memory.

    Example: `cope-sweep plan quickstart --set train.steps=1000`
    """
    from cope_sweep.cli.progress import duration
    from cope_sweep.queries import cost
    from cope_sweep.record import Ledger

    costs = cost(load_plan(ablation, ablations, scale, sets), Ledger(store))
    if as_json:
        print_json(costs)
        return
    shown = grid("run", "row", "seed", "status", "parameters", "time", "memory")
    for run in costs["runs"]:
        memory = f"{run['estimated_memory_bytes'] / 2**30:.1f} GiB"
        cells = (run["run_id"], escaped(run["row"]), str(run["seed"]), run["status"], f"{run['parameters']:,}")
        shown.add_row(*cells, duration(run["estimated_s"]), memory)
    console = make_console()
    console.print(shown)
    groups = costs["worker_groups"]
    text = f"{costs['finished']} done, {costs['to_do']} to do"
    if costs["to_do"]:
        basis = next(run["basis"] for run in costs["runs"] if run["status"] != "finished")
        text += f": about {duration(costs['estimated_s'])} on {groups} worker group{'s' * (groups > 1)} ({basis})"
    console.print(text)


def schema() -> None:
    """The JSON Schema of ablation files, for editors.

    Example: `cope-sweep schema > ablations/schema.json`
    """
    from cope_sweep.spec.schema import ablation_schema

    print_json(ablation_schema())
