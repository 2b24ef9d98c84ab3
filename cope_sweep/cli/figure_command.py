"""The command `figure`: figures of an ablation, and maps of a checkpoint's heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.api.questions import GetFigure
from cope_sweep.cli.options import SCALE, Json, find_checkpoint
from cope_sweep.cli.output import escaped, make_console, print_json, size
from cope_sweep.cli.source import Source, argument, asks, option
from cope_sweep.errors import UserError
from cope_sweep.read.figures import FIGURES, MapOptions
from cope_sweep.read.figures.figure import Show

if TYPE_CHECKING:
    from cope_sweep.read.figures import Figure

# Functions import pandas, torch and matplotlib, because `cope-sweep --help` imports this module.

MAPS_PANEL = "Options of maps"
SUFFIXES = {".png": "png", ".svg": "svg", ".pdf": "pdf", ".csv": "csv"}


def _of_maps(*flags: str, help: str, metavar: str | None = None, min: int | None = None) -> typer.models.OptionInfo:  # noqa: A002
    """An option of the figures that need a checkpoint: they are drawn on this machine."""
    info: typer.models.OptionInfo = typer.Option(
        *flags, help=help, metavar=metavar, min=min, show_default=False, rich_help_panel=MAPS_PANEL
    )
    return info


@asks(
    GetFigure, "sets", "ablations",
    local=["show", "heads", "mark", "split", "position", "text", "file", "first", "seed"],
    name=argument(
        metavar="ABLATION|RUN",
        help="Name of an ablation, or path of its file. For `maps` also the id of a finished run, or a checkpoint "
        "folder; of an ablation, the first finished run.",
    ),
    figure=option(
        "--kind", "-k", "--declared", metavar="KIND", default=None, kind=str | None, show_default=False,
        help=f"{', '.join(FIGURES)}; or one of the figures that the ablation declares, as `maps-2`. Default: all that "
        "it declares; where it declares none, or options select what is drawn, curves.",
    ),
    metric=option("--metric", "-m"), log=option("--log/--linear"), log_x=option("--log-x/--linear-x"), scale=SCALE,
    format=option(help="csv: the data that is drawn. Default: by the suffix of --output, or else png."),
)  # fmt: skip
def figure(
    question: GetFigure,
    source: Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: NAME-KIND.FORMAT, and for one figure as csv, standard output."),
    ] = None,
    show: Annotated[Show | None, _of_maps("--show", help="What the maps show. Default: position_attention.")] = None,
    heads: Annotated[
        list[str],
        _of_maps(
            "--head",
            metavar="LAYER.HEAD",
            help="A head, counted from 0; repeatable. Default: the four whose gates separate the marked tokens best.",
        ),
    ] = [],
    mark: Annotated[
        str | None,
        _of_maps("--mark", help="Marked tokens, drawn as plus signs: a name from the task or the text (`newline`, …)."),
    ] = None,
    split: Annotated[
        str | None, _of_maps("--split", help="A split of the run's task. Default: the first test set.")
    ] = None,
    position: Annotated[
        int | None, _of_maps("--sequence", min=0, help="Index of the sequence in its split. Default: 0.")
    ] = None,
    text: Annotated[str | None, _of_maps("--text", help="A text, or `-` for standard input.")] = None,
    file: Annotated[Path | None, _of_maps("--file", help="A text file.")] = None,
    first: Annotated[int | None, _of_maps("--first", min=1, help="Use only the first tokens of the sequence.")] = None,
    seed: Annotated[int | None, _of_maps("--seed", help="Of an ablation: the seed of the run.")] = None,
    as_json: Json = False,
) -> None:
    """Draw a figure of an ablation's results, or of what the heads of a trained model attend to, as PNG, SVG or PDF.

    - `curves`: learning curves, mean and band over seeds; `--x time` by wall time
    - `convergence`: test metrics by step; a ring marks the best mean of each row
    - `values`: final metrics against a parameter (`--x train.lr`), with bars over seeds
    - `contexts`: a metric against the length of the evaluation context
    - `summary`: every row of the table as a point with its interval, beside the published value
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
    question = replace(question, name=source.run_or_ablation(question.name))
    kind: str | None = question.figure
    of_maps = (show, *heads, mark, split, position, text, file, first, seed)
    is_checkpoint = _is_checkpoint(question.name)
    own = replace(question, figure="", format=None) != GetFigure(question.name, "", scale=question.scale)
    selects = own or any(each is not None for each in of_maps)
    declared: list[str] = []
    if not is_checkpoint and not selects and kind in (None, "maps"):
        declared = source.declared(question.name, question.scale)
    maps: Figure | None = None
    if is_checkpoint or (kind == "maps" and "maps" not in declared):
        if source.server:
            raise UserError("maps that no file declares need a checkpoint on this machine; leave out --server")
        kind, options = "maps", MapOptions(show or "position_attention", _pairs(heads) or 4, mark, question.title)
        folder = _checkpoint(question, source, seed)
        maps = _maps(folder, options, text=text, file=file, split=split, position=position or 0, first=first)
    wanted = [kind] if kind else declared or ["curves"]
    if output is not None and len(wanted) > 1:
        raise UserError(f"--output is one file; {question.name} declares {', '.join(declared)}; choose one with --kind")

    def write(question: GetFigure, file: IO[bytes]) -> None:
        if maps is None:
            source.write(question, file)
        else:
            file.write(maps.render(question.format or "png"))

    written = [_save(replace(question, figure=each), output, write, several=len(wanted) > 1) for each in wanted]
    files = [each for each in written if each]
    if as_json and files:
        print_json(files if kind is None and declared else files[0])
    elif not as_json:
        for each in files:
            make_console().print(escaped(f"{each['file']}: {size(each['bytes'])}"), soft_wrap=True, highlight=False)


