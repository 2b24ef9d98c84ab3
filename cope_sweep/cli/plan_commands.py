"""The commands `list`, `plan` and `schema`. They need no torch, except for `plan --measure` and `plan --attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.api.questions import GetPlan, ListAblations
from cope_sweep.cli.options import ABLATION, SCALE, Json
from cope_sweep.cli.output import escaped, estimated_time, grid, make_console, print_json, print_table, quantity, size
from cope_sweep.cli.source import Source, asks
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.api.answers import AblationSummary, PlanCost
    from cope_sweep.config import Plan

RESULTS = "results"
"""The folder of reports beside the ablation files."""
Measure = Annotated[
    bool,
    typer.Option(
        "--measure", help="Train a few steps of each distinct shape here, and estimate time and memory from them."
    ),
]
AttentionOpt = Annotated[
    bool,
    typer.Option(
        "--attention",
        help="Show by which kernel each row computes its attention on a CPU and on a GPU, and why not by a faster one.",
    ),
]


@asks(ListAblations, "ablations")
def list_ablations(question: ListAblations, source: Source, as_json: Json = False) -> None:
    """List the ablations, the table or figure that each reproduces, and how many of their runs are finished.

    Example: `cope-sweep list`
    """
    try:
        entries = source.ask(question)
    except OSError:
        entries = []
    if not entries:
        folder = f"in {source.ablations.absolute()}; choose another folder with --ablations"
        raise UserError(f"no ablation files (*.yaml) {f'at {source.server}' if source.server else folder}")
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
            more = (entry.reproduces, f"{entry.rows} × {entry.seeds}")
            finished = [f"{entry.finished} of {entry.runs}"]
            finished += [f"{name} {each.finished} of {each.runs}" for name, each in entry.at_scales.items()]
            table.add_row(*map(escaped, (entry.name, entry.title, *more, "\n".join(finished), others)))
    print_table(
        table,
        [
            "reproduces",
            "rows × seeds",
            *["others"] * (not any(entry.counts.keys() - {"finished", "pending"} for entry in entries)),
        ],
    )
    results = source.ablations / RESULTS
    if not (source.server or any(_has_finished(entry) for entry in entries)) and results.is_dir():
        make_console().print(
            f"Nothing is finished in this store. {escaped(results)} has results: "
            f"cope-sweep table flip_flop --from {escaped(results)}",
            soft_wrap=True,
        )


def _has_finished(entry: AblationSummary) -> bool:
    return bool(entry.finished or any(each.finished for each in entry.at_scales.values()))


@asks(GetPlan, "sets", "ablations", local=["measure", "attention"], name=ABLATION, scale=SCALE)
def plan(
    question: GetPlan, source: Source, measure: Measure = False, attention: AttentionOpt = False, as_json: Json = False
) -> None:
    """Show the runs of an ablation: status, parameters, and an estimate of time and memory. Nothing is recorded.

    Example: `cope-sweep plan quickstart --set train.steps=1000 --measure`
    """
    if attention:
        _show_attention(source.plan(question.name, question.scale), as_json)
        return
    costs = _measured(source, question) if measure else source.ask(question)
    if as_json:
        print_json(costs.model_dump())
        return
    shapes_differ = len({run.resources for run in costs.runs}) > 1
    table = grid("run", "row", "seed", "status", "parameters", "time", "memory", *["resources"] * shapes_differ)
    for run in costs.runs:
        cells = (run.run_id, escaped(run.row), str(run.seed), run.status, quantity(run.parameters))
        memory = size(run.estimated_memory_bytes)
        time = estimated_time(run.estimated_s, run.estimated_s, lacks_gpu=costs.lacks_gpu)
        time = f"≤ {time}" if run.least_s < run.estimated_s and time[0].isdigit() else time
        table.add_row(
            *cells, time, memory if run.fits else f"[red]{memory}: too large[/red]", *[run.resources] * shapes_differ
        )
    console = make_console()
    too_large = sum(not run.fits for run in costs.runs)
    print_table(table, [*["memory"] * (not too_large), "parameters", "resources", "memory", "seed"])
    groups = costs.worker_groups
    stopped = f", {costs.counts['stopped']} stopped early" if "stopped" in costs.counts else ""
    text = f"{costs.finished} finished{stopped}, {costs.to_do} to do"
    if costs.to_do:
        text += f" ({costs.to_suggest} still to be suggested)" if costs.to_suggest else ""
        time = estimated_time(costs.estimated_s, costs.least_s, lacks_gpu=costs.lacks_gpu)
        up_to = "up to " * shapes_differ
        about = f"about {time} on {up_to}{groups} worker group{'s' * (groups > 1)}" if time[0].isdigit() else time
        text += f": {about} ({costs.basis})"
    text += f"; {too_large} do not fit in the memory of this machine" if too_large else ""
    console.print(text)


def _measured(source: Source, question: GetPlan) -> PlanCost:
    """The plan with the cost of each of its shapes, which are measured here and named on standard error."""
    from cope_sweep.read.queries import plan_cost, recorded_plan
    from cope_sweep.train.measure import measure_plan

    console = make_console(stderr=True)
    planned = recorded_plan(source.plan(question.name, question.scale), source.store)
    timed = measure_plan(
        planned, on_shape=lambda row, number, total: console.print(f"measuring {number} of {total}: {escaped(row)}")
    )
    return plan_cost(planned, source.store, timed)


def _show_attention(plan: Plan, as_json: bool) -> None:
    """Print the path of each layer's attention, for the devices on which the rows may train."""
    from cope_sweep.model.paths import attention_paths

    found = [
        (row.name, device, path)
        for row in plan.rows
        for device in ("cpu", "cuda")
        if (resources := plan.resources_of(row)).device in ("auto", device)
        for path in attention_paths(row.runs[0], resources, device)
    ]
    if as_json:
        print_json(
            [
                {"row": row, "layers": path.layers, "device": device, "attention": path.name, "reason": path.reason}
                for row, device, path in found
            ]
        )
        return
    table = grid("row", "layers", "device", "attention", "why no fused kernel")
    for row, device, path in found:
        table.add_row(escaped(row), "–".join(map(str, path.layers)), device, path.name, escaped(path.reason or ""))
    print_table(table)


def schema() -> None:
    """Print the JSON Schema of ablation files. Editors use it for completion and checks.

    Example: `cope-sweep schema > ablations/schema.json`
    """
    from cope_sweep.config.ablation import ablation_schema

    print_json(ablation_schema())
