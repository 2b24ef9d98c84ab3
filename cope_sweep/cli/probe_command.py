"""The command `probe`: statistics and matrices of a checkpoint's heads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cope_sweep.cli.options import CheckpointArg, Json, find_checkpoint, read_text, token_ids
from cope_sweep.cli.output import escaped, grid, make_console, print_json, print_table
from cope_sweep.cli.source import Source, asks, option
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from cope_sweep.client import Client
    from cope_sweep.config import RunSpec
    from cope_sweep.inference import Predictor
    from cope_sweep.inference.probe import HeadStatistics

T = TypeVar("T")

# Functions import torch, numpy and matplotlib, because `cope-sweep --help` imports this module.


@asks(
    "cope_sweep.api.requests:ProbeRequest",
    local=["count", "seen_by", "out", "html", "svg"],
    without=["matrices", "index"],
    tokens=option(kind=str | None, metavar='"ID ID …"', help="A sequence of token ids."),
    text=option(kind=str | None, help="A text, or `-` for standard input."),
    layers=option("--layer", kind=list[int], help="A layer, from 0; repeatable. Default: all."),
    heads=option("--head", kind=list[int], help="A head, from 0; repeatable. Default: all."),
    marks=option(
        "--mark",
        kind=list[str],
        metavar="NAME[=ID,ID…]",
        help="Marked tokens to compare with the others: a name from the task or the text, or a new name with token "
        "ids; repeatable; the first one is drawn. Default: all names from the task and the text.",
    ),
)
def probe(
    *,
    run_or_folder: CheckpointArg,
    request: dict[str, Any],
    file: Annotated[Path | None, typer.Option("--file", help="A text file.", show_default=False)] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="A split of the run's task. Default: the first test set, if no tokens are given."),
    ] = None,
    index: Annotated[int, typer.Option("--index", min=0, help="Index of the first sequence of the split.")] = 0,
    count: Annotated[
        int, typer.Option("--count", min=1, help="Number of sequences of the split; the table pools their tokens.")
    ] = 1,
    first: Annotated[
        int | None,
        typer.Option("--first", min=1, help="Use only the first tokens of each sequence.", show_default=False),
    ] = None,
    seen_by: Annotated[
        str | None,
        typer.Option(
            "--seen-by",
            metavar="NAME|INDEX",
            help="Use only these queries: tokens with this mark, or the token with this index. Default: all queries.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the matrices to an .npz file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with heatmaps and values.", show_default=False)
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the heatmaps as SVG.", show_default=False)] = None,
    source: Source,
    as_json: Json = False,
) -> None:
    """Show what each head of a finished run's model counts: gates on marked tokens and elsewhere, positions, attention.

    The gate of key j for query i says how much j counts. The table shows, for each head, the mean gate on the marked
    tokens and on the others, how well the gates separate them (AUC: 1 is always, ½ is chance), the distance of the
    means in standard deviations (Cohen's d), and the share of pairs with a position beyond the last embedding.

    The files contain the matrices of the first sequence: gates, positions, position-only attention (the maximum of each
    query scaled to 1), attention.

    Example: `cope-sweep probe 95199d1142de555d --count 64 --seen-by marker`

    Example: `cope-sweep probe 95199d1142de555d --split sparse --layer 0 --mark data --html probe.html --out probe.npz`
    """
    run_or_folder = source.run_id(run_or_folder)
    tokens, text, layers, heads, marks = (request[name] for name in ("tokens", "text", "layers", "heads", "marks"))
    if (tokens, text, file, split).count(None) < 3:
        raise UserError("more than one source of tokens; give one of --tokens, --text, --file and --split")
    if source.client is not None:
        body: dict[str, Any] = {"layers": layers or None, "heads": heads or None, "matrices": []}
        if text is not None or file is not None:
            body["text"] = read_text(text, file)
        elif tokens is not None:
            body["tokens"] = token_ids(tokens)[:first]
        else:
            body["tokens"] = _test_sequence(source.client, run_or_folder, split, index)[:first]
        answer = _probed_by(source.client, run_or_folder, body, marks)
        _show(answer, as_json, "no gates: the model of this run has no contextual positions")
        return
    folder = find_checkpoint(run_or_folder, source.store)  # before the import of torch, which takes seconds

    from cope_sweep.inference import Predictor, validate_token_ids
    from cope_sweep.inference.probe import head_statistics, split_sequences, token_marks

    predictor = Predictor.load(folder)
    run = predictor.run
    if tokens is None and text is None and file is None:
        given = split_sequences(run.task, split, index, count)
    else:
        given = [token_ids(tokens) if tokens is not None else text_ids(text, file, predictor)]
    sequences = [validate_token_ids(ids[:first], predictor.vocabulary_size) for ids in given]
    tokenizer = predictor.tokenizer if predictor.reads_text else None
    known = [token_marks(run.task, tokens_T, tokenizer) for tokens_T in sequences]
    selected = [_select_marks(marks, *each) for each in zip(known, sequences, strict=True)]
    queries = (
        None if seen_by is None else [_select_queries(seen_by, *each) for each in zip(known, sequences, strict=True)]
    )
    statistics = head_statistics(
        predictor, sequences, selected, seen_by=queries, layers=layers or None, heads=heads or None
    )
    try:
        _write_files(predictor, sequences[0], selected[0], statistics, layers, heads, out=out, html=html, svg=svg)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; choose another file") from error
    found = {"run_id": run.run_id, "sequences": len(sequences), "heads": [asdict(head) for head in statistics]}
    _show(
        found,
        as_json,
        f"no gates: {_encoding_names(run)} has no contextual positions; --html and --out give the attention",
    )


def _test_sequence(client: Client, run_id: str, split: str | None, index: int) -> list[int]:
    """A sequence of a split of a run's task, which is made here."""
    from cope_sweep.config import RunSpec
    from cope_sweep.inference.probe import split_sequences

    return split_sequences(RunSpec.model_validate(client.run(run_id, curve=False).spec).task, split, index)[0]


def _probed_by(client: Client, run_id: str, body: dict[str, Any], marks: list[str]) -> dict[str, Any]:
    """The statistics of a service's probe. Raises UserError."""
    if defined := [each for each in marks if "=" in each]:
        raise UserError(f"--mark {defined[0]} needs the files of this machine; leave out --server")
    heads = []
    for head in client.probe(run_id, body).heads:
        for encoding in head.encodings:
            found = encoding.model_dump(include={"limit", "clamped", "position_mean", "position_max", "marks"})
            if encoding.position_mean is None:  # it has no gates
                continue
            if marks:
                found["marks"] = {name: _known_mark(name, found["marks"]) for name in marks}
            heads.append({"layer": head.layer, "head": head.head, "encoding": encoding.kind} | found)
    return {"run_id": run_id, "sequences": 1, "heads": heads}


def _show(found: dict[str, Any], as_json: bool, without_gates: str) -> None:
    if as_json:
        print_json(found)
    elif found["heads"]:
        _print_table(found["heads"])
    else:
        make_console().print(without_gates)


def text_ids(text: str | None, file: Path | None, predictor: Predictor) -> list[int]:
    """The token ids of a text, after the end-of-text token, as in training."""
    tokenizer = predictor.tokenizer
    return [tokenizer.end_of_text, *(int(token) for token in tokenizer.encode([read_text(text, file)])[0])]


def _select_marks(options: list[str], known: dict[str, np.ndarray], tokens_T: np.ndarray) -> dict[str, np.ndarray]:
    """The marks that `--mark` options select or define; without options, all known ones."""
    import numpy as np

    marks = {}
    for each in options:
        name, equals, ids = each.partition("=")
        marks[name] = np.isin(tokens_T, token_ids(ids)) if equals else _known_mark(name, known)
    return marks or known


def _select_queries(seen_by: str, known: dict[str, np.ndarray], tokens_T: np.ndarray) -> np.ndarray:
    """The queries that `--seen-by` selects: bool, shape (T,)."""
    import numpy as np

    if not seen_by.isdecimal():
        return _known_mark(seen_by, known)
    if int(seen_by) >= len(tokens_T):
        raise UserError(f"--seen-by {seen_by}: the sequence has tokens 0 … {len(tokens_T) - 1}")
    selected_T = np.zeros(len(tokens_T), dtype=bool)
    selected_T[int(seen_by)] = True
    return selected_T


def _known_mark(name: str, known: dict[str, T]) -> T:
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UserError(f"no mark {name!r}; the marks of these tokens are: {listed}; or define one: --mark {name}=3,4")
    return known[name]


def _encoding_names(run: RunSpec) -> str:
    return " + ".join(encoding.kind for encoding in run.model.position) or "no position encoding"


def _write_files(
    predictor: Predictor,
    tokens_T: np.ndarray,
    marks: dict[str, np.ndarray],
    statistics: list[HeadStatistics],
    layers: list[int],
    heads: list[int],
    *,
    out: Path | None,
    html: Path | None,
    svg: Path | None,
) -> None:
    """Write the matrices of one sequence to the files that are not None. Raises OSError."""
    if not (out or html or svg):
        return
    import numpy as np

    from cope_sweep.inference.probe import probe as compute_matrices
    from cope_sweep.inference.probe import token_labels

    run = predictor.run
    matrices = compute_matrices(predictor, tokens_T, layers or None, heads or None)
    labels = token_labels(run.task, tokens_T, predictor.tokenizer if predictor.reads_text else None)
    if html:
        from cope_sweep.read.figures.heads import page

        title = f"Run {run.run_id}: {run.task.kind}, {_encoding_names(run)}"
        html.write_text(page(matrices, labels, marks, statistics, title=title), encoding="utf-8")
    if svg:
        from cope_sweep.read.figures import heads as drawn_heads

        rows = drawn_heads.head_figures(matrices, marks, statistics)
        drawing = drawn_heads.svg(rows, labels, drawn_heads.first_mark(marks))
        svg.write_text(drawing, encoding="utf-8")
    if out:
        arrays = matrices.arrays() | {f"marks/{name}": marked_T for name, marked_T in marks.items()}
        with out.open("wb") as stream:  # given a name, savez would append .npz to it
            np.savez_compressed(stream, allow_pickle=False, **arrays)


def _print_table(statistics: list[dict[str, Any]]) -> None:
    several = len({head["encoding"] for head in statistics}) > 1
    names = ("layer", "head", *(["encoding"] if several else []), "mark")
    table = grid(*names, "on", "else", "AUC", "d", "share", "beyond", "mean p", "max p")
    for column in table.columns[len(names) :]:
        column.justify = "right"
    for head in statistics:
        identity = (str(head["layer"]), str(head["head"]), *([head["encoding"]] if several else []))
        beyond = "–" if head["clamped"] is None else f"{100 * head['clamped']:.1f} %"
        positions = (beyond, f"{head['position_mean']:.1f}", f"{head['position_max']:.1f}")
        if not head["marks"]:
            table.add_row(*identity, *["–"] * 6, *positions)
        for number, (name, found) in enumerate(head["marks"].items()):
            numbers = (found[each] for each in ("on", "off", "auc", "effect", "share"))
            cells = ("–" if each is None else f"{each:.2f}" for each in numbers)
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
