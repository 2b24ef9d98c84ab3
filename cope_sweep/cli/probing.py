"""Perplexity and probes of a checkpoint of this machine, for the commands of `cli.models`. It imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cope_sweep.cli.options import token_ids
from cope_sweep.config import RunSpec
from cope_sweep.errors import UserError
from cope_sweep.inference import Predictor, validate_token_ids
from cope_sweep.inference.probe import (
    HeadStatistics,
    head_statistics,
    loads_of_heads,
    probe,
    split_sequences,
    token_labels,
    token_marks,
)


def score_checkpoint(
    folder: Path, text_or_tokens: str | list[list[int]], context: int | None, stride: int | None
) -> dict[str, Any]:
    """The measures of a text or of token sequences under a checkpoint of this machine. Raises UserError."""
    predictor = Predictor.load(folder)
    context = predictor.window(context, stride, is_text=isinstance(text_or_tokens, str))
    if isinstance(text_or_tokens, str) and predictor.reads_text:
        measured = predictor.text_perplexity(text_or_tokens, context=context, stride=stride)
        return asdict(measured) | {"byte_perplexity": measured.byte_perplexity}
    if isinstance(text_or_tokens, str):
        text_or_tokens = [predictor.encode(text_or_tokens).tolist()]
    return asdict(predictor.perplexity(text_or_tokens, context=context, stride=stride))


def probe_checkpoint(
    folder: Path,
    *,
    tokens: list[int] | None,
    text: str | None,
    split: str | None,
    index: int,
    count: int,
    first: int | None,
    marks: list[str],
    seen_by: str | None,
    layers: list[int] | None,
    heads: list[int] | None,
    load: bool,
    out: Path | None,
    html: Path | None,
    svg: Path | None,
) -> tuple[str, dict[str, Any]]:
    """The names of a checkpoint's encodings, and the statistics of its heads as JSON; writes the files that are named.

    The arguments are the options of `probe`. Raises UserError.
    """
    predictor = Predictor.load(folder)
    run = predictor.run
    if tokens is None and text is None:
        ids_of_sequences = split_sequences(run.task, split, index, count)
    else:
        ids_of_sequences = [tokens if tokens is not None else predictor.encode(text or "").tolist()]
    sequences = [validate_token_ids(ids[:first], predictor.vocabulary_size) for ids in ids_of_sequences]
    known_marks = [(token_marks(predictor, tokens_T), tokens_T) for tokens_T in sequences]
    selected = [_select_marks(marks, *known) for known in known_marks]
    queries = None if seen_by is None else [_select_queries(seen_by, *known) for known in known_marks]
    statistics = head_statistics(predictor, sequences, selected, seen_by=queries, layers=layers, heads=heads)
    try:
        _write_files(predictor, sequences[0], selected[0], statistics, layers, heads, out=out, html=html, svg=svg)
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; choose another file", code="not_writable", file=str(error.filename)
        ) from error
    summary: dict[str, Any] = {
        "run_id": run.run_id,
        "sequences": len(sequences),
        "heads": [asdict(head) for head in statistics],
    }
    if load:
        found = loads_of_heads(predictor, sequences, layers, heads)
        summary["loads"] = [asdict(each) | {"load": each.load} for each in found]
    return _encoding_names(run), summary


def _select_marks(
    options: list[str], known_marks: dict[str, np.ndarray], tokens_T: np.ndarray
) -> dict[str, np.ndarray]:
    """The marks that `--mark` options select or define; without options, all known marks."""
    marks = {}
    for option in options:
        name, equals, ids = option.partition("=")
        marks[name] = np.isin(tokens_T, token_ids(ids)) if equals else _mark(name, known_marks)
    return marks or known_marks


def _mark(name: str, known_marks: Mapping[str, np.ndarray]) -> np.ndarray:
    """The mark with a name. Raises UserError."""
    if name not in known_marks:
        listed = ", ".join(known_marks) or "none"
        raise UserError(
            f"no mark {name!r}; the marks of these tokens are: {listed}; or define one: --mark {name}=3,4",
            code="unknown_mark",
            mark=name,
            allowed=list(known_marks),
        )
    return known_marks[name]


def _select_queries(seen_by: str, known_marks: dict[str, np.ndarray], tokens_T: np.ndarray) -> np.ndarray:
    """The queries that `--seen-by` selects: bool, shape (T,)."""
    if not seen_by.isdecimal():
        return _mark(seen_by, known_marks)
    if int(seen_by) >= len(tokens_T):
        raise UserError(
            f"--seen-by {seen_by}: the sequence has tokens 0 … {len(tokens_T) - 1}",
            code="invalid_option",
            option="--seen-by",
            value=seen_by,
            largest=len(tokens_T) - 1,
        )
    selected_T = np.zeros(len(tokens_T), dtype=bool)
    selected_T[int(seen_by)] = True
    return selected_T


def _encoding_names(run: RunSpec) -> str:
    return " + ".join(encoding.kind for encoding in run.model.position) or "no position encoding"


def _write_files(
    predictor: Predictor,
    tokens_T: np.ndarray,
    marks: dict[str, np.ndarray],
    statistics: list[HeadStatistics],
    layers: list[int] | None,
    heads: list[int] | None,
    *,
    out: Path | None,
    html: Path | None,
    svg: Path | None,
) -> None:
    """Write the matrices of one sequence to the files that are not None. Raises OSError."""
    if not (out or html or svg):
        return
    from cope_sweep.read.figures.heads import head_figures, page, picture  # matplotlib

    run = predictor.run
    matrices = probe(predictor, tokens_T, layers, heads)
    labels = token_labels(predictor, tokens_T)
    if html:
        title = f"Run {run.run_id}: {run.task.kind}, {_encoding_names(run)}"
        html.write_text(page(matrices, labels, marks, statistics, title=title), encoding="utf-8")
    if svg:
        svg.write_bytes(picture(head_figures(matrices, marks, statistics), labels, marks, "svg"))
    if out:
        arrays = matrices.arrays() | {f"marks/{name}": marked_T for name, marked_T in marks.items()}
        with out.open("wb") as stream:  # given a name, savez would append .npz to it
            np.savez_compressed(stream, allow_pickle=False, **arrays)
