"""The command `runs`: the runs of a store, filtered and sorted, as a table or as a file with all their values."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from cope_sweep.api.questions import ExportRuns, ListRuns, RunFilter
from cope_sweep.cli.options import Json
from cope_sweep.cli.output import escaped, grid, make_console, print_json, print_table
from cope_sweep.cli.source import Source, asks, option
from cope_sweep.errors import UserError

EXPORTS = ("parquet", "csv", "json")


@asks(
    ListRuns, "ablations", without=["run", "cursor", "fields"],
    filter=option(metavar="KEY>=VALUE"), sort=option(metavar="KEY"), sweep=option(metavar="SWEEP"),
)  # fmt: skip
def runs(
    *,
    question: ListRuns,
    export: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Export all matching runs with all their values: parquet, csv or json. Default: by the suffix of "
            "--output.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file of an export.", show_default=False)
    ] = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Export the learning curves: one line for each logged value of a run.")
    ] = False,
    source: Source,
    as_json: Json = False,
) -> None:
    """List the runs of the store that were begun, by any of their values. Filtered and sorted values are shown.

    An export has one line for each run: its configuration by dotted keys, seed, sweeps, metrics, and facts such as
    versions and durations. It holds every matching run, however many there are.

    Example: `cope-sweep runs --filter "model.layers>=4" --sort in_dist/token_error`

    Example: `cope-sweep runs --status finished --filter "model.position=cope" -o runs.parquet`

    Example: `cope-sweep runs --sweep 20260730-120000-abcd --curves --format csv -o curves.csv`
    """
    if export is not None or output is not None:
        _export(source, question, export, output, curves)
        return
    if curves:
        raise UserError("--curves exports; name a file with --output FILE, or a format with --format")
    page = source.ask(question)
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
    print_table(table, ["ablation", "step", "seed"])
    if page.total > len(page.runs):
        first, last = min(question.offset + 1, page.total), question.offset + len(page.runs)
        make_console().print(f"runs {first} to {last} of {page.total}; --limit and --offset show others")


def _export(source: Source, question: ListRuns, name: str | None, output: Path | None, curves: bool) -> None:
    from cope_sweep.cli.files import save

    chosen = name or (output.suffix.removeprefix(".") if output else "")
    if chosen not in EXPORTS:
        given = f"--format {name}" if name else f"--output {output}: its suffix"
        raise UserError(f"{given} is no format of runs; the formats are {', '.join(EXPORTS)}; choose one with --format")
    which = {each.name: getattr(question, each.name) for each in fields(RunFilter)}
    asked = ExportRuns(**which, format=chosen, curves=curves)  # type: ignore[arg-type]
    save(asked, output, source.write, default="csv", suffixes={})
    if output is not None:
        make_console().print(escaped(f"all matching {'logged values' if curves else 'runs'} are in {output}"))


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
