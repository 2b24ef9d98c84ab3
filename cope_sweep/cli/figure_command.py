"""The command `figure`: figures of an ablation, and maps of a checkpoint's heads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationsDir,
    IndexOpt,
    Json,
    ScaleOpt,
    Sets,
    StoreOpt,
    find_checkpoint,
    load_plan,
    open_store,
)
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.errors import UserError
from cope_sweep.figures import FIGURES, Format, MapOptions, Options
from cope_sweep.figures.kinds import Band, FigureKind, Show

if TYPE_CHECKING:
    from cope_sweep.config import Plan
    from cope_sweep.figures import Figure
    from cope_sweep.store import Store

# Functions import pandas, torch and matplotlib, because `cope-sweep --help` imports this module.

KINDS = ", ".join(FIGURES)
MAPS_PANEL = "Options of maps"


def figure(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ABLATION|RUN",
            help="Name of an ablation, or path of its file. For `maps` also the id of a finished run, or a checkpoint "
            "folder; of an ablation, the first finished run.",
            show_default=False,
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            "-k",
            metavar="KIND",
            help=f"{KINDS}. Default: all figures that the ablation declares; where it declares none, or options select "
            "what is drawn, curves.",
            show_default=False,
        ),
    ] = None,
    declared: Annotated[
        str | None,
        typer.Option(
            "--declared",
            metavar="NAME",
            help="One of the figures that the ablation declares, as `curves` or `maps-2`.",
            show_default=False,
        ),
    ] = None,
    metrics: Annotated[
        list[str], typer.Option("--metric", "-m", help="A metric; repeatable. Default: those of the table.")
    ] = [],
    x: Annotated[
        str | None,
        typer.Option(
            "--x",
            help="curves, convergence: `step` or `time`. values: an axis, another key of a run, or a fact "
            "(`facts.parameters`). Default: the first axis with numbers.",
            show_default=False,
        ),
    ] = None,
    panels: Annotated[
        str | None,
        typer.Option("--panels", help="values, contexts: an axis; a panel for each value.", show_default=False),
    ] = None,
    rows: Annotated[list[str], typer.Option("--row", help="A row; repeatable. Default: all.")] = [],
    band: Annotated[
        Band,
        typer.Option(
            "--band",
            help="interval: 95 % interval of the mean. range: least and greatest value. auto: the range if a row has "
            "two seeds, else the interval.",
        ),
    ] = "auto",
    log: Annotated[
        bool | None,
        typer.Option("--log/--linear", help="The metrics' axis. Default: as the data ask for.", show_default=False),
    ] = None,
    log_x: Annotated[
        bool | None,
        typer.Option("--log-x/--linear-x", help="The other axis. Default: as the data ask for.", show_default=False),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Above the figure. Default: the ablation's title.")] = "",
    file_format: Annotated[
        Format | None,
        typer.Option("--format", help="Default: the suffix of --output, or else png.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: NAME-KIND.FORMAT, and for one figure as csv, standard output."),
    ] = None,
    show: Annotated[
        Show, typer.Option("--show", help="What the maps show.", rich_help_panel=MAPS_PANEL)
    ] = "position_attention",
    heads: Annotated[
        list[str],
        typer.Option(
            "--head",
            metavar="LAYER.HEAD",
            help="A head, counted from 0; repeatable. Default: the four whose gates separate the marked tokens best.",
            rich_help_panel=MAPS_PANEL,
        ),
    ] = [],
    mark: Annotated[
        str | None,
        typer.Option(
            "--mark",
            help="Marked tokens, drawn as plus signs: a name from the task or the text (`newline`, …).",
            show_default=False,
            rich_help_panel=MAPS_PANEL,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="A split of the run's task. Default: the first test set.",
            show_default=False,
            rich_help_panel=MAPS_PANEL,
        ),
    ] = None,
    position: Annotated[
        int, typer.Option("--sequence", min=0, help="Index of the sequence in its split.", rich_help_panel=MAPS_PANEL)
    ] = 0,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", help="A text, or `-` for standard input.", show_default=False, rich_help_panel=MAPS_PANEL
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A text file.", show_default=False, rich_help_panel=MAPS_PANEL)
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(
            "--first",
            min=1,
            help="Use only the first tokens of the sequence.",
            show_default=False,
            rich_help_panel=MAPS_PANEL,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="Of an ablation: the seed of the run.", show_default=False, rich_help_panel=MAPS_PANEL
        ),
    ] = None,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
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

    Example: `cope-sweep figure attention_maps --scale small --declared maps-2`

    Example: `cope-sweep figure quickstart --kind summary --format pdf`

    Example: `cope-sweep figure length_generalisation --kind contexts --scale small --format csv`

    Example: `cope-sweep figure quickstart --kind maps --row CoPE --show gates --mark data -o gates.png`
    """
    selected = any(
        [metrics, x, panels, rows, log is not None, log_x is not None, title, heads, mark, split, text, file]
    )
    if declared is not None or (kind is None and not (selected or first or seed is not None) and _is_ablation(name)):
        plan, store = load_plan(name, ablations, scale, sets), open_store(root, index)
        if declared is not None or plan.ablation.content.figures:
            _draw_declared(plan, store, declared, scale, file_format, output, as_json)
            return
    chosen = _kind(kind or "curves")
    target = _target(name, chosen, file_format, output)
    chosen_format = file_format or (_suffix_format(target) if target else "csv")
    if chosen.needs == "checkpoint":
        folder = _checkpoint(name, rows, seed, scale, sets, ablations, root, index)
        maps = MapOptions(show=show, heads=_pairs(heads) or 4, mark=mark, title=title)
        made = _map_figure(chosen, folder, maps, text=text, file=file, split=split, position=position, first=first)
    else:
        options = Options(tuple(metrics), tuple(rows), x, panels, band, log, log_x, title)
        made = _of_results(chosen, load_plan(name, ablations, scale, sets), open_store(root, index), options)
    written = _write(made, target, chosen_format, as_json)
    if as_json and written:
        print_json(written[0])


