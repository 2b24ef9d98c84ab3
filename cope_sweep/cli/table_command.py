"""The commands `table` and `report`: the table of an ablation; its evidence as files, and one document of all."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from cope_sweep.api.questions import GetReport, GetTable
from cope_sweep.cli.options import ABLATION, SCALE
from cope_sweep.cli.output import make_console, print_json
from cope_sweep.cli.source import Source, argument, asks, option
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.read.tables import Table

# Functions import pandas and matplotlib, because `cope-sweep --help` imports this module.

DOCUMENT = "report.html"
COMPARE = "paper|ROW|AXIS=LABEL"
OutputOpt = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.", show_default=False)]


@asks(
    GetTable, "sets", "ablations", local=["committed"], name=ABLATION, scale=SCALE, compare=option(metavar=COMPARE),
    format=option(
        metavar="FORMAT",
        help="json, csv, markdown, latex, html, parquet, terminal, or one of an installed package. Default: by the "
        "suffix of --output, or else terminal.",
    ),
)  # fmt: skip
def table(
    question: GetTable,
    source: Source,
    output: OutputOpt = None,
    committed: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="The runs of a report in this folder, as `report --out` writes it, instead of those of a store.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as `--format json`.")] = False,
) -> None:
    """Print the table of an ablation: mean ± standard deviation over seeds, beside the published numbers.

    Intervals, medians, stuck seeds and the runs behind every number are in `--format json`, csv and html.

    Example: `cope-sweep table quickstart --format latex -o table.tex`

    Example: `cope-sweep table flip_flop --compare paper`

    Example: `cope-sweep table quickstart --compare CoPE --json`

    Example: `cope-sweep table flip_flop --from ablations/results`

    Example: `cope-sweep table quickstart --runs --format parquet -o runs.parquet`
    """
    if committed is not None and source.sets:
        raise UserError("--from shows the runs of a report as they are; leave out --set")
    question = replace(question, format="json" if as_json else question.format)
    with _without_collection():
        if output is None and question.format in (None, "terminal") and not (source.server or question.runs):
            make_console().print(_table(question, source, committed).to_rich())
            return
        from cope_sweep.cli.files import save
        from cope_sweep.read.tables import find_format, formats

        def write(question: GetTable, file: IO[bytes]) -> None:
            made = _table(question, source, committed)
            file.write(find_format(str(question.format)).file(made, runs=question.runs))

        save(
            question, output, write if committed is not None else source.write,
            default="terminal" if output is None else "markdown",
            suffixes={each.suffix: each.name for each in formats().values()},
            binary=[each.name for each in formats().values() if each.binary],
        )  # fmt: skip


def _table(question: GetTable, source: Source, committed: Path | None) -> Table:
    """The table of a store, or of a report in a folder. Raises UserError."""
    if committed is None:
        plan = source.queries.load(question.name, question.scale).plan
        return source.queries.table(plan, compare=question.compare)
    from cope_sweep.read.reports.runs import committed_table

    return committed_table(committed, source.ablations, question.name, question.scale, question.compare)


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


@asks(
    GetReport, "sets", "ablations", local=["out", "all_ablations", "compare"], scale=SCALE,
    name=argument(metavar="[ABLATION]", help=f"{ABLATION['help']} None with --all.", default=None),
    format=option(help="markdown or html. Default: by the suffix of --output, or else markdown."),
)  # fmt: skip
def report(
    question: GetReport,
    source: Source,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar=COMPARE,
            help="With --out: compare the rows as `cope-sweep table --compare` does. Default: with the published "
            "numbers, or else with CoPE.",
            show_default=False,
        ),
    ] = None,
    output: OutputOpt = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write the evidence to this folder: the runs and their curves (Parquet), the report (Markdown), and "
            "the figures (SVG). With --all: one HTML document.",
            show_default=False,
        ),
    ] = None,
    all_ablations: Annotated[
        bool, typer.Option("--all", help="All ablations, at all scales or at that of --scale; needs --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths of the files of --out as JSON.")] = False,
) -> None:
    """Report on the finished runs of an ablation: table with comparisons, figures, what is missing, and what made it.

    Example: `cope-sweep report quickstart -o quickstart.html`

    Example: `cope-sweep report flip_flop --scale small --out ablations/results`

    Example: `cope-sweep report --all --out results`
    """
    name: str | None = question.name
    if all_ablations and out is None:
        raise UserError("--all writes a document; name a folder for it with --out DIR")
    if all_ablations != (name is None):
        raise UserError("name one ablation, or write --all --out DIR for all of them")
    if out is None:
        if compare is not None or as_json:
            raise UserError("--compare and --json are of the files of --out DIR")
        from cope_sweep.cli.files import save

        save(question, output, source.write, default="markdown", suffixes={".html": "html"})
        return
    if output is not None or question.format is not None or (all_ablations and (compare or source.sets)):
        raise UserError(
            "--out writes files of fixed formats; leave out --format and --output, and with --all also --compare and "
            "--set"
        )
    try:
        paths = _document(out, question, source) if name is None else _evidence(out, question, source, compare)
    except OSError as error:
        place = error.filename or out
        raise UserError(f"{place}: {error.strerror or error}; name another folder with --out") from error
    if as_json:
        print_json({"files": [str(path) for path in paths]})
    else:
        sys.stdout.writelines(f"{path}\n" for path in paths)


def _evidence(out: Path, question: GetReport, source: Source, compare: str | None) -> list[Path]:
    from cope_sweep.read.reports import evidence, write_evidence

    plan = source.queries.load(question.name, question.scale).plan
    return list(write_evidence(evidence(plan, source.store, question.scale, compare=compare), out))


def _document(out: Path, question: GetReport, source: Source) -> list[Path]:
    from cope_sweep.read.reports.document import document
    from cope_sweep.store.files import write_bytes

    content = document(source.queries.files, source.store, question.scale).to_html().encode()
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / DOCUMENT, content)
    return [out / DOCUMENT]
