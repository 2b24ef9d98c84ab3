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
    probe,
    split_sequences,
    token_labels,
    token_marks,
)


def score_checkpoint(
    folder: Path, given: str | list[list[int]], context: int | None, stride: int | None
) -> dict[str, Any]:
    """The measures of a text or of token sequences under a checkpoint of this machine. Raises UserError."""
    predictor = Predictor.load(folder)
    if isinstance(given, str) and predictor.reads_text:
        return asdict(predictor.text_perplexity(given, context=context, stride=stride))
    if isinstance(given, str):  # of labels
        given = [predictor.vocabulary.encode(given).tolist()]
    return asdict(predictor.perplexity(given, context=context, stride=stride))


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
    layers: list[int],
    heads: list[int],
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
        given = split_sequences(run.task, split, index, count)
    else:
        given = [tokens if tokens is not None else predictor.text_tokens(text or "").tolist()]
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
        raise UserError(
            f"{error.filename}: {error.strerror}; choose another file", code="not_writable", file=str(error.filename)
        ) from error
    found = {"run_id": run.run_id, "sequences": len(sequences), "heads": [asdict(head) for head in statistics]}
    return _encoding_names(run), found


def _select_marks(options: list[str], known: dict[str, np.ndarray], tokens_T: np.ndarray) -> dict[str, np.ndarray]:
    """The marks that `--mark` options select or define; without options, all known ones."""
    marks = {}
    for each in options:
        name, equals, ids = each.partition("=")
        marks[name] = np.isin(tokens_T, token_ids(ids)) if equals else _known_mark(name, known)
    return marks or known


def _known_mark(name: str, known: Mapping[str, np.ndarray]) -> np.ndarray:
    """The mark with a name. Raises UserError."""
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UserError(
            f"no mark {name!r}; the marks of these tokens are: {listed}; or define one: --mark {name}=3,4",
            code="unknown_mark",
            mark=name,
            allowed=list(known),
        )
    return known[name]


def _select_queries(seen_by: str, known: dict[str, np.ndarray], tokens_T: np.ndarray) -> np.ndarray:
    """The queries that `--seen-by` selects: bool, shape (T,)."""
    if not seen_by.isdecimal():
        return _known_mark(seen_by, known)
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
    from cope_sweep.read.figures.heads import head_figures, page, picture  # matplotlib

    run = predictor.run
    matrices = probe(predictor, tokens_T, layers or None, heads or None)
    labels = token_labels(run.task, tokens_T, predictor.tokenizer if predictor.reads_text else None)
    if html:
        title = f"Run {run.run_id}: {run.task.kind}, {_encoding_names(run)}"
        html.write_text(page(matrices, labels, marks, statistics, title=title), encoding="utf-8")
    if svg:
        svg.write_bytes(picture(head_figures(matrices, marks, statistics), labels, marks, "svg"))
    if out:
        arrays = matrices.arrays() | {f"marks/{name}": marked_T for name, marked_T in marks.items()}
        with out.open("wb") as stream:  # given a name, savez would append .npz to it
            np.savez_compressed(stream, allow_pickle=False, **arrays)
