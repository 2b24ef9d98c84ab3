"""The commands that show what is planned: list, plan and schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.api.ablations import ListAblations
from cope_sweep.api.question import Scale, Sets
from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    IndexOpt,
    JsonOpt,
    Rows,
    StoreOpt,
)
from cope_sweep.cli.output import escaped, estimated_time, grid, make_console, print_json, print_table, quantity, size
from cope_sweep.errors import NotFoundError, counted

if TYPE_CHECKING:
    from cope_sweep.config import Plan


def list_ablations(
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """List the ablations, the table or figure that each reproduces, and how many of their runs are finished.

    Example: `cope-sweep list`
    """
    from cope_sweep.cli.files import NamedFiles, open_queries

    try:
        entries = open_queries(store, index, ablations).ask(ListAblations())
    except OSError:
        entries = []
    if not entries:
        raise NotFoundError(
            f"no ablation files (*.yaml, *.yml) in {ablations.absolute()}; choose another folder with --ablations",
            code="no_ablations",
            folder=str(ablations.absolute()),
        )
    if as_json:
        print_json([entry.model_dump(exclude_none=True) for entry in entries])
        return
    table = grid("ablation", "title", "reproduces", "rows × seeds", "finished", "at scales", "others")
    for entry in entries:
        if entry.error is not None:
            table.add_row(escaped(entry.name), f"[red]{escaped(entry.error)}[/red]")
        else:
            other_counts = ", ".join(
                f"{number} {status}" for status, number in entry.counts.items() if status not in ("finished", "pending")
            )
            more = (entry.reproduces, f"{entry.rows} × {entry.seeds}")
            finished = f"{entry.finished}/{entry.runs}"
            scales = [
                name if at_scale.same_runs else f"{name} {at_scale.finished}/{at_scale.runs}"
                for name, at_scale in entry.at_scales.items()
            ]
            scales += [
                f"{NamedFiles.written(variant.scale, variant.sets)} {variant.finished}/{variant.runs}"
                for variant in entry.variants
            ]
            table.add_row(*map(escaped, (entry.name, entry.title, *more, finished, ", ".join(scales), other_counts)))
    no_others = not any(entry.counts.keys() - {"finished", "pending"} for entry in entries)
    none_at_scales = not any(
        part.finished for entry in entries for part in [*entry.at_scales.values(), *entry.variants]
    )
    print_table(table, [*["others"] * no_others, "reproduces", "rows × seeds", *["at scales"] * none_at_scales])
    finished_runs = sum(
        entry.finished + sum(part.finished for part in [*entry.at_scales.values(), *entry.variants])
        for entry in entries
    )
    with_results = [entry.name for entry in entries if len(entry.committed) == 1]
    with_results.sort(key="quickstart".__ne__)
    if with_results and not finished_runs:
        make_console().print(
            f"This store has no finished runs yet. The ablation files come with results; show some with: "
            f"cope-sweep table {escaped(with_results[0])} --committed",
            soft_wrap=True,
        )


def plan(
    ablation: AblationArg,
    scale: Scale = None,
    sets: Sets = [],
    rows: Rows = [],
    attention: Annotated[
        bool,
        typer.Option(
            "--attention",
            help="Show which kernel computes each row's attention on a CPU and on a GPU, and why not a faster one.",
        ),
    ] = False,
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Show the runs of an ablation: status, parameters, and an estimate of time and memory. Nothing is recorded.

    Example: `cope-sweep plan quickstart --set train.steps=1000`

    Example: `cope-sweep plan quickstart --rows model.position=CoPE`
    """
    from cope_sweep.cli.files import check_places, open_queries
    from cope_sweep.config.rows import only_rows
    from cope_sweep.read.queries import plan_cost

    queries = open_queries(store, index, ablations)
    planned, opened = only_rows(queries.planned(ablation, scale, sets), rows), queries.store
    check_places(planned)
    if attention:
        _show_attention(planned, as_json=as_json)
        return
    costs = plan_cost(planned, opened)
    if as_json:
        print_json(costs)
        return
    sizes = ("parameters", "tokens", "per parameter", "FLOP")
    table = grid("run", "row", "seed", "status", *sizes, "time", "memory")
    for run in costs.runs:
        per_parameter = f"{run.training_tokens / run.parameters:.3g}"
        flops = f"{run.training_flops:.1e}".replace("e+", "e")
        numbers = (quantity(run.parameters), quantity(run.training_tokens), per_parameter, flops)
        cells = (run.run_id, escaped(run.row), str(run.seed), run.status, *numbers)
        memory = size(run.estimated_memory_bytes)
        time = estimated_time(run.estimated_s, run.estimated_s, lacks_gpu=costs.lacks_gpu).removeprefix("about ")
        table.add_row(*cells, time, memory if run.fits else f"[red]{memory}: too large[/red]")
    console = make_console()
    too_large = sum(not run.fits for run in costs.runs)
    less_needed = ("FLOP", "tokens", "per parameter", "parameters", "memory", "seed")
    print_table(table, [*["memory"] * (not too_large), *less_needed])
    groups = costs.worker_groups
    stopped = sum(run.status == "stopped" and not run.to_do for run in costs.runs)
    text = f"{costs.finished} finished{f', {stopped} stopped early' if stopped else ''}, {costs.to_do} to do"
    if costs.to_do:
        text += f" ({costs.to_suggest} not suggested yet)" if costs.to_suggest else ""
        time = estimated_time(costs.estimated_s, costs.least_s, lacks_gpu=costs.lacks_gpu)
        text += f": {time} ({counted(groups, 'worker group')}; {costs.basis})"
    text += f"; {too_large} do not fit into this machine's memory" if too_large else ""
    console.print(text)


def _show_attention(plan: Plan, *, as_json: bool) -> None:
    """Print the path of each layer's attention, for the devices on which the rows may train."""
    from cope_sweep.model.paths import attention_paths

    paths = []
    resources = plan.ablation.content.resources
    for row in plan.rows:
        for device in ("cpu", "cuda"):
            if resources.device in ("auto", device):
                paths += [(row.name, device, path) for path in attention_paths(row.runs[0], resources, device)]
    if as_json:
        print_json(
            [
                {"row": name, "layers": path.layers, "device": device, "attention": path.name, "reason": path.reason}
                for name, device, path in paths
            ]
        )
        return
    table = grid("row", "layers", "device", "attention", "why no fused kernel")
    for name, device, path in paths:
        table.add_row(escaped(name), "–".join(map(str, path.layers)), device, path.name, escaped(path.reason or ""))
    print_table(table)


def schema() -> None:
    """Print the JSON Schema of ablation files. Editors use it for completion and checks.

    Example: `cope-sweep schema > ablations/schema.json`
    """
    from cope_sweep.config.ablation import ablation_schema

    print_json(ablation_schema())
