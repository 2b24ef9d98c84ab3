"""Gates, positions and attention of a checkpoint, from the model's own forward pass, as numpy arrays.

    g_ij, p_ij   gates and positions of each contextual encoding, for j ≤ i (see positions/cope.py); positions are given
                 before and after the limit of the encoding
    s_ij         position logits: what an encoding adds to the attention logits
    position-only attention
                 softmax_j(Σ s_ij), scaled so that the maximum of each query is 1
    a_ij         softmax_j(q_i·k_j/√K + Σ s_ij): the attention of the model

Position-only attention does not exist for a model without position logits: RoPE and absolute positions change q·k
itself.

An observer in the attention function receives the inputs of each layer's attention. The encodings compute gates,
positions and logits from them, for one block of queries at a time. The layers after the last selected one are not
computed.

Shapes: H selected heads, T tokens, Q queries of a block, S keys up to the last query of the block. Index [h, i, j] is
query i and key j, and the value is 0 where j > i.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.inference import Predictor, TokenIds, TokensError, validate_token_ids
from cope_sweep.kernels import Inputs, Positions, attention_weights, observing, seen, visible
from cope_sweep.model import CheckpointError, check_reach
from cope_sweep.positions.cope import ContextualEncoding

MAX_BYTES = 1 << 30
"""Memory limit for the matrices of one call."""
SCRATCH_BYTES = 64 << 20
"""Approximate memory for one block of queries."""


class ProbeError(TokensError):
    """A probe request that cannot be answered. The message has the reason and the possible values."""


@dataclass(frozen=True)
class ContextualMatrices:
    """Gates and positions of one contextual encoding in one layer."""

    gates_HTT: np.ndarray
    """float32, 0 … 1."""
    positions_HTT: np.ndarray
    """float32, before the limit."""
    limit: int | None
    """Largest position that the encoding distinguishes, p_max − 1; None: no limit."""

    @property
    def clamped_positions_HTT(self) -> np.ndarray:  # noqa: N802
        """float32: min(position, limit), as the encoding uses it."""
        return self.positions_HTT if self.limit is None else np.minimum(self.positions_HTT, np.float32(self.limit))


@dataclass(frozen=True)
class LayerProbe:
    """Matrices of the selected heads of one layer. Keys are kinds of encodings: each kind occurs once in a layer."""

    layer: int
    heads: tuple[int, ...]
    contextual: Mapping[str, ContextualMatrices]
    """Names of the contextual encodings."""
    scores_HTT: Mapping[str, np.ndarray]
    """Position logits, float32, of every encoding that has them."""
    position_only_attention_HTT: np.ndarray | None
    """float32; None where no encoding has position logits."""
    attention_HTT: np.ndarray
    """float32; each row sums to 1, unless an encoding replaces the softmax."""


@dataclass(frozen=True)
class Probe:
    """Matrices of the selected layers and heads for one sequence."""

    tokens_T: np.ndarray
    layers: tuple[LayerProbe, ...]

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, for example `layer0/cope/gates`: the content of an .npz file.

        `stopped` are the positions after the limit.
        """
        named: dict[str, np.ndarray] = {"tokens": self.tokens_T}
        for each in self.layers:
            layer = f"layer{each.layer}"
            named[f"{layer}/heads"] = np.array(each.heads)
            for kind, matrices in each.contextual.items():
                named[f"{layer}/{kind}/gates"] = matrices.gates_HTT
                named[f"{layer}/{kind}/positions"] = matrices.positions_HTT
                named[f"{layer}/{kind}/stopped"] = matrices.clamped_positions_HTT
            for kind, scores_HTT in each.scores_HTT.items():
                named[f"{layer}/{kind}/scores"] = scores_HTT
            if each.position_only_attention_HTT is not None:
                named[f"{layer}/position_only_attention"] = each.position_only_attention_HTT
            named[f"{layer}/attention"] = each.attention_HTT
        return named


