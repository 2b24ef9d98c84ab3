"""The command `runs`: the runs of a store, filtered and sorted."""

from __future__ import annotations

from typing import Annotated

import typer

from cope_sweep.cli.options import STORE, IndexOpt, Json, StoreOpt, open_store
from cope_sweep.cli.output import escaped, grid, make_console, print_json
from cope_sweep.errors import UserError

MAX_RUNS = 1000


def runs(
    filters: Annotated[
        list[str],
        typer.Option(
            "--filter",
            metavar="KEY>=VALUE",
            help="A condition that has to hold: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`, "
            "`facts.device=cuda`. May be repeated.",
            show_default=False,
        ),
    ] = [],
    statuses: Annotated[
        list[str], typer.Option("--status", metavar="STATUS", help="Only runs with this status. May be repeated.")
    ] = [],
    sweep: Annotated[str | None, typer.Option("--sweep", metavar="SWEEP", help="Only the runs of this sweep.")] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="A key as in --filter, or run_id, seed, step, created_ms.")
    ] = "run_id",
    descending: Annotated[bool, typer.Option("--descending", help="The greatest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=MAX_RUNS, help="Maximum number of runs.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="Number of runs to skip.")] = 0,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: Json = False,
) -> None:
    """List the runs of the store that were begun, by any of their values. Filtered and sorted values are shown.

    Example: `cope-sweep runs --filter "model.layers>=4" --sort in_dist/token_error`
    """
    from typing import get_args

    from cope_sweep.queries import Queries, parse_filter
    from cope_sweep.store import RunQuery, Status

    for name in statuses:
        if name not in get_args(Status):
            raise UserError(f"--status {name}: there is no such status; the statuses are {', '.join(get_args(Status))}")
    query = RunQuery(
        tuple(statuses),  # type: ignore[arg-type]
        sweep_id=sweep,
        filters=tuple(map(parse_filter, filters)),
        sort=sort,
        descending=descending,
        limit=limit,
        offset=offset,
    )
    page = Queries(open_store(root, index)).runs(query)
    if as_json:
        print_json(page.model_dump())
        return
    keys = list(dict.fromkeys(key for run in page.runs for key in run.values))
    shown = [key for key in keys if key not in ("status", "seed", "step")]
    table = grid("run", "ablation", "row", "seed", "status", "step", *shown, "message")
    for run in page.runs:
        start = (run.run_id, ", ".join(run.ablations), run.row or "", run.seed, run.status, f"{run.step}/{run.steps}")
        values = (_text(run.values.get(key)) for key in shown)
        table.add_row(
            *map(escaped, (*start, *values, run.message or "")),
            style="red" if run.status in ("failed", "damaged") else "",
        )
    console = make_console()
    console.print(table)
    if page.total > len(page.runs):
        first = min(offset + 1, page.total)
        console.print(f"runs {first} to {offset + len(page.runs)} of {page.total}; --limit and --offset show others")


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