def _is_ablation(name: str) -> bool:
    from cope_sweep.store.artifacts import RUN_ID

    return not (RUN_ID.fullmatch(name) or Path(name).is_dir())


def _draw_declared(
    plan: Plan,
    store: Store,
    name: str | None,
    scale: str | None,
    file_format: Format | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Draw all declared figures of a plan, or the one with a name. Raises UserError."""
    from cope_sweep.config.explain import suggest
    from cope_sweep.figures.declared import declared_figures, draw_declared
    from cope_sweep.queries import recorded_plan

    known = {each.name: each for each in declared_figures(plan)}
    if name is not None and name not in known:
        raise UserError(f"--declared {name}: {plan.name} declares no such figure{suggest(name, known) or ', and none'}")
    chosen = list(known.values()) if name is None else [known[name]]
    if output is not None and len(chosen) > 1:
        raise UserError(
            f"--output is one file, and {plan.name} declares {', '.join(known)}; choose one with --declared"
        )
    plan = recorded_plan(plan, store)
    written = []
    for each in chosen:
        made = draw_declared(plan, store, each, scale=scale)
        if made.empty:
            raise UserError(_nothing(plan, store))
        target = output or Path(f"{plan.name}-{each.name}.{file_format or 'png'}")
        to_stdout = output is None and file_format == "csv" and len(chosen) == 1
        written += _write(made, None if to_stdout else target, file_format or _suffix_format(target), as_json)
    if as_json and written:
        print_json(written)


def _of_results(kind: FigureKind, plan: Plan, store: Store, options: Options) -> Figure:
    """A figure of a plan's results. Raises UserError where there is nothing to draw."""
    from cope_sweep.queries import recorded_plan

    made = kind.make(recorded_plan(plan, store), store, options)
    if made.empty:
        raise UserError(_nothing(plan, store))
    return made


def _nothing(plan: Plan, store: Store) -> str:
    return (
        f"nothing to draw: no run, or too few, of {plan.name} are finished in the store {store.location}; train them "
        f"with: cope-sweep run {plan.name}"
    )


def _kind(name: str) -> FigureKind:
    """The kind with this name. Raises UserError."""
    from cope_sweep.config.explain import suggest

    if name not in FIGURES:
        raise UserError(f"--kind {name}: there is no such figure{suggest(name, FIGURES)}")
    return FIGURES[name]


def _target(name: str, kind: FigureKind, file_format: Format | None, output: Path | None) -> Path | None:
    """The file to write; None: standard output."""
    if output is not None:
        return output
    if file_format == "csv":
        return None
    return Path(f"{Path(name).stem}-{kind.name}.{file_format or 'png'}")


def _suffix_format(path: Path) -> Format:
    from cope_sweep.figures.base import format_of

    return format_of(path)


def _pairs(heads: list[str]) -> tuple[tuple[int, int], ...]:
    """The pairs in `2.0`, `3.1`. Raises UserError."""
    pairs = []
    for each in heads:
        layer, dot, head = each.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise UserError(f"--head {each}: a head is LAYER.HEAD, counted from 0, as in --head 1.0")
        pairs.append((int(layer), int(head)))
    return tuple(pairs)


def _checkpoint(
    name: str,
    rows: list[str],
    seed: int | None,
    scale: str | None,
    sets: list[str],
    ablations: Path,
    root: str,
    index: str | None,
) -> Path:
    """The checkpoint of a run, of a folder, or of the first finished run of an ablation. Raises UserError."""
    from cope_sweep.store.artifacts import RUN_ID

    if RUN_ID.fullmatch(name) or Path(name).is_dir():
        return find_checkpoint(name, root)
    from cope_sweep.figures.runs import selected_rows

    plan, store = load_plan(name, ablations, scale, sets), open_store(root, index)
    runs = [run for row in selected_rows(plan, rows) for run in row.runs if seed is None or run.seed == seed]
    statuses = store.index.statuses(run.run_id for run in runs)
    for run in runs:
        if statuses.get(run.run_id) == "finished":
            return store.run(run.run_id).fetch_checkpoint()
    wanted = "".join([f" of {', '.join(rows)}" if rows else "", f" with seed {seed}" if seed is not None else ""])
    raise UserError(f"no run{wanted} of {plan.name} is finished in the store {store.location}; see `cope-sweep status`")


def _map_figure(
    kind: FigureKind,
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
    return kind.make(predictor, ids[:first], options)


def _write(made: Figure, target: Path | None, file_format: Format, quiet: bool) -> list[dict[str, str | int]]:
    """Write a figure; returns what the JSON answer says of each file."""
    content = made.render(file_format)
    if target is None:
        sys.stdout.write(content.decode())
        return []
    try:
        target.write_bytes(content)
    except OSError as error:
        raise UserError(f"{target}: {error.strerror or error}; name another file with --output") from error
    if not quiet:
        make_console().print(f"{escaped(target)}: {escaped(made.title)}", soft_wrap=True, highlight=False)
    return [{"file": str(target), "kind": made.kind, "format": file_format, "bytes": len(content)}]
