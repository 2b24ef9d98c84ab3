"""The commands that take a trained model: `perplexity`, `export`, `probe`. They import torch and more on use."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cope_sweep.api.question import Scale, Sets
from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationsDir,
    CheckpointArg,
    FileOpt,
    IndexOpt,
    JsonOpt,
    StoreOpt,
    check_effect,
    check_one_source,
    read_text_options,
    token_ids,
)
from cope_sweep.cli.output import escaped, grid, make_console, print_json, print_table
from cope_sweep.errors import UserError
from cope_sweep.read.numbers import MISSING, fixed

if TYPE_CHECKING:
    from cope_sweep.read.queries import Queries

of_windows = partial(typer.Option, min=1, max=1 << 31, show_default=False)
"""An option for the windows in which a text is scored."""

# -- perplexity --------------------------------------------------------------------------------------------------------


def perplexity(
    run_or_folder: CheckpointArg,
    tokens: Annotated[
        list[str],
        typer.Option(
            "--tokens", metavar='"ID ID …"', help="A sequence of token ids. May be repeated.", show_default=False
        ),
    ] = [],
    text: Annotated[str | None, typer.Option(help="A text; `-` reads standard input.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help="A text file; or, if it ends in .json or is `-` (standard input), a JSON list of lists of token ids.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        of_windows(help="Tokens in a window. Default: as in training."),
    ] = None,
    stride: Annotated[
        int | None,
        of_windows(help="Tokens from the start of one window to the next, 1 … context. Default: disjoint windows."),
    ] = None,
    scale: Scale = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Print the perplexity of token sequences or of a text under a finished run's model.

    Each token is scored given the tokens before it. If the model's task is not text, write the labels of its tokens,
    separated by spaces. Such a model is scored on what its task trains, the answers, so the sequence must contain them.

    Example: `cope-sweep perplexity 95199d1142de555d --text "_ 3 _ 7 > 3 7"`

    Example: `cope-sweep perplexity 0b1c2d3e4f506172 --file notes.txt --stride 128`

    Example: `cope-sweep perplexity quickstart/CoPE --text "_ 3 _ 7 > 3 7"`
    """
    is_text = text is not None or (file is not None and str(file) != "-" and file.suffix != ".json")
    if is_text:
        check_one_source(text=text, file=file, tokens=tokens)
    elif (context, stride) != (None, None):
        raise UserError(
            "--context and --stride need a text: give --text, or --file notes.txt",
            code="missing_option",
            option="--text",
        )
    from cope_sweep.cli.files import open_queries

    text_or_tokens = read_text_options(text, file) if is_text else _sequences(tokens, file)
    # Before the import of torch, which takes seconds.
    folder = _checkpoint(run_or_folder, open_queries(store, index, ablations), scale, sets)
    from cope_sweep.cli.probing import score_checkpoint
    from cope_sweep.read.tables.stats import finite

    values = score_checkpoint(folder, text_or_tokens, context, stride)
    if as_json:
        print_json({name: finite(value) for name, value in values.items()})
        return
    if "words" in values:
        line = (
            f"perplexity {fixed(values['perplexity'], 4)} per token, {fixed(values['word_perplexity'], 4)} per word, "
            f"{fixed(values['bits_per_byte'], 4)} bits per byte, over {values['tokens']} tokens, "
            f"{values['words']} words, {values['size_bytes']} bytes"
        )
    else:
        line = (
            f"perplexity {fixed(values['perplexity'], 4)} over the {values['tokens']} of {values['positions']} tokens "
            f"that the task trains ({fixed(values['bits_per_token'], 4)} bits per token)"
        )
    make_console().print(line, soft_wrap=True)


# -- export -----------------------------------------------------------------------------------------------------------


