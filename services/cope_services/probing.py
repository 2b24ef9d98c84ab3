"""The response to a probe request. This module imports torch."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from cope_services.errors import InvalidError, TooLargeError
from cope_services.schemas import (
    MatrixName,
    ProbedEncoding,
    ProbedHead,
    ProbedMark,
    ProbeRequest,
    ProbeResponse,
    TriangularMatrix,
)
from cope_sweep.inference import Predictor, validate_token_ids
from cope_sweep.probe import (
    HeadStatistics,
    LayerProbe,
    TokenMarks,
    head_statistics,
    matrix_count,
    probe,
    select_heads,
    token_labels,
    token_marks,
)


def probe_response(predictor: Predictor, request: ProbeRequest, max_values: int) -> ProbeResponse:
    """Probe one sequence. Raises TooLargeError, InvalidError, TokensError, ProbeError, CheckpointError."""
    run, tokenizer = predictor.run, predictor.tokenizer if predictor.reads_text else None
    tokens_T = validate_token_ids(request.tokens, predictor.vocabulary_size)
    T = len(tokens_T)
    layers, heads = select_heads(run, request.layers, request.heads)
    # All matrices are computed, so those that the response leaves out count, too.
    values = sum(matrix_count(run, layer) for layer in layers) * len(heads) * T * (T + 1) // 2
    if values > max_values:
        raise TooLargeError(
            f"the matrices of {T} tokens, {len(layers)} layers and {len(heads)} heads have {values:,} numbers; "
            f"the limit is {max_values:,}, so choose layers and heads, or send fewer tokens"
        )
    marks = token_marks(run.task, tokens_T, tokenizer) if request.marks is None else _request_marks(request.marks, T)
    statistics = head_statistics(predictor, [tokens_T], [marks], layers=layers, heads=heads)
    return ProbeResponse(
        run_id=run.run_id,
        labels=token_labels(run.task, tokens_T, tokenizer),
        heads=[
            _probed_head(
                layer, row, [each for each in statistics if (each.layer, each.head) == (layer.layer, head)], request
            )
            for layer in probe(predictor, tokens_T, layers, heads).layers
            for row, head in enumerate(layer.heads)
        ],
    )


def _request_marks(indices: dict[str, list[int]], tokens: int) -> TokenMarks:
    marks = {}
    for name, marked in indices.items():
        if beyond := [index for index in marked if index >= tokens]:
            raise InvalidError(f"marks.{name}: there is no token {beyond[0]}: the sequence has tokens 0 … {tokens - 1}")
        marks[name] = np.isin(np.arange(tokens), marked)
    return marks


def _probed_head(layer: LayerProbe, row: int, statistics: list[HeadStatistics], request: ProbeRequest) -> ProbedHead:
    requested = request.matrices
    by_encoding = {each.encoding: each for each in statistics}
    encodings = []
    for kind in dict.fromkeys((*layer.contextual, *layer.scores_HTT)):
        fields: dict[str, object] = {"kind": kind}
        if kind in layer.contextual:
            head, matrices = by_encoding[kind], layer.contextual[kind]
            fields |= {"limit": head.limit, "clamped": head.clamped}
            fields |= {"position_mean": head.position_mean, "position_max": head.position_max}
            fields["marks"] = {name: ProbedMark(**asdict(each)) for name, each in head.marks.items()}
            if "gates" in requested:
                fields["gates"] = _lower_triangle(matrices.gates_HTT[row])
            if "positions" in requested:
                fields["positions"] = _lower_triangle(matrices.positions_HTT[row])
        if "scores" in requested and kind in layer.scores_HTT:
            fields["scores"] = _lower_triangle(layer.scores_HTT[kind][row])
        encodings.append(ProbedEncoding.model_validate(fields))
    attentions: dict[MatrixName, TriangularMatrix | None] = {}
    if "position_only_attention" in requested:
        matrix_HTT = layer.position_only_attention_HTT
        attentions["position_only_attention"] = None if matrix_HTT is None else _lower_triangle(matrix_HTT[row])
    if "attention" in requested:
        attentions["attention"] = _lower_triangle(layer.attention_HTT[row])
    return ProbedHead(layer=layer.layer, head=layer.heads[row], encodings=encodings, **attentions)


def _lower_triangle(matrix_TT: np.ndarray) -> TriangularMatrix:
    rounded_TT = matrix_TT.astype(np.float64).round(6)
    return [row_T[: i + 1].tolist() for i, row_T in enumerate(rounded_TT)]
