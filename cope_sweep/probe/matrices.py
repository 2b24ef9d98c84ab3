"""Gates, positions and attention of a checkpoint, from the model's own forward pass, in numpy.

    g_ij, p_ij   of each contextual encoding, for j ≤ i (see positions/cope.py), positions before and after their limit
    s_ij         what an encoding adds to the attention logits
    alone_ij     softmax_j(Σ s_ij), each query's maximum scaled to 1: attention from position alone
    a_ij         softmax_j(q_i·k_j/√K + Σ s_ij): the attention itself

Where nothing is added to the logits there is no attention from position alone: RoPE's and absolute positions are inside
of q·k.

The forward pass is only watched: each layer hands over what its attention is computed from, and the encodings
themselves say the rest, a block of queries at a time. Nothing after the last layer that was asked for is computed.

Shapes: H chosen heads, T tokens, Q queries of a block, S keys up to its last; index [h, i, j] is of query i and key j,
and 0 where j > i.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cope_sweep.inference import Predictor, TokenIds, TokensError, checked
from cope_sweep.kernels import Inputs, Positions, attention_weights, observing, seen, visible
from cope_sweep.model import CheckpointError, check_reach
from cope_sweep.positions.cope import ContextualEncoding
from cope_sweep.spec import RunSpec

MAX_BYTES = 1 << 30
"""What the matrices of one call may take."""
SCRATCH_BYTES = 64 << 20
"""What a block of queries may take, about."""


class ProbeError(TokensError):
    """What a probe was asked for cannot be had; the message says why, and what can."""


@dataclass(frozen=True)
class Counted:
    """What one contextual encoding counts in a layer."""

    gates_HTT: np.ndarray
    """float32, 0 … 1."""
    positions_HTT: np.ndarray
    """float32, before any limit."""
    limit: int | None
    """Where positions stop, p_max − 1; None: nowhere."""

    @property
    def stopped_HTT(self) -> np.ndarray:  # noqa: N802
        """Positions as the encoding uses them, float32."""
        return self.positions_HTT if self.limit is None else np.minimum(self.positions_HTT, np.float32(self.limit))


@dataclass(frozen=True)
class LayerProbe:
    """One layer, some of its heads. Encodings go by their kind: a layer has no two of one."""

    layer: int
    heads: tuple[int, ...]
    counted: Mapping[str, Counted]
    """Of the contextual encodings."""
    scores_HTT: Mapping[str, np.ndarray]
    """Position logits, float32, of every encoding that adds any."""
    alone_HTT: np.ndarray | None
    """Attention from position alone, float32; None where no encoding adds to the logits."""
    attention_HTT: np.ndarray
    """float32; rows sum to 1."""


@dataclass(frozen=True)
class Probe:
    """What some layers do with one sequence."""

    tokens_T: np.ndarray
    layers: tuple[LayerProbe, ...]

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it by name, as `layer0/cope/gates`: what an .npz file holds."""
        named: dict[str, np.ndarray] = {"tokens": self.tokens_T}
        for each in self.layers:
            layer = f"layer{each.layer}"
            named[f"{layer}/heads"] = np.array(each.heads)
            for kind, counted in each.counted.items():
                named[f"{layer}/{kind}/gates"] = counted.gates_HTT
                named[f"{layer}/{kind}/positions"] = counted.positions_HTT
                named[f"{layer}/{kind}/stopped"] = counted.stopped_HTT
            for kind, scores_HTT in each.scores_HTT.items():
                named[f"{layer}/{kind}/scores"] = scores_HTT
            if each.alone_HTT is not None:
                named[f"{layer}/alone"] = each.alone_HTT
            named[f"{layer}/attention"] = each.attention_HTT
        return named