def export(
    run_or_folder: CheckpointArg,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write: a new one, or an empty one.")],
    form: Annotated[
        Literal["hf"], typer.Option("--format", help="hf: a model of Hugging Face transformers.", show_default=True)
    ] = "hf",
    scale: Scale = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Write a finished run's model for other programs: its weights (safetensors), its configuration, its tokenizer.

    After `import cope_sweep.hf`, `AutoModelForCausalLM.from_pretrained` of Hugging Face transformers loads the folder.
    It needs the extra `hf`: in a checkout, `pip install -e '.[hf]'`. The model reads tokens as they are. Tasks that
    hide their answers from the inputs (selective copy, counting, MQAR, …) need the task's inputs, and `generate` does
    not make them.

    Example: `cope-sweep export wikitext/CoPE --scale small --format hf --output model`
    """
    from cope_sweep.cli.files import open_queries

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"{output} exists; name a new folder, or empty this one", code="output_exists", file=str(output)
        )
    # Before the import of torch, which takes seconds.
    folder = _checkpoint(run_or_folder, open_queries(store, index, ablations), scale, sets)
    try:
        from cope_sweep.hf import export as export_model
    except ModuleNotFoundError as error:
        raise UserError(str(error), code="missing_package", package=error.name, format=form) from error
    export_model(folder, output)
    if as_json:
        print_json({"format": form, "output": str(output), "files": sorted(path.name for path in output.iterdir())})
        return
    make_console().print(f"wrote {escaped(str(output))}", soft_wrap=True)


def _checkpoint(named: str, queries: Queries, scale: str | None, sets: Sequence[str]) -> Path:
    """The checkpoint of a run (named by id, first digits or row), or the folder that was named.

    Raises UserError.
    """
    from cope_sweep.cli.files import find_checkpoint, find_one_run
    from cope_sweep.read.queries import check_no_values

    if Path(named).exists():
        check_no_values(scale, sets, "leave it out beside a folder")
        return Path(named)
    return find_checkpoint(queries.store, find_one_run(queries, named, scale, sets))


def _sequences(tokens: Sequence[str], file: Path | None) -> list[list[int]]:
    """The token sequences of `--tokens` and `--file`. Raises UserError."""
    sequences = [token_ids(text) for text in tokens]
    if file is not None:
        try:
            sequences += json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{file}: not a JSON list of lists of token ids ({error})", code="invalid_json", file=str(file)
            ) from error
    if not sequences:
        raise UserError(
            'nothing to score; give --tokens "3 14 14 7", --file ids.json, --text "…" or --file notes.txt',
            code="no_sequence",
        )
    return sequences


# -- probe ------------------------------------------------------------------------------------------------------------


def probe(
    run_or_folder: CheckpointArg,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar='"ID ID …"', help="A sequence of token ids.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="A text, or `-` for standard input.")] = None,
    layers: Annotated[
        list[int], typer.Option("--layer", help="A layer, counted from 0. May be repeated. Default: all.")
    ] = [],
    heads: Annotated[
        list[int], typer.Option("--head", help="A head, counted from 0. May be repeated. Default: all.")
    ] = [],
    marks: Annotated[
        list[str],
        typer.Option(
            "--mark",
            metavar="NAME[=ID,ID…]",
            help="Marked tokens to compare with the others: a name from the task or the text, or a new name with token "
            "ids. May be repeated; the first one is drawn. Default: all names from the task and the text.",
        ),
    ] = [],
    file: FileOpt = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="A split of the run's task. Default: the first test set, if no tokens are given."),
    ] = None,
    first_sequence: Annotated[
        int | None, typer.Option("--sequence", min=0, help="Index of the first sequence of the split. Default: 0.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, help="Number of sequences of the split; the table pools their tokens. Default: 1."
        ),
    ] = None,
    first: Annotated[
        int | None, typer.Option("--first", min=1, help="Use only the first tokens of each sequence.")
    ] = None,
    seen_by: Annotated[
        str | None,
        typer.Option(
            "--seen-by",
            metavar="NAME|INDEX",
            help="Use only these queries: tokens with this mark, or the token with this index. Default: all queries.",
        ),
    ] = None,
    load: Annotated[
        bool,
        typer.Option("--load", help="Show what the position logits of each encoding do, and how far its gates count."),
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the matrices to an .npz file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write an HTML page with heatmaps and values.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the heatmaps as SVG.")] = None,
    scale: Scale = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    as_json: JsonOpt = False,
) -> None:
    """Show what each head of a finished run's model counts: gates on marked tokens and elsewhere, positions, attention.

    The gate of key j for query i says how much j counts. The table shows, for each head, the mean gate on the marked
    tokens and on the others, how well the gates separate them (AUC: 1 is always, ½ is chance), the distance of the
    means in standard deviations (Cohen's d), and the share of pairs with a position beyond the last embedding.

    With --load, the table shows for each head what an encoding's logits do instead: their mean size, the
    mean size of q·k/√K, and the ratio, which is near 0 if the encoding does nothing; the share of keys beyond the
    last embedding; the share of attention's entropy that the encoding's logits alone explain; and the largest position
    in rows of several lengths, which grows linearly with the row if all gates are alike. 16 rows of each sequence are
    measured, evenly spaced.

    The files contain the matrices of the first sequence: gates, positions, position-only attention (the maximum of each
    query scaled to 1), attention.

    Example: `cope-sweep probe 95199d1142de555d --count 64 --seen-by marker`

    Example: `cope-sweep probe quickstart/CoPE --text "_ 3 _ 7 > 3 7"`

    Example: `cope-sweep probe quickstart/CoPE --load --count 8`

    Example: `cope-sweep probe 95199d1142de555d --split sparse --layer 0 --mark data --html probe.html -o probe.npz`
    """
    check_one_source(tokens=tokens, text=text, file=file, split=split)
    if (tokens, text, file) != (None, None, None):
        check_effect(
            {"sequence": first_sequence, "count": count},
            "chooses sequences of a split; leave it out beside --tokens, --text or --file",
        )
    if load and not (as_json or html or svg):
        shown_marks = marks if output is None else None  # the file has them
        check_effect({"seen-by": seen_by, "mark": shown_marks}, "has no effect on the table of --load; leave it out")
    from cope_sweep.cli.files import open_queries

    ids = None if tokens is None else token_ids(tokens)
    typed = None if text is None and file is None else read_text_options(text, file)
    # Before the import of torch, which takes seconds.
    folder = _checkpoint(run_or_folder, open_queries(store, None, ablations), scale, sets)
    from cope_sweep.cli.probing import probe_checkpoint

    encodings, statistics = probe_checkpoint(
        folder, tokens=ids, text=typed, split=split, index=first_sequence or 0, count=count or 1, first=first,
        marks=marks, seen_by=seen_by, layers=layers or None, heads=heads or None, load=load, out=output, html=html,
        svg=svg,
    )  # fmt: skip
    if as_json:
        print_json(statistics)
    elif load:
        _print_loads(statistics["loads"], encodings)
    elif statistics["heads"]:
        _print_table(statistics["heads"])
    else:
        make_console().print(
            f"no gates: {encodings} has no contextual positions; --html and --output write the attention"
        )


def _print_loads(loads: list[dict[str, Any]], encodings: str) -> None:
    if not loads:
        make_console().print(f"no position logits: {encodings} adds nothing to the logits of attention")
        return
    several = len({load["encoding"] for load in loads}) > 1
    names = ("layer", "head", *(["encoding"] if several else []))
    table = grid(*names, "position", "content", "ratio", "beyond", "explained", "span at tokens")
    for column in table.columns[len(names) : -1]:
        column.justify = "right"
    for load in loads:
        spans = load["spans"]
        # About four of them fit into a line.
        shown = [spans[n] for n in sorted({len(spans) * k // 4 - 1 for k in range(1, 5)} - {-1})]
        table.add_row(
            str(load["layer"]),
            str(load["head"]),
            *([load["encoding"]] if several else []),
            fixed(load["position"], 3),
            fixed(load["content"], 3),
            *(
                MISSING if load[share] is None else f"{fixed(100 * load[share], 1)} %"
                for share in ("load", "beyond", "explained")
            ),
            ", ".join(f"{fixed(span, 1)} at {tokens}" for tokens, span in shown) or MISSING,
        )
    print_table(table)
    make_console().print(
        "position, content: mean size of the logits; beyond: keys beyond the last embedding; explained: share of "
        "attention's entropy that position logits alone explain; span: the largest position of a row",
        style="dim",
    )


def _print_table(statistics: list[dict[str, Any]]) -> None:
    several = len({head["encoding"] for head in statistics}) > 1
    names = ("layer", "head", *(["encoding"] if several else []), "mark")
    table = grid(*names, "on", "else", "AUC", "d", "share", "beyond", "mean p", "max p")
    for column in table.columns[len(names) :]:
        column.justify = "right"
    for head in statistics:
        identity = (str(head["layer"]), str(head["head"]), *([head["encoding"]] if several else []))
        beyond = MISSING if head["clamped"] is None else f"{fixed(100 * head['clamped'], 1)} %"
        positions = (beyond, fixed(head["position_mean"], 1), fixed(head["position_max"], 1))
        if not head["marks"]:
            table.add_row(*identity, *[MISSING] * 6, *positions)
        for number, (name, on_mark) in enumerate(head["marks"].items()):
            cells = (fixed(on_mark[measure], 2) for measure in ("on", "off", "auc", "effect", "share"))
            is_first = number == 0
            table.add_row(
                *(identity if is_first else [""] * len(identity)),
                escaped(name),
                *cells,
                *(positions if is_first else ()),
            )
    print_table(table)
    make_console().print(
        "on, else: mean gate on the marked tokens and on the others; AUC: how well the gates separate them; d: Cohen's "
        "d; share: the marked tokens' share of the sum of gates; beyond: pairs beyond the last embedding; p: positions "
        "before that limit",
        style="dim",
    )
