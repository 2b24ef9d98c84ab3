"""The commands that write files: `table`, `report` and `figure`. They import pandas, torch and matplotlib on use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from cope_sweep.api.questions import GetFigure, GetReport, GetTable, ListFigures
from cope_sweep.cli.options import ABLATION, Source, argument, asks, option, read_text
from cope_sweep.cli.output import escaped, make_console, save, size
from cope_sweep.errors import UserError
from cope_sweep.read.figures.kinds import FIGURES, FORMATS, Show
from cope_sweep.store.files import write_bytes

DOCUMENT = "report.html"
COMPARE = "paper|ROW|AXIS=LABEL"
MAPS_PANEL = "Options of maps"
SUFFIXES = {f".{each}": each for each in FORMATS}
FromOpt = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="DIR",
        help="The runs of a report in this folder, as `report --out` writes it, instead of those of a store.",
    ),
]
OutputOpt = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")]


@asks(
    GetTable, "sets", "ablations", local=["folder"], name=ABLATION, compare=option(metavar=COMPARE),
    json_help="The same as `--format json`.",
    format=option(
        metavar="FORMAT",
        help="json, csv, markdown, latex, latex_stars (at the numbers, in place of the comparisons), html, parquet, "
        "terminal, or one of an installed package. Default: by the suffix of --output, or else terminal.",
    ),
)  # fmt: skip
def table(
    question: GetTable,
    source: Source,
    output: OutputOpt = None,
    folder: FromOpt = None,
) -> None:
    """Print the table of an ablation: mean ± standard deviation over seeds, beside the published numbers.

    Intervals, medians, stuck seeds and the runs behind every number are in `--format json`, csv and html.

    Example: `cope-sweep table quickstart --format latex -o table.tex`

    Example: `cope-sweep table flip_flop --compare paper`

    Example: `cope-sweep table quickstart --compare CoPE --json`

    Example: `cope-sweep table flip_flop --committed`

    Example: `cope-sweep table quickstart --runs --format parquet -o runs.parquet`
    """
    source = _of_reports(source, folder)
    if question.committed and source.sets:
        raise UserError("--committed shows the runs of a report as they are; leave out --set")
    question = question.model_copy(update={"format": "json" if source.as_json else question.format})
    if output is None and question.format in (None, "terminal") and not (source.server or question.runs):
        make_console().print(source.queries.table(question).to_rich())
        return
    from cope_sweep.read.tables import formats

    save(
        question, output, source.write, default="terminal" if output is None else "markdown",
        suffixes={each.suffix: each.name for each in formats().values()},
        binary=[each.name for each in formats().values() if each.binary],
    )  # fmt: skip


def _of_reports(source: Source, folder: Path | None) -> Source:
    """The source with the runs of the reports of `--from`. Raises UserError for what they do not have."""
    if folder is not None and source.sets:
        raise UserError("--from shows the runs of a report as they are; leave out --set")
    return replace(source, reports=folder)


@asks(
    GetReport, "sets", "ablations", local=["out", "all_ablations", "compare", "folder"],
    json_help="Print the paths of the files of --out as JSON.",
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
        ),
    ] = None,
    all_ablations: Annotated[
        bool, typer.Option("--all", help="All ablations, at all scales or at that of --scale; needs --out.")
    ] = False,
    folder: FromOpt = None,
) -> None:
    """Report on the finished runs of an ablation: table with comparisons, figures, what is missing, and what made it.

    Example: `cope-sweep report quickstart -o quickstart.html`

    Example: `cope-sweep report flip_flop --scale small --out ablations/results`

    Example: `cope-sweep report --all --from ablations/results --out results`
    """
    name: str | None = question.name
    source = _of_reports(source, folder)
    if all_ablations and out is None:
        raise UserError("--all writes a document; name a folder for it with --out DIR")
    if all_ablations != (name is None):
        raise UserError("name one ablation, or write --all --out DIR for all of them")
    if out is None:
        if compare is not None or source.as_json:
            raise UserError("--compare and --json are of the files of --out DIR")
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
    if not source.printed({"files": [str(path) for path in paths]}):
        sys.stdout.writelines(f"{path}\n" for path in paths)


def _evidence(out: Path, question: GetReport, source: Source, compare: str | None) -> list[Path]:
    from cope_sweep.read.reports import evidence, write_evidence

    return list(write_evidence(evidence(source.queries.results(question.name, question.scale), compare), out))


def _document(out: Path, question: GetReport, source: Source) -> list[Path]:
    from cope_sweep.read.reports.document import document

    content = document(source.queries.files, source.reports or source.store, question.scale).to_html().encode()
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / DOCUMENT, content)
    return [out / DOCUMENT]


# -- figures ----------------------------------------------------------------------------------------------------------


of_maps = partial(typer.Option, rich_help_panel=MAPS_PANEL)
"""An option of the figures that need a checkpoint: they are drawn on this machine."""


@asks(
    GetFigure, "sets", "ablations", without=["committed"],
    local=["show", "heads", "mark", "split", "position", "text", "file", "first", "seed"],
    name=argument(
        metavar="ABLATION|RUN",
        help="Name of an ablation, or path of its file. For `maps` also the id of a finished run, or a checkpoint "
        "folder; of an ablation, the first finished run.",
    ),
    figure=option(
        "--kind", "-k", "--declared", metavar="KIND", default=None, kind=str | None,
        help=f"{', '.join(FIGURES)}; or one of the figures that the ablation declares, as `maps-2`. Default: all that "
        "it declares; where it declares none, or options select what is drawn, curves.",
    ),
    metric=option("--metric", "-m"), log=option("--log/--linear"), log_x=option("--log-x/--linear-x"),
    format=option(help="csv: the data that is drawn. Default: by the suffix of --output, or else png."),
)  # fmt: skip
def figure(
    question: GetFigure,
    source: Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: NAME-KIND.FORMAT, and for one figure as csv, standard output."),
    ] = None,
    show: Annotated[Show | None, of_maps(help="Quantity of the maps. Default: position_attention.")] = None,
    heads: Annotated[
        list[str],
        of_maps(
            "--head",
            metavar="LAYER.HEAD",
            help="A head, counted from 0; repeatable. Default: the four whose gates separate the marked tokens best.",
        ),
    ] = [],
    mark: Annotated[
        str | None,
        of_maps(help="Marked tokens, drawn as plus signs: a name from the task or the text (`newline`, …)."),
    ] = None,
    split: Annotated[str | None, of_maps(help="A split of the run's task. Default: the first test set.")] = None,
    position: Annotated[
        int | None,
        of_maps(
            "--sequence", min=0, help="Index of the sequence in its split. Default: the first with a marked token."
        ),
    ] = None,
    text: Annotated[str | None, of_maps(help="A text, or `-` for standard input.")] = None,
    file: Annotated[Path | None, of_maps(help="A text file.")] = None,
    first: Annotated[int | None, of_maps(min=1, help="Use only the first tokens of the sequence.")] = None,
    seed: Annotated[int | None, of_maps(help="Seed of the run, for an ablation.")] = None,
) -> None:
    """Draw a figure of an ablation's results, or of what the heads of a trained model attend to, as PNG, SVG or PDF.

    - `curves`: learning curves, mean and band over seeds; `--x time` by wall time
    - `convergence`: test metrics by step; a ring marks the best mean of each row
    - `values`: final metrics against a parameter (`--x train.lr`), with bars over seeds
    - `contexts`: a metric against the length of the evaluation context
    - `summary`: every row of the table as a point with its interval, beside the published value
    - `heatmap`: many rows and columns as numbers and colours, sorted by mean rank
    - `budget`: the best value of the first n draws of each row of a random search
    - `importance`: the share of a metric's variance that each parameter explains (η²)
    - `parallel`: parallel coordinates
    - `maps`: gates, positions or attention of a model's heads over the tokens

    Without `--kind`, the figures are drawn that the ablation's file declares under `figures`.

    `--format csv` gives the data of the same figure. Only finished runs enter means; the curves of others are dotted.

    Example: `cope-sweep figure quickstart -o curves.svg`

    Example: `cope-sweep figure attention_maps --scale small --kind maps-2`

    Example: `cope-sweep figure quickstart --kind summary --format pdf`

    Example: `cope-sweep figure length_generalisation --kind contexts --scale small --format csv`

    Example: `cope-sweep figure quickstart --kind maps --row CoPE --show gates --mark data -o gates.png`
    """
    question = question.model_copy(update={"name": source.run_or_ablation(question.name)})
    kind: str | None = question.figure
    given = (show, *heads, mark, split, position, text, file, first, seed)
    is_checkpoint = _is_checkpoint(question.name)
    own = question.model_copy(update={"figure": "", "format": None}) != GetFigure.model_construct(
        name=question.name, figure="", scale=question.scale
    )
    selects = own or any(each is not None for each in given)
    declared: list[str] = []
    if not is_checkpoint and not selects and kind in (None, "maps"):
        declared = [
            each.name for each in source.ask(ListFigures(name=question.name, scale=question.scale)) if each.declared
        ]
    write: Callable[[GetFigure, IO[bytes]], object] = source.write
    if is_checkpoint or (kind == "maps" and "maps" not in declared):
        if source.server:
            raise UserError("maps that no file declares need a checkpoint on this machine; leave out --server")
        if (text, file, split).count(None) < 2:
            raise UserError("more than one source of tokens; give one of --text, --file and --split")
        from cope_sweep.config.ablation import Maps

        try:
            drawn = Maps(
                show=show or "position_attention", heads=_pairs(heads) or 4, mark=mark, title=question.title,
                split=split, index=position, first=first,
            )  # fmt: skip
        except ValueError as error:
            raise UserError("--head, --sequence and --first take numbers up to 1,000,000,000") from error
        typed = None if text is None and file is None else read_text(text, file)
        kind, maps = "maps", FIGURES["maps"].make(_checkpoint(question, source, seed), drawn, typed)

        def write_maps(question: GetFigure, file: IO[bytes]) -> None:
            file.write(maps.render(question.format or "png"))

        write = write_maps
    wanted = [kind] if kind else declared or ["curves"]
    if output is not None and len(wanted) > 1:
        raise UserError(f"--output is one file; {question.name} declares {', '.join(declared)}; choose one with --kind")
    written = [
        _save(question.model_copy(update={"figure": each}), output, write, several=len(wanted) > 1) for each in wanted
    ]
    files = [each for each in written if each]
    if files and not source.printed(files if kind is None and declared else files[0]):
        for each in files:
            make_console().print(escaped(f"{each['file']}: {size(each['bytes'])}"), soft_wrap=True, highlight=False)


def _save(
    question: GetFigure, output: Path | None, write: Callable[[GetFigure, IO[bytes]], object], *, several: bool
) -> dict[str, Any]:
    """Write a figure, and return what the JSON answer says of its file; nothing of standard output."""
    if output is None and (question.format != "csv" or several):
        output = Path(f"{Path(question.name).stem}-{question.figure}.{question.format or 'png'}")
    if output is not None and question.format is None and output.suffix.lower() not in SUFFIXES:
        raise UserError(f"{output}: its suffix names no format; end it with {', '.join(SUFFIXES)}, or give --format")
    written = save(question, output, write, default="png", suffixes=SUFFIXES)
    if output is None:
        return {}
    return {"file": str(output), "kind": question.figure, "format": written, "bytes": output.stat().st_size}


def _is_checkpoint(name: str) -> bool:
    from cope_sweep.store.artifacts import RUN_ID

    return bool(RUN_ID.fullmatch(name) or Path(name).is_dir())


def _pairs(heads: list[str]) -> list[tuple[int, int]]:
    """The pairs in `2.0`, `3.1`. Raises UserError."""
    pairs = []
    for each in heads:
        layer, dot, head = each.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"--head {each}: a head is LAYER.HEAD, counted from 0, as in --head 1.0")
        pairs.append((int(layer), int(head)))
    return pairs


def _checkpoint(question: GetFigure, source: Source, seed: int | None) -> Path:
    """The checkpoint of a run, of a folder, or of the first finished run of an ablation. Raises UserError."""
    if _is_checkpoint(question.name):
        return source.checkpoint(question.name)
    from cope_sweep.read.queries import finished_run

    plan = source.queries.load(question.name, question.scale)
    return source.store.run(finished_run(plan, source.store, question.row, seed).run_id).fetch_checkpoint()
