"""Probes of a checkpoint: gates, positions and attention of its heads, and statistics of them on marked tokens.

**Matrices**, from the model's own forward pass, as numpy arrays:

    g_ij, p_ij   gates and positions of each contextual encoding, for the keys j that query i sees: j ≤ i, without those
                 that a window hides (see positions/cope.py); positions are given before and after the limit of the
                 encoding
    s_ij         position logits: what an encoding adds to the attention logits
    position-only attention
                 softmax_j(Σ s_ij), scaled so that the maximum of each query is 1
    a_ij         softmax_j(q_i·k_j/√K + Σ s_ij): the attention of the model

Position-only attention does not exist for a model without position logits: RoPE and absolute positions change q·k
itself, PaTH and others replace it, and a window is a mask.

An observer in the attention function receives the inputs of each layer's attention. The encodings compute gates,
positions and logits from them, for one block of queries at a time. The layers after the last selected one are not
computed.

**Marks**: tokens that end a line, a section title or a sentence, and tokens that a task names. A head that counts
lines, sections or sentences opens its gates on such tokens.

    newline     a token that contains a line break (in WikiText, the end of a paragraph)
    section     the first token of a title: WikiText's ` = = Title = = `, or Markdown's `## Title`, on a separate line.
                A title begins one section, so only one of its tokens is marked
    sentence    a token that contains the `.`, `!` or `?` at the end of a sentence. Closing quotation marks and brackets
                may follow it; then a space or the end of the text must follow. This is a heuristic: it splits
                "Mr. Smith".

The patterns match bytes, because a token may contain only a part of a character.

**Statistics** of what each head counts. ḡ_j is the mean of g_ij over the selected queries i that see key j. Every token
has the same weight, and the tokens of several sequences are pooled.

    on, off     mean ḡ of the marked tokens and of the others
    auc         P(ḡ_marked > ḡ_other) + ½·P(ḡ_marked = ḡ_other): the area under the ROC curve (Mann and Whitney 1947)
    effect      (on − off) / pooled standard deviation: Cohen's d (Cohen 1988)
    share       Σ ḡ over the marked tokens / Σ ḡ over all tokens
    clamped     share of the pairs of a query and a key that it sees whose position is beyond the last position
                embedding, p_max − 1

For a head that counts sections, `on` of the section marks is near 1, `off` is near 0, and `auc` and `share` are near 1.

`cope_sweep.read.figures` draws all of it.

Shapes: H selected heads, T tokens, Q queries of a block or selected ones, S keys up to the last query of the block, P
pairs of a selected query and a key, N tokens of all sequences. Index [h, i, j] is query i and key j, and the value is 0
where i does not see j.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.errors import ProbeError
from cope_sweep.inference import Predictor, TokenIds, TokensError, validate_token_ids
from cope_sweep.kernels import Inputs, LayerEncodings, attention_weights, observing
from cope_sweep.model import CheckpointError, check_reach
from cope_sweep.model.load import HeadLoad, has_logits, head_loads, look
from cope_sweep.positions.cope import ContextualEncoding
from cope_sweep.tasks import IGNORED, Task

# -- matrices ----------------------------------------------------------------------------------------------------------


MAX_BYTES = 1 << 30
"""Memory limit for the matrices of one call."""
SCRATCH_BYTES = 64 << 20
"""Approximate memory for one block of queries."""


@dataclass(frozen=True)
class ContextualMatrices:
    """Gates and positions of one contextual encoding in one layer."""

    gates_HTT: np.ndarray
    """float32, 0 … 1."""
    positions_HTT: np.ndarray
    """float32, before the limit."""
    limit: int | None
    """Largest position that the encoding distinguishes, p_max − 1; None: no limit."""
    seen_TT: np.ndarray
    """bool: the query sees the key."""

    @property
    def clamped_positions_HTT(self) -> np.ndarray:  # noqa: N802 - a shape suffix
        """float32: min(position, limit), as the encoding uses it."""
        return self.positions_HTT if self.limit is None else np.minimum(self.positions_HTT, np.float32(self.limit))


@dataclass(frozen=True)
class LayerProbe:
    """Matrices of the selected heads of one layer. Keys are kinds of encodings: each kind occurs once in a layer."""

    layer: int
    heads: tuple[int, ...]
    contextual: Mapping[str, ContextualMatrices]
    """Kind of a contextual encoding → its gates and positions."""
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
        for layer_probe in self.layers:
            layer = f"layer{layer_probe.layer}"
            named[f"{layer}/heads"] = np.array(layer_probe.heads)
            for kind, matrices in layer_probe.contextual.items():
                named[f"{layer}/{kind}/gates"] = matrices.gates_HTT
                named[f"{layer}/{kind}/positions"] = matrices.positions_HTT
                named[f"{layer}/{kind}/stopped"] = matrices.clamped_positions_HTT
            for kind, scores_HTT in layer_probe.scores_HTT.items():
                named[f"{layer}/{kind}/scores"] = scores_HTT
            if layer_probe.position_only_attention_HTT is not None:
                named[f"{layer}/position_only_attention"] = layer_probe.position_only_attention_HTT
            named[f"{layer}/attention"] = layer_probe.attention_HTT
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
        TokensError: An entry is not a token id of this model, or the sequence is longer than an encoding supports.
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
    scoring = sum(has_logits(encoding) for encoding in serving)
    return 2 * sum(isinstance(encoding, ContextualEncoding) for encoding in serving) + scoring + bool(scoring) + 1


def _selected(numbers: Sequence[int] | None, count: int, noun: str) -> tuple[int, ...]:
    if numbers is None:
        return tuple(range(count))
    for number in numbers:
        if not 0 <= number < count:
            raise ProbeError(
                f"there is no {noun} {number}: this model has {noun}s 0 … {count - 1}",
                code=f"no_such_{noun}",
                value=number,
                largest=count - 1,
            )
    return tuple(sorted(set(numbers)))


def _validated_tokens(predictor: Predictor, token_ids: TokenIds) -> np.ndarray:
    tokens_T = validate_token_ids(token_ids, predictor.vocabulary_size)
    if not len(tokens_T):
        raise TokensError("the sequence has no tokens; give at least one", code="too_short", tokens=0)
    try:
        check_reach(predictor.run, len(tokens_T))
    except ValueError as error:
        raise TokensError(
            f"the sequence of {len(tokens_T)} tokens is too long: {error}", code="too_long", tokens=len(tokens_T)
        ) from error
    return tokens_T


def _check_memory(run: RunSpec, tokens: int, layers: tuple[int, ...], heads: tuple[int, ...]) -> None:
    size_bytes = 4 * tokens**2 * len(heads) * sum(matrix_count(run, layer) for layer in layers)
    if size_bytes > MAX_BYTES:
        raise ProbeError(
            f"the matrices of {tokens} tokens, {len(layers)} layers and {len(heads)} heads would take "
            f"{size_bytes / 2**30:.1f} GiB; the limit is {MAX_BYTES / 2**30:.1f} GiB; "
            "choose fewer layers or heads, or a shorter sequence",
            code="matrices_too_large",
            tokens=tokens,
            layers=len(layers),
            heads=len(heads),
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
    layer_numbers = itertools.count()

    def observe(inputs: Inputs, positions: LayerEncodings) -> None:
        layer = next(layer_numbers)  # the model calls attention once per layer, in order
        if layer in layers:
            try:
                observed = _layer_probe(layer, heads, inputs, positions)
            except FloatingPointError as error:
                raise CheckpointError(
                    f"run {predictor.run.run_id}: layer {layer} computes values that are not finite; "
                    "the weights are damaged",
                    code="not_finite",
                    run_id=predictor.run.run_id,
                    layer=layer,
                ) from error
            on_layer(observed)
        if layer == max(layers, default=0):
            raise _LastLayerDoneError

    device = predictor.model.embedding.weight.device
    with observing(observe), suppress(_LastLayerDoneError):
        predictor.model(torch.from_numpy(tokens_T).to(device)[None])


def _layer_probe(layer: int, heads: tuple[int, ...], inputs: Inputs, positions: LayerEncodings) -> LayerProbe:
    """The matrices of one layer. Raises FloatingPointError where a value is not finite."""
    _, all_heads, T, _ = inputs.q_BHTK.shape

    def zeros() -> np.ndarray:
        return np.zeros((len(heads), T, T), dtype=np.float32)

    seen_TT = np.zeros((T, T), dtype=bool)
    contextual = {
        p.encoding.kind: ContextualMatrices(zeros(), zeros(), p.encoding.limit(p.parameters), seen_TT)
        for p in positions
        if isinstance(p.encoding, ContextualEncoding)
    }
    scores_HTT = {p.encoding.kind: zeros() for p in positions if has_logits(p.encoding)}
    position_only_HTT, attention_HTT = zeros() if scores_HTT else None, zeros()

    def store(target_HTT: np.ndarray, start: int, rows_BHQS: Tensor) -> None:
        if not rows_BHQS.isfinite().all():
            raise FloatingPointError
        rows_HQS = rows_BHQS.expand(1, all_heads, -1, -1)[0, list(heads)].float().cpu().numpy()
        target_HTT[:, start : start + rows_HQS.shape[1], : rows_HQS.shape[2]] = rows_HQS

    rows = max(1, SCRATCH_BYTES // (40 * all_heads * T))  # about ten float32 copies of a row of the attention matrix
    for start in range(0, T, rows):
        block = inputs.of_queries(start, min(start + rows, T))
        logits_BHQS, of_each, visible_QS, seen_QS = look(block, positions)
        seen_TT[start : start + len(seen_QS), : seen_QS.shape[1]] = seen_QS.cpu().numpy()
        total_BHQS = torch.zeros_like(logits_BHQS)
        for position, attention in zip(positions, of_each, strict=True):
            encoding = position.encoding
            if isinstance(encoding, ContextualEncoding):
                matrices = contextual[encoding.kind]
                store(matrices.gates_HTT, start, encoding.gates(position.parameters, attention) * seen_QS)
                store(matrices.positions_HTT, start, encoding.positions(position.parameters, attention) * seen_QS)
            if not has_logits(encoding):
                continue
            score_BHQS = encoding.score(position.parameters, attention)
            if score_BHQS is not None:
                store(scores_HTT[encoding.kind], start, score_BHQS * seen_QS)
                total_BHQS = total_BHQS + score_BHQS
        if position_only_HTT is not None:
            total_BHQS = total_BHQS.masked_fill(~seen_QS, -torch.inf)
            # A softmax divided by its maximum is exp(x − max x).
            store(position_only_HTT, start, (total_BHQS - total_BHQS.amax(-1, keepdim=True)).exp())
        store(attention_HTT, start, attention_weights(block, positions, visible_QS))
    return LayerProbe(layer, heads, contextual, scores_HTT, position_only_HTT, attention_HTT)


# -- sequences and their marked tokens ---------------------------------------------------------------------------------


def split_sequences(task: Task, split: str | None, index: int, count: int = 1) -> list[list[int]]:
    """`count` sequences of token ids from `index` on, without padding; without split, of the first test set.

    Raises ProbeError for a split that the task does not have, and an index beyond its end.
    """
    try:
        batch = task.sequences(split or task.TESTS[0], 0, index, count)  # 0: the seed of every run's test sets
    except ValueError as error:
        raise ProbeError(f"the split: {error}", code="unknown_split", split=split) from error
    if not len(batch):
        raise ProbeError(
            f"the split has no sequence {index}; choose a smaller index", code="no_such_sequence", value=index
        )
    ends_N = [(row_T != IGNORED).nonzero()[0][-1] + 1 for row_T in batch.targets_NT]
    return [row_T[:end].tolist() for row_T, end in zip(batch.inputs_NT, ends_N, strict=True)]


_PATTERNS = {
    "newline": re.compile(rb"(?P<unit>\n)"),
    "section": re.compile(
        rb"^[ \t]*(?=(?:(?P<rank>=+(?: =+)*) .*\S (?P=rank)|#{1,6} .*\S)[ \t\r]*$)(?P<unit>[=#])", re.MULTILINE
    ),
    "sentence": re.compile(rb"(?P<unit>[.!?]+)(?=[\"')\]\xe2\x80\x99\x9d]*(?:\s|\Z))"),
}


def token_marks(predictor: Predictor, tokens_T: np.ndarray) -> dict[str, np.ndarray]:
    """Mark name → whether each token is marked: bool, shape (T,).

    The marks come from the task, and from the text if the model has a tokenizer. Raises CheckpointError.
    """
    marks = text_marks(predictor.tokenizer.pieces(tokens_T.tolist())) if predictor.reads_text else {}
    return marks | predictor.run.task.marks(tokens_T)


def token_labels(predictor: Predictor, tokens_T: np.ndarray) -> list[str]:
    """The text of each token. The end-of-text token is `¶`; an incomplete character is `�`. Raises CheckpointError."""
    if not predictor.reads_text:
        return [predictor.run.task.token_label(token) for token in tokens_T.tolist()]
    return [piece.decode(errors="replace") or "¶" for piece in predictor.tokenizer.pieces(tokens_T.tolist())]


def text_marks(pieces: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Mark name → whether each token of a text is marked: bool, shape (T,). `pieces` are the bytes of each token."""
    text = b"".join(pieces)
    ends_T = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    marks = {}
    for name, pattern in _PATTERNS.items():
        marked_T = np.zeros(len(pieces), dtype=bool)
        for match in pattern.finditer(text):
            first = np.searchsorted(ends_T, match.start("unit"), "right")  # the token with the first byte of the unit
            last = np.searchsorted(ends_T, match.end("unit") - 1, "right")
            marked_T[first : last + 1] = True
        marks[name] = marked_T
    return marks


