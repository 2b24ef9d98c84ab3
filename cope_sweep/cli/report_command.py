"""The command `report`: the table of an ablation, its evidence as files, and one document of all ablations."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationsDir,
    IndexOpt,
    ScaleOpt,
    Sets,
    StoreOpt,
    load_plan,
    open_store,
)
from cope_sweep.cli.output import make_console, print_json
from cope_sweep.cli.remote import ServerOpt, connect, refuse_local
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.results import Table
    from cope_sweep.results.formats import Format

# Functions import pandas and matplotlib, because `cope-sweep --help` imports this module.

DOCUMENT = "report.html"


def report(
    ablation: Annotated[
        str | None,
        typer.Argument(
            metavar="[ABLATION]",
            help="Name of an ablation (see `cope-sweep list`) or path of its file; none with --all.",
            show_default=False,
        ),
    ] = None,
    output_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="terminal, markdown, latex, csv, parquet, html, json, or one of an installed package. With --output, "
            "`terminal` means markdown.",
        ),
    ] = "terminal",
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="paper|ROW|AXIS=LABEL",
            help="Compare the rows with one of them by its name, or with the published numbers; or, as in "
            "`model.position=CoPE`, each row with the one that has this label and the same other labels. The rule is "
            "printed below the table.",
            show_default=False,
        ),
    ] = None,
    every_run: Annotated[
        bool, typer.Option("--runs", help="One line for each run instead of each row (csv, parquet).")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write the evidence to this folder: the runs and their curves (Parquet), the table with comparisons "
            "and provenance (Markdown), and the figures (SVG). With --all: one HTML document.",
            show_default=False,
        ),
    ] = None,
    all_ablations: Annotated[
        bool, typer.Option("--all", help="All ablations, at all scales or at that of --scale; needs --out.")
    ] = False,
    committed: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="The runs of a report in this folder, as --out writes it, instead of those of a store.",
            show_default=False,
        ),
    ] = None,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    server: ServerOpt = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as `--format json`.")] = False,
) -> None:
    """Print the table of an ablation: mean ± standard deviation over seeds, beside the published numbers.

    Intervals, medians, stuck seeds and the runs behind every number are in `--format json`, csv and html.

    Example: `cope-sweep report quickstart --format latex -o table.tex`

    Example: `cope-sweep report flip_flop --compare paper`

    Example: `cope-sweep report quickstart --compare CoPE --json`

    Example: `cope-sweep report flip_flop --from ablations/results`

    Example: `cope-sweep report quickstart --runs --format parquet -o runs.parquet`

    Example: `cope-sweep report flip_flop --scale small --out ablations/results`

    Example: `cope-sweep report --all --out results`
    """
    refuse_local(server, sets=sets, out=out, all=all_ablations, **{"from": committed})
    if committed is not None and (out is not None or all_ablations or sets):
        raise UserError("--from shows the runs of a report as they are; leave out --out, --all and --set")
    if all_ablations or out is not None:
        if output is not None or every_run or output_format != "terminal" or (all_ablations and (compare or sets)):
            raise UserError(
                "--out writes files of fixed formats; leave out --format, --runs and --output, and with --all also "
                "--compare and --set"
            )
        if all_ablations != (ablation is None):
            raise UserError("name one ablation, or write --all for all of them")
        _report_files(ablation, out, compare, scale, sets, ablations, root, index, as_json)
        return
    if ablation is None:
        raise UserError("name an ablation, or write --all --out DIR for all of them")
    name = "json" if as_json else output_format
    chosen = _format(name, output, every_run=every_run)
    if server is not None:
        with connect(server) as client:
            content = client.rendered_table(ablation, chosen.name if output else name, scale, compare, runs=every_run)
        _put(content, output)
        return
    with _without_collection():
        results = (
            _table(ablation, compare, scale, sets, ablations, root, index)
            if committed is None
            else _committed_table(committed, ablations, ablation, scale, compare)
        )
        if output is None and name == "terminal":
            make_console().print(results.to_rich())
            return
        render = chosen.render_runs if every_run else None
        content = render(results) if render else chosen.render(results, None)
    _put(content, output)


def _report_files(
    ablation: str | None,
    out: Path | None,
    compare: str | None,
    scale: str | None,
    sets: list[str],
    ablations: Path,
    root: str,
    index: str | None,
    as_json: bool,
) -> None:
    """Write the evidence of an ablation, or the document of all (None), and print the paths. Raises UserError."""
    if out is None:
        raise UserError("--all writes a document; name a folder for it with --out DIR")
    with _writing(out):
        paths = (
            _write_evidence(ablation, out, compare, scale, sets, ablations, root, index)
            if ablation is not None
            else [_write_document(out, scale, ablations, root, index)]
        )
    if as_json:
        print_json({"files": [str(path) for path in paths]})
    else:
        sys.stdout.writelines(f"{path}\n" for path in paths)


def _format(name: str, output: Path | None, *, every_run: bool) -> Format:
    """The format of a table that is written to a file or to the terminal. Raises UserError."""
    from cope_sweep.results import find_format, formats

    chosen = find_format("markdown" if name == "terminal" and output is not None else name)
    if every_run and chosen.render_runs is None:
        able = " or ".join(each.name for each in formats().values() if each.render_runs)
        raise UserError(f"--runs needs --format {able}, not {name}; json always holds every run")
    if chosen.binary and output is None:
        raise UserError(f"{name} is binary; name a file for it with --output FILE")
    return chosen


def _table(
    ablation: str,
    compare: str | None,
    scale: str | None,
    sets: list[str],
    ablations: Path,
    root: str,
    index: str | None,
) -> Table:
    from cope_sweep.queries import Queries

    return Queries(open_store(root, index)).table(load_plan(ablation, ablations, scale, sets), against=compare)


def _committed_table(folder: Path, ablations: Path, ablation: str, scale: str | None, compare: str | None) -> Table:
    from cope_sweep.report.committed import committed_table

    return committed_table(folder, ablations, ablation, scale, compare)


def _put(content: bytes, output: Path | None) -> None:
    """Write a table to a file, or to standard output."""
    if output is None:
        sys.stdout.write(content.decode())
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        raise UserError(f"{output}: {error.strerror or error}; name another file with --output") from error


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the garbage collector: a table keeps all its objects, and looking through 100,000 runs takes seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: {error.strerror or error}; name another folder with --out"
        ) from error


def _write_evidence(
    ablation: str,
    out: Path,
    compare: str | None,
    scale: str | None,
    sets: list[str],
    ablations: Path,
    root: str,
    index: str | None,
) -> list[Path]:
    from cope_sweep.queries import recorded_plan
    from cope_sweep.report import evidence, write_evidence

    plan, store = load_plan(ablation, ablations, scale, sets), open_store(root, index)
    return list(write_evidence(evidence(recorded_plan(plan, store), store, scale, against=compare), out))


def _write_document(out: Path, scale: str | None, ablations: Path, root: str, index: str | None) -> Path:
    from cope_sweep.queries import AblationFiles
    from cope_sweep.report.document import document
    from cope_sweep.store.files import write_bytes

    content = document(AblationFiles(ablations), open_store(root, index), scale).to_html().encode()
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / DOCUMENT, content)
    return out / DOCUMENT