def probe(
    predictor: Predictor,
    token_ids: TokenIds,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Probe:
    """The matrices of the selected layers and heads (None: all) for one sequence.

    Raises:
        ProbeError: The model has no such layer or head, or the matrices take more than MAX_BYTES.
        TokensError: An entry is no token id of this model, or the sequence is longer than an encoding supports.
        CheckpointError: The model computes values that are not finite.
    """
    tokens_T = _validated_tokens(predictor, token_ids)
    selected = select_heads(predictor.run, layers, heads)
    _check_memory(predictor.run, len(tokens_T), *selected)
    found: list[LayerProbe] = []
    _observe_layers(predictor, tokens_T, *selected, found.append)
    return Probe(tokens_T, tuple(found))


def probe_layers(
    predictor: Predictor,
    token_ids: TokenIds,
    on_layer: Callable[[LayerProbe], None],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> None:
    """Probe, and call `on_layer` for each layer: only one layer is in memory at a time. Raises as `probe`."""
    tokens_T = _validated_tokens(predictor, token_ids)
    selected_layers, selected_heads = select_heads(predictor.run, layers, heads)
    for layer in selected_layers:
        _check_memory(predictor.run, len(tokens_T), (layer,), selected_heads)
    _observe_layers(predictor, tokens_T, selected_layers, selected_heads, on_layer)


def select_heads(
    run: RunSpec, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The selected layers and heads, sorted; None: all. Raises ProbeError for one that the model does not have."""
    return _selected(layers, run.model.layers, "layer"), _selected(heads, run.model.heads, "head")


def matrix_count(run: RunSpec, layer: int) -> int:
    """The number of matrices that a probe computes for each head of this layer."""
    serving = [encoding for encoding in run.model.position if encoding.serves(layer)]
    scoring = sum(encoding.scores for encoding in serving)
    return 2 * sum(isinstance(encoding, ContextualEncoding) for encoding in serving) + scoring + bool(scoring) + 1


def _selected(numbers: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    if numbers is None:
        return tuple(range(count))
    for number in numbers:
        if not 0 <= number < count:
            raise ProbeError(f"there is no {what} {number}: this model has {what}s 0 … {count - 1}")
    return tuple(sorted(set(numbers)))


def _validated_tokens(predictor: Predictor, token_ids: TokenIds) -> np.ndarray:
    tokens_T = validate_token_ids(token_ids, predictor.vocabulary_size)
    if not len(tokens_T):
        raise TokensError("the sequence has no tokens; give at least one")
    try:
        check_reach(predictor.run, len(tokens_T))
    except ValueError as error:
        raise TokensError(f"the sequence of {len(tokens_T)} tokens is too long: {error}") from error
    return tokens_T


def _check_memory(run: RunSpec, tokens: int, layers: tuple[int, ...], heads: tuple[int, ...]) -> None:
    size_bytes = 4 * tokens**2 * len(heads) * sum(matrix_count(run, layer) for layer in layers)
    if size_bytes > MAX_BYTES:
        raise ProbeError(
            f"the matrices of {tokens} tokens, {len(layers)} layers and {len(heads)} heads would take "
            f"{size_bytes / 2**30:.1f} GiB; the limit is {MAX_BYTES / 2**30:.1f} GiB; "
            "choose fewer layers or heads, or a shorter sequence"
        )


class _LastLayerDoneError(Exception):
    """Ends the forward pass after the last selected layer."""


@torch.inference_mode()
def _observe_layers(
    predictor: Predictor,
    tokens_T: np.ndarray,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    on_layer: Callable[[LayerProbe], None],
) -> None:
    """Run the model and call `on_layer` with the matrices of each selected layer."""
    layer_numbers = itertools.count()

    def observe(inputs: Inputs, positions: Positions) -> None:
        layer = next(layer_numbers)  # the model calls attention once per layer, in order
        if layer in layers:
            try:
                found = _layer_probe(layer, heads, inputs, positions)
            except FloatingPointError as error:
                raise CheckpointError(
                    f"run {predictor.run.run_id}: layer {layer} computes values that are not finite; "
                    "the weights are damaged"
                ) from error
            on_layer(found)
        if layer == max(layers, default=0):
            raise _LastLayerDoneError

    device = predictor.model.embedding.weight.device
    with observing(observe), suppress(_LastLayerDoneError):
        predictor.model(torch.from_numpy(tokens_T).to(device)[None])


def _layer_probe(layer: int, heads: tuple[int, ...], inputs: Inputs, positions: Positions) -> LayerProbe:
    """The matrices of one layer. Raises FloatingPointError where a value is not finite."""
    _, all_heads, T, _ = inputs.q_BHTK.shape

    def zeros() -> np.ndarray:
        return np.zeros((len(heads), T, T), dtype=np.float32)

    contextual = {
        p.encoding.kind: ContextualMatrices(zeros(), zeros(), p.encoding.limit(p.parameters))
        for p in positions
        if isinstance(p.encoding, ContextualEncoding)
    }
    scores_HTT = {p.encoding.kind: zeros() for p in positions if p.encoding.scores}
    position_only_HTT, attention_HTT = zeros() if scores_HTT else None, zeros()

    def store(target_HTT: np.ndarray, start: int, rows_BHQS: Tensor) -> None:
        if not rows_BHQS.isfinite().all():
            raise FloatingPointError
        rows_HQS = rows_BHQS.expand(1, all_heads, -1, -1)[0, list(heads)].float().cpu().numpy()
        target_HTT[:, start : start + rows_HQS.shape[1], : rows_HQS.shape[2]] = rows_HQS

    rows = max(1, SCRATCH_BYTES // (40 * all_heads * T))  # about ten float32 copies of a row of the attention matrix
    for start in range(0, T, rows):
        block = _query_block(inputs, start, min(start + rows, T))
        visible_QS = visible(block.q_BHTK.shape[2], block.k_BHSK.shape[2], block.q_BHTK.device)
        logits_BHQS = block.rotated_q_BHTK @ block.rotated_k_BHSK.mT / block.q_BHTK.shape[-1] ** 0.5
        total_BHQS = torch.zeros_like(logits_BHQS)
        for position, attention in zip(positions, seen(block, positions, logits_BHQS, visible_QS), strict=True):
            encoding = position.encoding
            if isinstance(encoding, ContextualEncoding):
                store(contextual[encoding.kind].gates_HTT, start, encoding.gates(attention))
                store(contextual[encoding.kind].positions_HTT, start, encoding.positions(attention))
            score_BHQS = encoding.score(position.parameters, attention)
            if score_BHQS is not None:
                store(scores_HTT[encoding.kind], start, score_BHQS * visible_QS)
                total_BHQS = total_BHQS + score_BHQS
        if position_only_HTT is not None:
            total_BHQS = total_BHQS.masked_fill(~visible_QS, -torch.inf)
            # A softmax divided by its maximum is exp(x − max x).
            store(position_only_HTT, start, (total_BHQS - total_BHQS.amax(-1, keepdim=True)).exp())
        store(attention_HTT, start, attention_weights(block, positions, visible_QS))
    return LayerProbe(layer, heads, contextual, scores_HTT, position_only_HTT, attention_HTT)


def _query_block(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The inputs of queries `start` … `stop` − 1 and of keys 0 … `stop` − 1."""
    q_BHTK, k_BHSK = inputs.q_BHTK[:, :, start:stop], inputs.k_BHSK[:, :, :stop]
    return replace(
        inputs,
        q_BHTK=q_BHTK,
        k_BHSK=k_BHSK,
        v_BHSK=inputs.v_BHSK[:, :, :stop],
        # `Inputs.rotated` compares identities: without rotation these must be the same tensors.
        rotated_q_BHTK=inputs.rotated_q_BHTK[:, :, start:stop] if inputs.rotated else q_BHTK,
        rotated_k_BHSK=inputs.rotated_k_BHSK[:, :, :stop] if inputs.rotated else k_BHSK,
        features_BHSF=[each if each is None else each[:, :, :stop] for each in inputs.features_BHSF],
    )
