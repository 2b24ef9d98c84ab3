"""The command `runs`: the runs of a store, filtered and sorted, as a table or as a file with all their values."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from cope_sweep.api.questions import ListRuns
from cope_sweep.cli.options import STORE, IndexOpt, Json, StoreOpt
from cope_sweep.cli.output import escaped, grid, make_console, print_json
from cope_sweep.cli.remote import ServerOpt, reader, refuse_local
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.queries import Queries

DEFAULT_RUNS, MAX_RUNS = 100, 1000
"""Runs that are listed."""
EXPORTS = ("parquet", "csv", "json")


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
    limit: Annotated[int, typer.Option(min=1, max=MAX_RUNS, help="Maximum number of runs in a list.")] = DEFAULT_RUNS,
    offset: Annotated[int, typer.Option(min=0, help="Number of runs to skip in a list.")] = 0,
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
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    server: ServerOpt = None,
    as_json: Json = False,
) -> None:
    """List the runs of the store that were begun, by any of their values. Filtered and sorted values are shown.

    An export has one line for each run: its configuration by dotted keys, seed, sweeps, metrics, and facts such as
    versions and durations. It holds every matching run, however many there are.

    Example: `cope-sweep runs --filter "model.layers>=4" --sort in_dist/token_error`

    Example: `cope-sweep runs --status finished --filter "model.position=cope" -o runs.parquet`

    Example: `cope-sweep runs --sweep 20260730-120000-abcd --curves --format csv -o curves.csv`
    """
    from typing import get_args

    from cope_sweep.queries import Queries
    from cope_sweep.store import Status

    for name in statuses:
        if name not in get_args(Status):
            raise UserError(f"--status {name}: there is no such status; the statuses are {', '.join(get_args(Status))}")
    question = ListRuns(
        filter=filters,
        status=statuses,  # type: ignore[arg-type]
        sweep=sweep,
        sort=sort,
        order="desc" if descending else "asc",
        limit=limit,
        offset=offset,
    )
    refuse_local(server, format=export, output=output, curves=curves)
    queries = reader(root, index, server)
    if isinstance(queries, Queries) and (export is not None or output is not None):
        _export(queries, question, _export_format(export, output), output, curves)
        return
    if curves:
        raise UserError("--curves exports; name a file with --output FILE, or a format with --format")
    page = queries.ask(question)
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


def _export_format(name: str | None, output: Path | None) -> str:
    """The format with this name, or that of the file's suffix."""
    chosen = name or (output.suffix.removeprefix(".") if output else "")
    if chosen not in EXPORTS:
        given = f"--format {name}" if name else f"--output {output}: its suffix"
        raise UserError(f"{given} is no format of runs; the formats are {', '.join(EXPORTS)}; choose one with --format")
    if chosen == "parquet" and output is None:
        raise UserError("parquet is binary; name a file for it with --output FILE")
    return chosen


def _export(queries: Queries, question: ListRuns, name: str, output: Path | None, curves: bool) -> None:
    if output is None:
        queries.export(question, name, sys.stdout.buffer, curves=curves)
        return
    try:
        with replaced_file(output) as file:
            lines = queries.export(question, name, file, curves=curves)
    except OSError as error:
        raise UserError(f"{output}: {error.strerror or error}; name another file with --output") from error
    make_console().print(escaped(f"{lines:,} {'logged values' if curves else 'runs'} in {output}"))


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes this path at the end, so that an error leaves the path as it was."""
    if path.exists() and not path.is_file():  # such as /dev/stdout
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
