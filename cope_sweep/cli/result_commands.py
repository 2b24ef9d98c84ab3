"""The commands `status` and `report`: the state of sweeps and runs, and the table of an ablation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    Json,
    ScaleOpt,
    Sets,
    StoreOpt,
    load_plan,
)
from cope_sweep.cli.output import escaped, grid, make_console, print_json
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.results import Table
    from cope_sweep.store import Store

Format = Literal["terminal", "markdown", "latex", "csv", "parquet", "html", "json"]
SWEEP_KEYS = ("sweep_id", "ablation", "status", "executor", "started_ms", "ended_ms")


def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[ABLATION|RUN]",
            help="An ablation, or the id of a run. Default: every sweep of this store.",
            show_default=False,
        ),
    ] = None,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    as_json: Json = False,
) -> None:
    """Show the status of sweeps and runs, and the error of a failed run.

    Example: `cope-sweep status quickstart`

    Example: `cope-sweep status 95199d1142de555d`
    """
    from cope_sweep.store import Store
    from cope_sweep.store.artifacts import RUN_ID

    store = Store(root)
    if target is None:
        _show_sweeps(store, as_json)
    elif RUN_ID.fullmatch(target):
        _show_run(store, target, as_json)
    else:
        _show_runs(store, target, ablations, scale, sets, as_json)


def _show_sweeps(store: Store, as_json: bool) -> None:
    records = store.sweeps()
    if as_json:
        print_json([{key: record.get(key) for key in SWEEP_KEYS} for record in records])
        return
    if not records:
        make_console().print(f"no sweep in the store {store.root}; start one with: cope-sweep run quickstart")
        return
    table = grid("sweep", "ablation", "status", "executor")
    for record in records:
        table.add_row(*(escaped(record[key]) for key in SWEEP_KEYS[:4]))
    make_console().print(table)


def _show_run(store: Store, run_id: str, as_json: bool) -> None:
    folder = store.run(run_id)
    if folder.spec is None:
        raise UserError(f"no run {run_id} in the store {store.root}; `cope-sweep plan ABLATION` lists the ids")
    state = dict(folder.state)
    document: dict[str, Any] = {**folder.spec, "status": folder.status, "state": state, "result": folder.result}
    if as_json:
        print_json(document)
        return
    traceback = state.pop("traceback", None)
    console = make_console()
    console.print_json(json.dumps(document))
    if traceback:
        console.print(traceback, style="red", markup=False, highlight=False)


def _show_runs(store: Store, ablation: str, ablations: Path, scale: str | None, sets: list[str], as_json: bool) -> None:
    from cope_sweep.queries import run_status

    statuses = run_status(load_plan(ablation, ablations, scale, sets), store)
    if as_json:
        print_json(statuses)
        return
    table = grid("run", "row", "seed", "status", "step", "worker", "error")
    for run in statuses["runs"]:
        step = f"{run['step']}/{run['steps']}"
        start = (run["run_id"], run["row"], run["seed"], run["status"], step)
        cells = (*start, run["worker_id"] or "", run["message"] or "")
        table.add_row(*map(escaped, cells), style="red" if run["status"] == "failed" else "")
    make_console().print(table)


def report(
    ablation: AblationArg,
    output_format: Annotated[
        Format, typer.Option("--format", help="Format of the table. With --output, `terminal` means markdown.")
    ] = "terminal",
    every_run: Annotated[
        bool, typer.Option("--runs", help="One line for each run instead of each row (csv, parquet).")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.", show_default=False)
    ] = None,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as `--format json`.")] = False,
) -> None:
    """Print the table of an ablation: mean ± standard deviation over seeds, beside the published numbers.

    Example: `cope-sweep report quickstart --format latex -o table.tex`

    Example: `cope-sweep report quickstart --runs --format parquet -o runs.parquet`
    """
    from cope_sweep.results import table
    from cope_sweep.store import Store

    chosen: Format = "json" if as_json else output_format
    if every_run and chosen not in ("csv", "parquet"):
        raise UserError(f"--runs needs --format csv or parquet, not {chosen}; json always holds every run")
    if chosen == "parquet" and output is None:
        raise UserError("parquet is binary; name a file for it with --output FILE")
    results = table(load_plan(ablation, ablations, scale, sets), Store(root))
    if output is not None:
        try:
            _write(results, chosen, output, every_run)
        except OSError as error:
            raise UserError(f"{output}: {error.strerror or error}; name another file with --output") from error
    elif chosen == "terminal":
        make_console().print(results.to_rich())
    else:
        sys.stdout.write(_render(results, chosen, every_run))


def _write(results: Table, output_format: Format, path: Path, every_run: bool) -> None:
    """Write the table to a file. Raises OSError."""
    if output_format == "parquet":
        results.to_parquet(path, runs=every_run)
    else:
        path.write_text(_render(results, output_format, every_run), encoding="utf-8")


def _render(results: Table, output_format: Format, every_run: bool) -> str:
    """The table as text; `terminal` as Markdown."""
    renderers: dict[str, Callable[[], str]] = {
        "terminal": results.to_markdown,
        "markdown": results.to_markdown,
        "latex": results.to_latex,
        "html": results.to_html,
        "csv": lambda: results.to_csv(runs=every_run),
        "json": lambda: json.dumps(results.to_json(), indent=2) + "\n",
    }
    return renderers[output_format]()
