"""The response to a probe request: matrices as JSON or as an image. This module imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from cope_services.http.errors import InvalidError, TooLargeError
from cope_sweep.api.requests import (
    MatrixName,
    ProbedEncoding,
    ProbedHead,
    ProbedLoad,
    ProbedMark,
    ProbeFormat,
    ProbeRequest,
    ProbeResponse,
    TriangularMatrix,
)
from cope_sweep.errors import ProbeError
from cope_sweep.inference import Predictor, validate_token_ids
from cope_sweep.inference.probe import (
    HeadStatistics,
    LayerProbe,
    Probe,
    TokenMarks,
    head_statistics,
    loads_of_heads,
    matrix_count,
    probe,
    select_heads,
    token_labels,
    token_marks,
)
from cope_sweep.model.load import HeadLoad

MAX_DRAWN_HEADS = 8
"""Maximum number of heads in an image: drawing takes about 10 MB per head."""
SYMBOLS: dict[MatrixName, str] = {
    "gates": "g",
    "positions": "p",
    "position_only_attention": "position only",
    "attention": "a",
}
"""Matrix → symbol of its heatmap."""


def probed_tokens(predictor: Predictor, request: ProbeRequest) -> np.ndarray:
    """The token ids of the request, int64, shape (T,). Raises TokensError, CheckpointError."""
    if request.text is None:
        return validate_token_ids(request.tokens or [], predictor.vocabulary_size)
    return predictor.encode(request.text)


@dataclass(frozen=True)
class ProbeResult:
    """The result of probing one sequence, before it is written as JSON or drawn."""

    predictor: Predictor
    probe: Probe
    statistics: list[HeadStatistics]
    marks: TokenMarks
    loads: list[HeadLoad]
    """Empty: the request does not ask for them."""

    @property
    def labels(self) -> list[str]:
        """The text of each token."""
        return token_labels(self.predictor, self.probe.tokens_T)


def probe_sequence(
    predictor: Predictor, request: ProbeRequest, tokens_T: np.ndarray, max_values: int, output_format: ProbeFormat
) -> ProbeResult:
    """Probe a model on the tokens of a request. Raises TooLargeError, InvalidError, ProbeError, CheckpointError."""
    run = predictor.run
    T = len(tokens_T)
    layers, heads = select_heads(run, request.layers, request.heads)
    # All matrices are computed, so matrices that the response leaves out count, too.
    values = sum(matrix_count(run, layer) for layer in layers) * len(heads) * T * (T + 1) // 2
    if values > max_values:
        raise TooLargeError(
            f"the matrices of {T} tokens, {len(layers)} layers and {len(heads)} heads have {values:,} values, but the "
            f"limit is {max_values:,}; choose fewer `layers` or `heads`, or send fewer tokens",
            values=values,
            limit=max_values,
        )
    if output_format != "json" and len(layers) * len(heads) > MAX_DRAWN_HEADS:
        raise TooLargeError(
            f"an image shows at most {MAX_DRAWN_HEADS} heads, not {len(layers) * len(heads)}; choose fewer `layers` "
            "or `heads`",
            heads=len(layers) * len(heads),
            limit=MAX_DRAWN_HEADS,
        )
    marks = token_marks(predictor, tokens_T) if request.marks is None else _request_marks(request.marks, T)
    statistics = head_statistics(predictor, [tokens_T], [marks], layers=layers, heads=heads)
    loads = loads_of_heads(predictor, [tokens_T], layers, heads) if request.load else []
    return ProbeResult(predictor, probe(predictor, tokens_T, layers, heads), statistics, marks, loads)


def probe_json(probed: ProbeResult, request: ProbeRequest) -> bytes:
    """A ProbeResponse as JSON."""
    answer = ProbeResponse(
        run_id=probed.predictor.run.run_id,
        token_ids=probed.probe.tokens_T.tolist(),
        labels=probed.labels,
        heads=[
            _probed_head(
                layer,
                row,
                [stats for stats in probed.statistics if (stats.layer, stats.head) == (layer.layer, head)],
                {load.encoding: load for load in probed.loads if (load.layer, load.head) == (layer.layer, head)},
                request,
            )
            for layer in probed.probe.layers
            for row, head in enumerate(layer.heads)
        ],
    )
    return answer.model_dump_json(exclude_unset=True).encode()


def probe_image(probed: ProbeResult, request: ProbeRequest, file_format: Literal["svg", "png"]) -> bytes:
    """One row of heatmaps per head. Raises ProbeError if the heads have none of the requested matrices."""
    from cope_sweep.read.figures.heads import head_figures, picture

    symbols = {SYMBOLS[name] for name in request.matrices if name in SYMBOLS}
    heads = [
        replace(head, heatmaps=tuple(heatmap for heatmap in head.heatmaps if heatmap.symbol in symbols))
        for head in head_figures(probed.probe, probed.marks, probed.statistics)
    ]
    drawn = [head for head in heads if head.heatmaps]
    if not drawn:
        raise ProbeError(
            f"nothing to draw: these heads have no {', '.join(request.matrices) or 'requested matrices'}; choose "
            "`matrices`: attention, or for encodings with position logits or gates "
            f"{', '.join(name for name in SYMBOLS if name != 'attention')}",
            code="no_such_map",
            matrices=list(request.matrices),
        )
    return picture(drawn, probed.labels, probed.marks, file_format)


def _request_marks(indices: dict[str, list[int]], tokens: int) -> TokenMarks:
    marks = {}
    for name, marked in indices.items():
        beyond = [index for index in marked if index >= tokens]
        if beyond:
            raise InvalidError(
                f"marks.{name}: there is no token {beyond[0]}; use indices from 0 to {tokens - 1}",
                code="no_such_token",
                marks=name,
                value=beyond[0],
                largest=tokens - 1,
            )
        marks[name] = np.isin(np.arange(tokens), marked)
    return marks


def _probed_head(
    layer: LayerProbe,
    row: int,
    statistics: list[HeadStatistics],
    loads: Mapping[str, HeadLoad],
    request: ProbeRequest,
) -> ProbedHead:
    requested = request.matrices
    by_encoding = {stats.encoding: stats for stats in statistics}
    encodings = []
    for kind in dict.fromkeys((*layer.contextual, *layer.scores_HTT)):
        fields: dict[str, object] = {"kind": kind}
        if kind in layer.contextual:
            head, matrices = by_encoding[kind], layer.contextual[kind]
            fields |= {"limit": head.limit, "clamped": head.clamped}
            fields |= {"position_mean": head.position_mean, "position_max": head.position_max}
            fields["marks"] = {name: ProbedMark(**asdict(mark)) for name, mark in head.marks.items()}
            if "gates" in requested:
                fields["gates"] = _lower_triangle(matrices.gates_HTT[row])
            if "positions" in requested:
                fields["positions"] = _lower_triangle(matrices.positions_HTT[row])
        if kind in loads:
            fields["load"] = ProbedLoad(**asdict(loads[kind]), load=loads[kind].load)
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
    # As float64, because a rounded float32 has many digits in JSON.
    rounded_TT = matrix_TT.astype(np.float64).round(6)
    return [row_T[: i + 1].tolist() for i, row_T in enumerate(rounded_TT)]