def _save(
    question: GetFigure, output: Path | None, write: Callable[[GetFigure, IO[bytes]], None], *, several: bool
) -> dict[str, Any]:
    """Write a figure, and return what the JSON answer says of its file; nothing of standard output."""
    from cope_sweep.cli.files import save

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


def _pairs(heads: list[str]) -> tuple[tuple[int, int], ...]:
    """The pairs in `2.0`, `3.1`. Raises UserError."""
    pairs = []
    for each in heads:
        layer, dot, head = each.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"--head {each}: a head is LAYER.HEAD, counted from 0, as in --head 1.0")
        pairs.append((int(layer), int(head)))
    return tuple(pairs)


def _checkpoint(question: GetFigure, source: Source, seed: int | None) -> Path:
    """The checkpoint of a run, of a folder, or of the first finished run of an ablation. Raises UserError."""
    name, rows = question.name, list(question.row)
    if _is_checkpoint(name):
        return find_checkpoint(name, source.store)
    from cope_sweep.read.figures.metrics import selected_rows

    plan, store = source.queries.load(name, question.scale).plan, source.store
    runs = [run for row in selected_rows(plan, rows) for run in row.runs if seed is None or run.seed == seed]
    statuses = store.index.statuses(run.run_id for run in runs)
    for run in runs:
        if statuses.get(run.run_id) == "finished":
            return store.run(run.run_id).fetch_checkpoint()
    wanted = "".join([f" of {', '.join(rows)}" if rows else "", f" with seed {seed}" if seed is not None else ""])
    raise UserError(f"no run{wanted} of {plan.name} is finished in the store {store.location}; see `cope-sweep status`")


def _maps(
    folder: Path,
    options: MapOptions,
    *,
    text: str | None,
    file: Path | None,
    split: str | None,
    position: int,
    first: int | None,
) -> Figure:
    from cope_sweep.cli.probe_command import text_ids
    from cope_sweep.inference import Predictor
    from cope_sweep.inference.probe import split_sequences

    if (text, file, split).count(None) < 2:
        raise UserError("more than one source of tokens; give one of --text, --file and --split")
    predictor = Predictor.load(folder)
    if text is None and file is None:
        ids = split_sequences(predictor.run.task, split, position)[0]
    else:
        ids = text_ids(text, file, predictor)
    return FIGURES["maps"].make(predictor, ids[:first], options)