# -- statistics of heads -----------------------------------------------------------------------------------------------


TokenMarks = Mapping[str, np.ndarray]
"""Mark name → whether each token of one sequence is marked: bool, shape (T,)."""


@dataclass(frozen=True)
class MarkStatistics:
    """The separation of marked tokens from the others by the gates of a head. None: undefined for these tokens."""

    tokens_on: int
    tokens_off: int
    on: float | None
    off: float | None
    auc: float | None
    effect: float | None
    share: float | None


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of one head's gates and positions, for one contextual encoding."""

    layer: int
    head: int
    encoding: str
    """Kind of the encoding."""
    limit: int | None
    """Largest position that the encoding distinguishes; None: no limit."""
    clamped: float | None
    """None: the encoding has no limit."""
    position_mean: float
    """Mean over the pairs, before the limit."""
    position_max: float
    """Maximum over the pairs, before the limit."""
    marks: Mapping[str, MarkStatistics]


def head_statistics(
    predictor: Predictor,
    sequences: Sequence[TokenIds],
    marks: Sequence[TokenMarks],
    *,
    seen_by: Sequence[np.ndarray] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[HeadStatistics]:
    """Statistics of every selected head and contextual encoding, by layer and head. Empty for a model without gates.

    Args:
        predictor: The model.
        sequences: Token ids.
        marks: The marked tokens of each sequence.
        seen_by: The selected queries of each sequence, bool, shape (T,). None: all queries.
        layers: The selected layers. None: all.
        heads: The selected heads of each layer. None: all.

    The matrices of only one layer are in memory at a time.

    Raises ProbeError where marks or queries do not fit their sequence, or where no query is selected, and what `probe`
    raises.
    """
    totals: dict[tuple[int, int, str], _RunningTotals] = defaultdict(_RunningTotals)
    names = list(dict.fromkeys(name for mark in marks for name in mark))
    for index, token_ids in enumerate(sequences):
        T = len(token_ids)
        queries_T = np.ones(T, dtype=bool) if seen_by is None else seen_by[index]
        marked = {name: marks[index].get(name, np.zeros(T, dtype=bool)) for name in names}
        for name, marked_T in {**marked, "seen_by": queries_T}.items():
            if marked_T.shape != (T,):
                raise ProbeError(
                    f"{name} has {marked_T.size} entries, but sequence {index} has {T} tokens",
                    code="marks_length",
                    marks=name,
                    entries=marked_T.size,
                    sequence=index,
                    tokens=T,
                )
        if seen_by is not None and not queries_T.any():
            continue

        # As defaults, because the loop gives both names other values.
        def add_layer(layer: LayerProbe, queries_T: np.ndarray = queries_T, marked: TokenMarks = marked) -> None:
            for kind, matrices in layer.contextual.items():
                for row, head in enumerate(layer.heads):
                    totals[layer.layer, head, kind].add(matrices, row, queries_T, marked)

        probe_layers(predictor, token_ids, add_layer, layers, heads)
    if seen_by is not None and not any(queries_T.any() for queries_T in seen_by):
        raise ProbeError("seen_by selects no query in any sequence; select at least one", code="no_queries")
    return [total.statistics(*key) for key, total in sorted(totals.items())]


def loads_of_heads(
    predictor: Predictor,
    sequences: Sequence[TokenIds],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[HeadLoad]:
    """What the position logits do in the selected heads (None: all); see `cope_sweep.model.load`.

    Raises what `probe` raises, but for the memory limit: only some rows of attention are computed.
    """
    selected_layers, selected_heads = select_heads(predictor.run, layers, heads)
    device = predictor.model.embedding.weight.device
    tokens = [torch.from_numpy(_validated_tokens(predictor, token_ids)).to(device) for token_ids in sequences]
    loads = head_loads(predictor.model, tokens)
    for load in loads:
        if not math.isfinite(load.position + load.content):
            raise CheckpointError(
                f"run {predictor.run.run_id}: layer {load.layer} computes values that are not finite; the weights are "
                "damaged",
                code="not_finite",
                run_id=predictor.run.run_id,
                layer=load.layer,
            )
    return [load for load in loads if load.layer in selected_layers and load.head in selected_heads]


def mean_gates(gates_TT: np.ndarray, seen_TT: np.ndarray, queries_T: np.ndarray | None = None) -> np.ndarray:
    """ḡ_j of each key, float64, shape (T,): the mean of g_ij over the selected queries i that see it; NaN without any.

    `gates_TT` is 0 where i does not see j, that is where `seen_TT` is false. `queries_T` is bool; None: all queries.
    """
    T = len(gates_TT)
    queries_T = np.ones(T, dtype=bool) if queries_T is None else queries_T
    counts_T = seen_TT[queries_T].sum(axis=0)
    means_T = np.full(T, math.nan)
    sums_T = gates_TT[queries_T].sum(axis=0, dtype=np.float64)
    np.divide(sums_T, counts_T, out=means_T, where=counts_T > 0)
    return means_T


def mark_statistics(gates_N: np.ndarray, marked_N: np.ndarray) -> MarkStatistics:
    """Statistics of gates, shape (N,), on the marked tokens (`marked_N`: bool, shape (N,)) and on the others."""
    gates_N = gates_N.astype(np.float64)
    on_N, off_N = gates_N[marked_N], gates_N[~marked_N]
    total = gates_N.sum()
    return MarkStatistics(
        tokens_on=len(on_N),
        tokens_off=len(off_N),
        on=on_N.mean().item() if len(on_N) else None,
        off=off_N.mean().item() if len(off_N) else None,
        auc=_auc(on_N, off_N),
        effect=_cohens_d(on_N, off_N),
        share=(on_N.sum() / total).item() if total > 0 else None,
    )


def _auc(on_N: np.ndarray, off_N: np.ndarray) -> float | None:
    """Area under the ROC curve: the statistic of Mann and Whitney, ÷ the number of pairs. Ties count ½."""
    if not len(on_N) or not len(off_N):
        return None
    # Only the statistic is used. An exact p would take long.
    return float(mannwhitneyu(on_N, off_N, method="asymptotic").statistic) / (len(on_N) * len(off_N))


def _cohens_d(on_N: np.ndarray, off_N: np.ndarray) -> float | None:
    freedom = len(on_N) + len(off_N) - 2
    if not len(on_N) or not len(off_N) or freedom < 1:
        return None
    squares = ((on_N - on_N.mean()) ** 2).sum() + ((off_N - off_N.mean()) ** 2).sum()
    return float((on_N.mean() - off_N.mean()) / math.sqrt(squares / freedom)) if squares > 0 else None


@dataclass
class _RunningTotals:
    """Totals of one head over the sequences so far."""

    limit: int | None = None
    pairs: int = 0
    clamped: int = 0
    position_sum: float = 0.0
    position_max: float = 0.0
    gates: list[np.ndarray] = field(default_factory=list)
    marks: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    def add(self, matrices: ContextualMatrices, row: int, queries_T: np.ndarray, marks: TokenMarks) -> None:
        """Add one sequence; `row` is the index of the head in the matrices."""
        positions_P = matrices.positions_HTT[row][queries_T][matrices.seen_TT[queries_T]]
        self.limit = matrices.limit
        self.pairs += len(positions_P)
        self.clamped += 0 if self.limit is None else int((positions_P > self.limit).sum())
        self.position_sum += float(positions_P.sum(dtype=np.float64))
        self.position_max = max(self.position_max, float(positions_P.max()))
        gates_T = mean_gates(matrices.gates_HTT[row], matrices.seen_TT, queries_T)
        is_seen_T = ~np.isnan(gates_T)
        self.gates.append(gates_T[is_seen_T])
        for name, marked_T in marks.items():
            self.marks[name].append(marked_T[is_seen_T])

    def statistics(self, layer: int, head: int, encoding: str) -> HeadStatistics:
        gates_N = np.concatenate(self.gates)
        return HeadStatistics(
            layer=layer,
            head=head,
            encoding=encoding,
            limit=self.limit,
            clamped=None if self.limit is None else self.clamped / self.pairs,
            position_mean=self.position_sum / self.pairs,
            position_max=self.position_max,
            marks={name: mark_statistics(gates_N, np.concatenate(parts)) for name, parts in self.marks.items()},
        )
