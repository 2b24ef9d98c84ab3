"""A probe's answer. Imports torch: only for who asks."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from cope_services.errors import TooLargeError
from cope_services.schemas import ProbedEncoding, ProbedHead, ProbeRequest, ProbeResponse, Rows, Separation
from cope_sweep.inference import Predictor, checked
from cope_sweep.probe import Head, LayerProbe, Marks, ProbeError, choose, heads_of, labels_of, marks_of, probe
from cope_sweep.probe.matrices import matrices


def answer(predictor: Predictor, request: ProbeRequest, most_values: int) -> ProbeResponse:
    """What was asked for of one sequence. Raises TooLargeError, TokensError, ProbeError, CheckpointError."""
    run, tokenizer = predictor.run, predictor.tokenizer if predictor.reads_text else None
    tokens_T = checked(request.tokens, predictor.vocabulary_size)
    T = len(tokens_T)
    layers, heads = choose(run, request.layers, request.heads)
    # Of those that are not asked for the answer has none, but they are computed: they count as well.
    values = sum(matrices(run, layer) for layer in layers) * len(heads) * T * (T + 1) // 2
    if values > most_values:
        raise TooLargeError(
            f"the matrices of {T} tokens, {len(layers)} layers and {len(heads)} heads have {values:,} numbers; "
            f"{most_values:,} are the most, so choose layers and heads, or send fewer tokens"
        )
    marks = marks_of(run.task, tokens_T, tokenizer) if request.marks is None else _marks(request.marks, T)
    found = heads_of(predictor, [tokens_T], [marks], layers=layers, heads=heads)
    return ProbeResponse(
        run_id=run.run_id,
        labels=labels_of(run.task, tokens_T, tokenizer),
        heads=[
            _head(layer, row, [each for each in found if (each.layer, each.head) == (layer.layer, head)], request)
            for layer in probe(predictor, tokens_T, layers, heads).layers
            for row, head in enumerate(layer.heads)
        ],
    )


def _marks(places: dict[str, list[int]], tokens: int) -> Marks:
    marks = {}
    for name, marked in places.items():
        if beyond := [place for place in marked if place >= tokens]:
            raise ProbeError(f"marks.{name}: there is no token {beyond[0]}: the sequence has tokens 0 … {tokens - 1}")
        marks[name] = np.zeros(tokens, dtype=bool)
        marks[name][marked] = True
    return marks


def _head(layer: LayerProbe, row: int, found: list[Head], request: ProbeRequest) -> ProbedHead:
    wanted = request.matrices
    numbers = {head.encoding: head for head in found}
    encodings = []
    for kind in dict.fromkeys((*layer.counted, *layer.scores_HTT)):
        parts: dict[str, object] = {"kind": kind}
        if kind in layer.counted:
            head, counted = numbers[kind], layer.counted[kind]
            parts |= {"limit": head.limit, "clamped": head.clamped}
            parts |= {"position_mean": head.position_mean, "position_max": head.position_max}
            parts["marks"] = {name: Separation(**asdict(each)) for name, each in head.marks.items()}
            if "gates" in wanted:
                parts["gates"] = _rows(counted.gates_HTT[row])
            if "positions" in wanted:
                parts["positions"] = _rows(counted.positions_HTT[row])
        if "scores" in wanted and kind in layer.scores_HTT:
            parts["scores"] = _rows(layer.scores_HTT[kind][row])
        encodings.append(ProbedEncoding.model_validate(parts))
    attentions: dict[str, Rows | None] = {}
    if "alone" in wanted:
        attentions["alone"] = None if layer.alone_HTT is None else _rows(layer.alone_HTT[row])
    if "attention" in wanted:
        attentions["attention"] = _rows(layer.attention_HTT[row])
    return ProbedHead(layer=layer.layer, head=layer.heads[row], encodings=encodings, **attentions)


def _rows(matrix_TT: np.ndarray) -> Rows:
    rounded_TT = matrix_TT.astype(np.float64).round(6)
    return [row_T[: i + 1].tolist() for i, row_T in enumerate(rounded_TT)]
