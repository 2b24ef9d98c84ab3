"""The commands that write files: `table`, `report` and `figure`.

Questions are made by `model_construct`: a path may be longer than the name of an ablation in a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from cope_sweep.api import figures, tables
from cope_sweep.api.question import Committed, Scale, Sets
from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    IndexOpt,
    JsonOpt,
    OutputOpt,
    StoreOpt,
    check_effect,
    check_one_source,
    conflict,
    read_text_options,
)
from cope_sweep.cli.output import (
    escaped,
    format_of,
    make_console,
    print_json,
    save,
    size,
    standard_output,
    writing_to,
)
from cope_sweep.errors import UserError
from cope_sweep.read.figures import FIGURES

if TYPE_CHECKING:
    from cope_sweep.read.figures.kinds.maps import Maps
    from cope_sweep.read.queries import Queries

REPORT_SUFFIXES: dict[str, tables.ReportFormat] = {".md": "markdown", ".html": "html"}
SUFFIXES: dict[str, figures.FigureFormat] = {f".{name}": name for name in figures.FIGURE_FORMATS}
of_maps = partial(typer.Option, rich_help_panel="Options of maps")
"""An option of the figures that need a checkpoint."""

TableFormatOpt = Annotated[
    tables.TableFormat | None,
    typer.Option("--format", help="Default: by the suffix of --output, or else terminal.", show_default=False),
]


def table(
    ablation: AblationArg,
    file_format: TableFormatOpt = None,
    scale: Scale = None,
    compare: tables.Compare = None,
    sort: tables.SortRows = None,
    top: tables.Top = None,
    runs: tables.OneLinePerRun = False,
    committed: Committed = False,
    output: OutputOpt = None,
    stars: tables.Stars = False,
    group: tables.Group = None,
    caption: tables.Caption = None,
    label: tables.Label = None,
    notes: tables.Notes = True,
    margin: tables.Margin = None,
    fail_unless: Annotated[
        Literal["better", "worse", "equivalent"] | None,
        typer.Option(help="With --compare, for scripts: exit code 1 unless all verdicts of the table are this one."),
    ] = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as `--format json`.")] = False,
) -> None:
    """Print the table of an ablation: mean ± standard deviation over seeds, beside the published numbers.

    `--format json` and csv also have intervals, medians, stuck seeds and the runs behind every number; json has a
    verdict on each row that is compared with another one: better, worse, equivalent, unclear, or too few seeds, with
    the number of seeds to add.

    Example: `cope-sweep table quickstart --sort in_dist/token_error -o table.tex`

    Example: `cope-sweep table encodings_counting --committed --sort in_dist/token_error --top 5`

    Example: `cope-sweep table flip_flop --compare paper`

    Example: `cope-sweep table quickstart --compare CoPE --json`

    Example: `cope-sweep table mine --compare CoPE --fail-unless worse` exits with 1 unless all other rows are worse

    Example: `cope-sweep table flip_flop --committed`

    Example: `cope-sweep table quickstart --runs`

    Example: `cope-sweep table quickstart --runs --format csv -o runs.csv`
    """
    from cope_sweep.cli.files import open_queries
    from cope_sweep.read.tables import FORMATS, table_file

    queries = open_queries(store, index, ablations, committed=committed)
    if as_json and file_format not in (None, "json"):
        raise conflict(
            f"--json is --format json; leave out one of --json and --format {file_format}", "--json", "--format"
        )
    suffixes = {table_format.suffix: name for name, table_format in FORMATS.items()}
    chosen = "json" if as_json else file_format or format_of(output, suffixes, default="terminal")
    question = tables.GetTable.model_construct(
        name=ablation, scale=scale, set=sets, compare=compare, sort=sort, top=top, format=chosen, runs=runs,
        stars=stars, group=group, caption=caption, label=label, notes=notes,
        margin=margin if chosen == "json" or fail_unless is None else None,
    )  # fmt: skip
    asked = queries.table(question)
    if output is None and chosen == "terminal":
        make_console().print(asked.to_rich(runs=runs))
    else:
        save(output, chosen, lambda file: file.write(table_file(asked)))
    if fail_unless is not None:
        judged = replace(asked, question=asked.question.model_copy(update={"margin": margin}))
        require_verdict(judged.verdicts, fail_unless)


def require_verdict(found: Sequence[tables.Verdict], wanted: tables.VerdictWord) -> None:
    """Exit with 1, naming the rows, unless all verdicts are the wanted one. Without any, it is an error."""
    if not found:
        raise UserError(
            "--fail-unless: the table has no verdict; name a row with --compare ROW, train its runs, and choose a "
            "metric that they have",
            code="nothing_compared",
        )
    others, console = [each for each in found if each.verdict != wanted], make_console(stderr=True)
    for each in others:
        console.print(escaped(f"not {wanted}: {each.text}"), soft_wrap=True, highlight=False)
        if each.command:
            console.print(escaped(f"  {each.command}"), soft_wrap=True, highlight=False)
    if others:
        raise typer.Exit(1)


ReportFormatOpt = Annotated[
    tables.ReportFormat | None,
    typer.Option("--format", help="Default: by the suffix of --output, or else markdown.", show_default=False),
]
OutOpt = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Write the evidence to this folder: the runs and their curves (Parquet), the report (Markdown), and the "
        "figures (SVG).",
    ),
]


def report(
    ablation: AblationArg,
    file_format: ReportFormatOpt = None,
    scale: Scale = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="paper|ROW|AXIS=LABEL",
            help="With --out: like `cope-sweep table --compare`. Default: the published numbers, or else CoPE.",
        ),
    ] = None,
    output: OutputOpt = None,
    out: OutOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths of the files of --out as JSON.")] = False,
) -> None:
    """Report on the finished runs of an ablation: table with comparisons, figures, what is missing, and provenance.

    Example: `cope-sweep report quickstart -o quickstart.html`

    Example: `cope-sweep report flip_flop --scale small --out ablations/results`

    Example: `cope-sweep report flip_flop --scale small --store ablations/results`
    """
    from cope_sweep.cli.files import open_queries

    queries = open_queries(store, index, ablations)
    if out is None:
        if compare is not None or as_json:
            raise UserError("--compare and --json need --out DIR", code="missing_option", option="--out")
        chosen = file_format or format_of(output, REPORT_SUFFIXES, default="markdown")
        question = tables.GetReport.model_construct(name=ablation, scale=scale, set=sets, format=chosen)
        save(output, chosen, lambda file: file.write(queries.ask(question)))
        return
    if output is not None or file_format is not None:
        raise conflict(
            "--out chooses its own formats; leave out --format and --output", "--out", "--format", "--output"
        )
    from cope_sweep.read.reports import evidence, write_evidence  # pandas, matplotlib

    with writing_to(out, "--out"):
        paths = write_evidence(evidence(queries.results(ablation, scale, sets), compare), out)
    if as_json:
        print_json({"files": [str(path) for path in paths]})
    else:
        standard_output().writelines(f"{path}\n" for path in paths)


# -- figures ----------------------------------------------------------------------------------------------------------

FigureArg = Annotated[
    str,
    typer.Argument(
        metavar="ABLATION|RUN",
        help="Name of an ablation, or path of its file. For `maps` also the id of a finished run, or a checkpoint "
        "folder; an ablation stands for its first finished run.",
        show_default=False,
    ),
]
KindOpt = Annotated[
    str | None,
    typer.Option(
        "--kind",
        "-k",
        metavar="KIND",
        help=f"{', '.join(FIGURES)}; or a figure that the ablation declares, such as `maps-2`. Default: all figures "
        "that it declares; curves if it declares none, or if other options select what to draw.",
    ),
]
StyleOpt = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="A style sheet of matplotlib, or the name of one that it has: fonts, colours, line widths.",
        show_default=False,
    ),
]
FigureFormatOpt = Annotated[
    figures.FigureFormat | None,
    typer.Option(
        "--format",
        help=f"{figures.CSV} Default: by the suffix of --output, or else png.",
        show_default=False,
    ),
]
FigureOutputOpt = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Default: NAME-KIND.FORMAT; one figure as csv goes to standard output."),
]
HeadsOpt = Annotated[
    list[str],
    of_maps(
        "--head",
        metavar="LAYER.HEAD",
        help="A head, counted from 0; repeatable. Default: the four whose gates separate the marked tokens best.",
    ),
]
MarkOpt = Annotated[
    str | None, of_maps(help="Marked tokens, drawn as plus signs: a name from the task or the text (`newline`, …).")
]
SequenceOpt = Annotated[
    int | None,
    of_maps("--sequence", min=0, help="Index of the sequence in its split. Default: the first with a marked token."),
]

KINDS = "\n".join(f"- `{name}`: {kind.SHOWS}" for name, kind in FIGURES.items())
FIGURE_HELP = f"""\
Draw a figure of an ablation's results, or of what the heads of a trained model attend to, as PNG, SVG or PDF.

