"""`probe`: what a checkpoint's heads count, and where they look."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.cli.options import (
    STORE,
    CheckpointArg,
    Json,
    Store,
    escaped,
    find_checkpoint,
    grid,
    make_console,
    print_json,
    read_text,
    token_ids,
)
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from cope_sweep.inference import Predictor
    from cope_sweep.probe import Head
    from cope_sweep.spec import RunSpec


def probe(
    run_or_folder: CheckpointArg,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar='"ID ID …"', help="A sequence of token ids.", show_default=False)
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="A text; `-`: standard input.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A text file.", show_default=False)] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="A split of the run's task; none, and no tokens: its first test set."),
    ] = None,
    index: Annotated[int, typer.Option("--index", min=0, help="Which sequence of the split.")] = 0,
    count: Annotated[
        int, typer.Option("--count", min=1, help="Sequences from there on to take the table's means over.")
    ] = 1,
    first: Annotated[
        int | None, typer.Option("--first", min=1, help="Only so many tokens of each sequence.", show_default=False)
    ] = None,
    layers: Annotated[list[int], typer.Option("--layer", help="From 0; repeatable; none: all.")] = [],
    heads: Annotated[list[int], typer.Option("--head", help="From 0; repeatable; none: all.")] = [],
    marks: Annotated[
        list[str],
        typer.Option(
            "--mark",
            metavar="NAME[=ID,ID…]",
            help="What to compare gates with, of the tokens that the task or the text names, or token ids under a name "
            "of your own; repeatable; the first is drawn; none: all.",
            show_default=False,
        ),
    ] = [],
    seen_by: Annotated[
        str | None,
        typer.Option(
            "--seen-by",
            metavar="NAME|PLACE",
            help="Gates as these queries see them: tokens of this name, or the one at this place; none: all queries.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="An .npz file for the matrices.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="A page to draw them on.", show_default=False)] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="A drawing of them.", show_default=False)] = None,
    store: Store = STORE,
    as_json: Json = False,
) -> None:
    """What each head of a finished run's model counts: gates on marked tokens and elsewhere, positions, attention.

    A gate of key j as query i sees it says how much j counts. The table has each head's mean gate on the marked tokens
    and elsewhere, how well gates rank the former above the latter (AUC: 1 always, ½ by chance), their distance in
    standard deviations (Cohen's d), and the share of pairs whose position is beyond the last embedding.

    Files hold the matrices of the first sequence: gates, positions, attention from position alone (each query's maximum
    scaled to 1), attention.

    Example: `cope-sweep probe 95199d1142de555d --count 64 --seen-by marker`

    Example: `cope-sweep probe 95199d1142de555d --split sparse --layer 0 --mark data --html probe.html --out probe.npz`
    """
    folder = find_checkpoint(run_or_folder, store)  # before torch is imported, which takes seconds

    from cope_sweep import probe as probing
    from cope_sweep.inference import Predictor, checked

    predictor = Predictor.load(folder)
    run, tokenizer = predictor.run, predictor.tokenizer if predictor.reads_text else None
    if tokens is None and text is None and file is None:
        given = _of_split(run, split, index, count)
    elif split is None and (tokens, text, file).count(None) == 2:
        given = [token_ids(tokens) if tokens is not None else _read(text, file, predictor)]
    else:
        raise UserError("the sequence is named twice; give one of --tokens, --text, --file and --split")
    sequences = [checked(ids[:first], predictor.vocabulary_size) for ids in given]
    known = [probing.marks_of(run.task, tokens_T, tokenizer) for tokens_T in sequences]
    chosen = [_chosen(marks, *each) for each in zip(known, sequences, strict=True)]
    asked = None if seen_by is None else [_asked(seen_by, *each) for each in zip(known, sequences, strict=True)]
    found = probing.heads_of(predictor, sequences, chosen, seen_by=asked, layers=layers or None, heads=heads or None)
    try:
        if out or html or svg:
            matrices = probing.probe(predictor, sequences[0], layers or None, heads or None)
            labels = probing.labels_of(run.task, sequences[0], tokenizer)
            title = f"Run {run.run_id}: {run.task.kind}, {_encodings(run)}"
            if html:
                html.write_text(probing.page(matrices, labels, chosen[0], found, title=title), encoding="utf-8")
            if svg:
                svg.write_text(probing.svg(matrices, labels, chosen[0], found), encoding="utf-8")
            if out:
                _save(out, matrices.arrays() | {f"marks/{name}": on for name, on in chosen[0].items()})
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; name another file") from error
    if as_json:
        print_json({"run_id": run.run_id, "sequences": len(sequences), "heads": [asdict(head) for head in found]})
    elif found:
        _show(found)
    else:
        make_console().print(
            f"no gates: {_encodings(run)} counts every token alike; --html and --out have its attention"
        )


def _read(text: str | None, file: Path | None, predictor: Predictor) -> list[int]:
    """The ids of a text. It begins, as in training, with the token that ends the text before."""
    tokenizer = predictor.tokenizer
    return [tokenizer.end_of_text, *(int(token) for token in tokenizer.encode([read_text(text, file)])[0])]


def _of_split(run: RunSpec, split: str | None, index: int, count: int) -> list[list[int]]:
    """Sequences of a split, without their padding."""
    from cope_sweep.tasks import IGNORED

    try:
        batch = run.task.sequences(split or run.task.TESTS[0], 0, index, count)  # 0: the seed of all runs' test sets
    except ValueError as error:
        raise UserError(f"--split: {error}") from error
    if not len(batch):
        raise UserError(f"--index {index}: the split has no such sequence; choose a smaller one")
    ends_N = [(row_T != IGNORED).nonzero()[0][-1] + 1 for row_T in batch.targets_NT]
    return [row_T[:end].tolist() for row_T, end in zip(batch.inputs_NT, ends_N, strict=True)]


def _chosen(options: list[str], known: dict[str, np.ndarray], tokens_T: np.ndarray) -> dict[str, np.ndarray]:
    """The marks that are asked for; none asked: all that are known."""
    import numpy as np

    marks = {}
    for option in options:
        name, equals, ids = option.partition("=")
        marks[name] = np.isin(tokens_T, token_ids(ids)) if equals else _named(name, known)
    return marks or known


def _asked(seen_by: str, known: dict[str, np.ndarray], tokens_T: np.ndarray) -> np.ndarray:
    import numpy as np

    if not seen_by.isdecimal():
        return _named(seen_by, known)
    if int(seen_by) >= len(tokens_T):
        raise UserError(f"--seen-by {seen_by}: the sequence has places 0 … {len(tokens_T) - 1}")
    asked_T = np.zeros(len(tokens_T), dtype=bool)
    asked_T[int(seen_by)] = True
    return asked_T


def _named(name: str, known: dict[str, np.ndarray]) -> np.ndarray:
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UserError(
            f"no mark {name!r}; of these tokens are marked: {listed}; or name some, as in --mark {name}=3,4"
        )
    return known[name]


def _encodings(run: RunSpec) -> str:
    return " + ".join(encoding.kind for encoding in run.model.position) or "no position encoding"


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    import numpy as np

    with path.open("wb") as file:  # a name would get .npz behind it
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _show(heads: list[Head]) -> None:
    several = len({head.encoding for head in heads}) > 1
    words = ("layer", "head", *(["encoding"] if several else []), "mark")
    shown = grid(*words, "on", "else", "AUC", "d", "share", "beyond", "mean p", "max p")
    for column in shown.columns[len(words) :]:
        column.justify = "right"
    for head in heads:
        own = (str(head.layer), str(head.head), *([head.encoding] if several else []))
        beyond = "–" if head.clamped is None else f"{100 * head.clamped:.1f} %"
        reach = (beyond, f"{head.position_mean:.1f}", f"{head.position_max:.1f}")
        if not head.marks:
            shown.add_row(*own, *["–"] * 6, *reach)
        for number, (name, found) in enumerate(head.marks.items()):
            numbers = (found.on, found.off, found.auc, found.effect, found.share)
            cells = ("–" if each is None else f"{each:.2f}" for each in numbers)
            shown.add_row(*(own if not number else [""] * len(own)), escaped(name), *cells, *([] if number else reach))
    console = make_console()
    console.print(shown)
    console.print(
        "on, else: mean gate of marked tokens, and of all others; AUC: how well gates rank marked above others; "
        "d: Cohen's; share: of all that the head counts; beyond: pairs past the last embedding; p: positions before "
        "that limit",
        style="dim",
    )