def probe(
    predictor: Predictor,
    token_ids: TokenIds,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Probe:
    """The matrices of the chosen layers and heads (None: all) for one sequence.

    Raises ProbeError for a layer or head that the model does not have, and for more than MAX_BYTES of matrices;
    TokensError for what is no token id of this model, and for a sequence longer than an encoding reaches;
    CheckpointError where the model's outputs are not numbers.
    """
    tokens_T = _tokens(predictor, token_ids)
    chosen = choose(predictor.run, layers, heads)
    _check_room(predictor.run, len(tokens_T), *chosen)
    found: list[LayerProbe] = []
    _watch(predictor, tokens_T, *chosen, found.append)
    return Probe(tokens_T, tuple(found))


def each_layer(
    predictor: Predictor,
    token_ids: TokenIds,
    on_layer: Callable[[LayerProbe], None],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> None:
    """As `probe`, handing over a layer at a time: no more than one is held. Raises as `probe`."""
    tokens_T = _tokens(predictor, token_ids)
    chosen_layers, chosen_heads = choose(predictor.run, layers, heads)
    for layer in chosen_layers:
        _check_room(predictor.run, len(tokens_T), (layer,), chosen_heads)
    _watch(predictor, tokens_T, chosen_layers, chosen_heads, on_layer)


def choose(
    run: RunSpec, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers and heads that are meant, in order; None: all. Raises ProbeError for one that there is not."""
    return _chosen(layers, run.model.layers, "layer"), _chosen(heads, run.model.heads, "head")


def matrices(run: RunSpec, layer: int) -> int:
    """How many matrices a head of this layer has."""
    serving = [encoding for encoding in run.model.position if encoding.serves(layer)]
    scoring = sum(encoding.scores for encoding in serving)
    return 2 * sum(isinstance(encoding, ContextualEncoding) for encoding in serving) + scoring + bool(scoring) + 1


def _chosen(asked: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    if asked is None:
        return tuple(range(count))
    for one in asked:
        if not 0 <= one < count:
            raise ProbeError(f"there is no {what} {one}: this model has {what}s 0 … {count - 1}")
    return tuple(sorted(set(asked)))


def _tokens(predictor: Predictor, token_ids: TokenIds) -> np.ndarray:
    tokens_T = checked(token_ids, predictor.vocabulary_size)
    if not len(tokens_T):
        raise TokensError("the sequence has no tokens; a probe takes one or more")
    try:
        check_reach(predictor.run, len(tokens_T))
    except ValueError as error:
        raise TokensError(f"the sequence of {len(tokens_T)} tokens is too long: {error}") from error
    return tokens_T


def _check_room(run: RunSpec, tokens: int, layers: tuple[int, ...], heads: tuple[int, ...]) -> None:
    size_bytes = 4 * tokens**2 * len(heads) * sum(matrices(run, layer) for layer in layers)
    if size_bytes > MAX_BYTES:
        raise ProbeError(
            f"the matrices of {tokens} tokens, {len(layers)} layers and {len(heads)} heads would take "
            f"{size_bytes / 2**30:.1f} GiB, and {MAX_BYTES / 2**30:.1f} is the most; "
            "choose fewer layers or heads, or a shorter sequence"
        )


class _SeenAllError(Exception):
    """Ends a forward pass of which no more is wanted."""


@torch.inference_mode()
def _watch(
    predictor: Predictor,
    tokens_T: np.ndarray,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    on_layer: Callable[[LayerProbe], None],
) -> None:
    """Run the model, and hand over each chosen layer as it is computed."""
    numbers = itertools.count()

    def observe(inputs: Inputs, positions: Positions) -> None:
        layer = next(numbers)  # attention is called once for each layer, in order
        if layer in layers:
            try:
                found = _layer(layer, heads, inputs, positions)
            except FloatingPointError as error:
                raise CheckpointError(
                    f"run {predictor.run.run_id}: what layer {layer} computes is not numbers; its weights are damaged"
                ) from error
            on_layer(found)
        if layer == max(layers, default=0):
            raise _SeenAllError

    device = predictor.model.embedding.weight.device
    with observing(observe), suppress(_SeenAllError):
        predictor.model(torch.from_numpy(tokens_T).to(device)[None])


def _layer(layer: int, heads: tuple[int, ...], inputs: Inputs, positions: Positions) -> LayerProbe:
    """Raises FloatingPointError where something is not a number."""
    _, all_heads, T, _ = inputs.q_BHTK.shape

    def matrix() -> np.ndarray:
        return np.zeros((len(heads), T, T), dtype=np.float32)

    counted = {
        p.encoding.kind: Counted(matrix(), matrix(), p.encoding.limit(p.parameters))
        for p in positions
        if isinstance(p.encoding, ContextualEncoding)
    }
    scores_HTT = {p.encoding.kind: matrix() for p in positions if p.encoding.scores}
    alone_HTT, attention_HTT = matrix() if scores_HTT else None, matrix()

    def keep(whole_HTT: np.ndarray, start: int, rows_BHQS: Tensor) -> None:
        if not rows_BHQS.isfinite().all():
            raise FloatingPointError
        rows_HQS = rows_BHQS.expand(1, all_heads, -1, -1)[0, list(heads)].float().cpu().numpy()
        whole_HTT[:, start : start + rows_HQS.shape[1], : rows_HQS.shape[2]] = rows_HQS

    rows = max(1, SCRATCH_BYTES // (40 * all_heads * T))  # about ten float32 copies of a row of the attention matrix
    for start in range(0, T, rows):
        block = _of_queries(inputs, start, min(start + rows, T))
        visible_QS = visible(block.q_BHTK.shape[2], block.k_BHSK.shape[2], block.q_BHTK.device)
        logits_BHQS = block.rotated_q_BHTK @ block.rotated_k_BHSK.mT / block.q_BHTK.shape[-1] ** 0.5
        total_BHQS = torch.zeros_like(logits_BHQS)
        for position, attention in zip(positions, seen(block, positions, logits_BHQS, visible_QS), strict=True):
            encoding = position.encoding
            if isinstance(encoding, ContextualEncoding):
                keep(counted[encoding.kind].gates_HTT, start, encoding.gates(attention))
                keep(counted[encoding.kind].positions_HTT, start, encoding.positions(attention))
            score_BHQS = encoding.score(position.parameters, attention)
            if score_BHQS is not None:
                keep(scores_HTT[encoding.kind], start, score_BHQS * visible_QS)
                total_BHQS = total_BHQS + score_BHQS
        if alone_HTT is not None:
            total_BHQS = total_BHQS.masked_fill(~visible_QS, -torch.inf)
            # A softmax divided by its maximum.
            keep(alone_HTT, start, (total_BHQS - total_BHQS.amax(-1, keepdim=True)).exp())
        keep(attention_HTT, start, attention_weights(block, positions, visible_QS))
    return LayerProbe(layer, heads, counted, scores_HTT, alone_HTT, attention_HTT)


def _of_queries(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The attention of queries `start` … `stop` − 1, which are the last of the keys up to there."""
    q_BHTK, k_BHSK = inputs.q_BHTK[:, :, start:stop], inputs.k_BHSK[:, :, :stop]
    return replace(
        inputs,
        q_BHTK=q_BHTK,
        k_BHSK=k_BHSK,
        v_BHSK=inputs.v_BHSK[:, :, :stop],
        # The same tensors where nothing was turned: that is how `Inputs` knows.
        rotated_q_BHTK=inputs.rotated_q_BHTK[:, :, start:stop] if inputs.rotated else q_BHTK,
        rotated_k_BHSK=inputs.rotated_k_BHSK[:, :, :stop] if inputs.rotated else k_BHSK,
        gate_k_BHSK=[each if each is None else each[:, :, :stop] for each in inputs.gate_k_BHSK],
    )