{KINDS}

Without `--kind`, it draws the figures that the ablation's file declares under `figures`.

`--format csv` gives the data of the same figure. Means are over finished runs only; other runs have dotted curves.

Example: `cope-sweep figure quickstart -o curves.svg`

Example: `cope-sweep figure attention_maps --scale small --kind maps-2`

Example: `cope-sweep figure quickstart --kind summary --size 3.25x2.5 --style seaborn-v0_8-paper --format pdf`

Example: `cope-sweep figure length_generalisation --kind contexts --scale small --format csv`

Example: `cope-sweep figure quickstart --kind maps --row CoPE --show gates --mark data -o gates.png`
"""


def figure(
    ablation: FigureArg,
    kind: KindOpt = None,
    metric: figures.Metrics = [],
    x: figures.X = None,
    panels: figures.Panels = None,
    row: figures.Rows = [],
    log: figures.Log = None,
    figure_size: figures.Size = None,
    style: StyleOpt = None,
    scale: Scale = None,
    file_format: FigureFormatOpt = None,
    output: FigureOutputOpt = None,
    show: Annotated[figures.Show | None, of_maps(help="Quantity of the maps. Default: position_attention.")] = None,
    heads: HeadsOpt = [],
    mark: MarkOpt = None,
    split: Annotated[str | None, of_maps(help="A split of the run's task. Default: the first test set.")] = None,
    position: SequenceOpt = None,
    text: Annotated[str | None, of_maps(help="A text, or `-` for standard input.")] = None,
    file: Annotated[Path | None, of_maps(help="A text file.")] = None,
    first: Annotated[int | None, of_maps(min=1, help="Use only the first tokens of the sequence.")] = None,
    seed: Annotated[int | None, of_maps(help="Seed of the run, for an ablation.")] = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    from cope_sweep.cli.files import find_run_id, open_queries
    from cope_sweep.read.figures.available import available_figures, inches
    from cope_sweep.read.queries import check_no_values

    queries = open_queries(store, index, ablations)
    if Path(ablation).is_dir():
        check_no_values(scale, sets, "leave it out beside a folder")
    name = find_run_id(queries, ablation, scale, sets)
    selected: dict[str, Any] = {"metric": metric, "x": x, "panels": panels, "row": row, "log": log}
    selects = any(value not in (None, []) for value in selected.values())
    of_maps_alone = {
        "show": show, "head": heads or None, "mark": mark, "split": split, "sequence": position, "text": text,
        "file": file, "first": first, "seed": seed,
    }  # fmt: skip
    selects |= any(value is not None for value in of_maps_alone.values())
    is_checkpoint = _is_checkpoint(name)
    declared: list[str] = []
    if not (is_checkpoint or selects) and kind in (None, "maps"):
        declared = [figure.name for figure in available_figures(queries.load(name, scale, sets)) if figure.declared]
    wanted = [kind] if kind else declared or ["curves"]
    of_heads = is_checkpoint or (kind == "maps" and "maps" not in declared)
    if of_heads:
        wanted = ["maps"]
        # Of an ablation, rows and seed choose the run.
        of_runs = {"kind": kind if kind != "maps" else None, "seed": seed} if is_checkpoint else {"row": None}
        check_effect(selected | of_runs, "has no effect on maps of heads; leave it out")
        if text is not None or file is not None:
            check_effect({"sequence": position}, "is the index in a split; leave it out beside a text")
    else:
        check_effect(of_maps_alone, "is an option of maps; add --kind maps, or leave it out")
    _check_fits(output, name, wanted)
    chosen = file_format or format_of(output, SUFFIXES, default="png")

    def write(file: IO[bytes], figure: str) -> None:
        if of_heads:
            file.write(maps.render(chosen))
            return
        question = figures.GetFigure.model_construct(
            name=name, figure=figure, scale=scale, set=sets, format=chosen, size=figure_size, **selected,
        )  # fmt: skip
        file.write(queries.figure(question, style))

    if of_heads:
        maps_config = _maps(
            show=show or "position_attention", heads=_pairs(heads) or 4, mark=mark, split=split,
            index=position, first=first,
        )  # fmt: skip
        typed_text = _typed_text(text, file, split)
        from cope_sweep.read.figures.figure import Figure  # matplotlib

        wanted_size = inches(figure_size)
        data = maps_config.of_checkpoint(_checkpoint(queries, name, scale, sets, row, seed), typed_text)
        maps = Figure("maps", data.title, data, wanted_size, style)
    if output is None and chosen == "csv" and len(wanted) == 1:
        if as_json:
            raise conflict(
                "--format csv prints the data themselves; leave out --json, or name a file with --output",
                "--json",
                "--format",
            )
        save(None, chosen, partial(write, figure=wanted[0]))
        return
    stem = Path(name).stem
    written = [_save_figure(each, output or Path(f"{stem}-{each}.{chosen}"), chosen, write) for each in wanted]
    if as_json:
        print_json(written if kind is None and declared else written[0])
        return
    for made in written:
        make_console().print(escaped(f"{made['file']}: {size(made['bytes'])}"), soft_wrap=True, highlight=False)


def _save_figure(
    figure: str, path: Path, file_format: figures.FigureFormat, write: Callable[[IO[bytes], str], None]
) -> dict[str, Any]:
    """Write a figure to a file; what was written, as `--json` prints it."""
    save(path, file_format, lambda file: write(file, figure))
    return {"file": str(path), "kind": figure, "format": file_format, "bytes": path.stat().st_size}


def _check_fits(output: Path | None, name: str, wanted: Sequence[str]) -> None:
    """Raise UserError if one file is named for several figures."""
    if output is not None and len(wanted) > 1:
        raise UserError(
            f"--output names one file, but {name} declares {', '.join(wanted)}; choose one with --kind",
            code="several_figures",
            allowed=list(wanted),
        )


def _typed_text(text: str | None, file: Path | None, split: str | None) -> str | None:
    """The text to draw; None: a sequence of a split. Raises UserError for several of them."""
    check_one_source(text=text, file=file, split=split)
    return None if text is None and file is None else read_text_options(text, file)


def _is_checkpoint(name: str) -> bool:
    from cope_sweep.store.artifacts import RUN_ID

    return bool(RUN_ID.fullmatch(name) or Path(name).is_dir())


def _maps(**options: Any) -> Maps:
    """What `maps` draws. Raises UserError."""
    from cope_sweep.read.figures.kinds.maps import Maps

    try:
        return Maps(**options)
    except ValueError as error:
        raise UserError(
            "--head, --sequence and --first take numbers up to 1,000,000,000", code="invalid_option"
        ) from error


def _pairs(heads: list[str]) -> list[tuple[int, int]]:
    """The pairs in `2.0`, `3.1`. Raises UserError."""
    pairs = []
    for option in heads:
        layer, dot, head = option.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(
                f"--head {option}: a head is LAYER.HEAD, counted from 0, as in --head 1.0",
                code="invalid_option",
                option="--head",
                value=option,
            )
        pairs.append((int(layer), int(head)))
    return pairs


def _checkpoint(
    queries: Queries, name: str, scale: str | None, sets: Sequence[str], rows: Sequence[str], seed: int | None
) -> Path:
    """The checkpoint of a run, of a folder, or of the first finished run of an ablation. Raises UserError."""
    from cope_sweep.cli.files import find_checkpoint
    from cope_sweep.read.queries import finished_run

    if _is_checkpoint(name):
        return find_checkpoint(queries.store, name)
    plan = queries.load(name, scale, sets)
    run = finished_run(plan, queries.store, rows, seed, lambda: queries.other_values(plan))
    return queries.store.run(run.run_id).fetch_checkpoint()
