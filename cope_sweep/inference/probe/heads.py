"""Statistics of what each head counts: its gates on marked tokens and on the others, and its positions.

g_ij is the gate of key j for query i. ḡ_j is its mean over the selected queries i ≥ j. Every token has the same weight,
and the tokens of several sequences are pooled.

    on, off     mean ḡ of the marked tokens and of the others
    auc         P(ḡ_marked > ḡ_other) + ½·P(ḡ_marked = ḡ_other): the area under the ROC curve (Mann and Whitney 1947)
    effect      (on − off) / pooled standard deviation: Cohen's d (Cohen 1988)
    share       Σ ḡ over the marked tokens / Σ ḡ over all tokens
    clamped     share of the pairs (i, j ≤ i) whose position is beyond the last position embedding, p_max − 1

For a head that counts sections, `on` of the section marks is near 1, `off` is near 0, and `auc` and `share` are near 1.

Shapes: T tokens, Q selected queries, P pairs of a selected query and a key, N tokens of all sequences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import rankdata

from cope_sweep.inference import Predictor, TokenIds
from cope_sweep.inference.probe.matrices import ContextualMatrices, LayerProbe, ProbeError, probe_layers

TokenMarks = Mapping[str, np.ndarray]
"""Mark name → which tokens of one sequence are marked: bool, shape (T,)."""


@dataclass(frozen=True)
class MarkStatistics:
    """How the gates of a head separate marked tokens from the others. None: undefined for these tokens."""

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
    names = list(dict.fromkeys(name for each in marks for name in each))
    for index, token_ids in enumerate(sequences):
        T = len(token_ids)
        queries_T = np.ones(T, dtype=bool) if seen_by is None else seen_by[index]
        marked = {name: marks[index].get(name, np.zeros(T, dtype=bool)) for name in names}
        for name, marked_T in {**marked, "seen_by": queries_T}.items():
            if marked_T.shape != (T,):
                raise ProbeError(f"{name} has {marked_T.size} entries, but sequence {index} has {T} tokens")
        if seen_by is not None and not queries_T.any():
            continue

        def add_layer(layer: LayerProbe, queries_T: np.ndarray = queries_T, marked: TokenMarks = marked) -> None:
            for kind, matrices in layer.contextual.items():
                for row, head in enumerate(layer.heads):
                    totals[layer.layer, head, kind].add(matrices, row, queries_T, marked)

        probe_layers(predictor, token_ids, add_layer, layers, heads)
    if seen_by is not None and not any(queries_T.any() for queries_T in seen_by):
        raise ProbeError("seen_by selects no query in any sequence; select at least one")
    return [each.statistics(*key) for key, each in sorted(totals.items())]


def mean_gates(gates_TT: np.ndarray, queries_T: np.ndarray | None = None) -> np.ndarray:
    """ḡ_j of each key, float64, shape (T,): the mean of g_ij over the selected queries i ≥ j; NaN where there is none.

    `gates_TT` is 0 where j > i. `queries_T` is bool; None: all queries.
    """
    T = len(gates_TT)
    queries_T = np.ones(T, dtype=bool) if queries_T is None else queries_T
    counts_T = queries_T[::-1].cumsum()[::-1]  # selected queries i ≥ j
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
        auc=_auc(gates_N, marked_N),
        effect=_cohens_d(on_N, off_N),
        share=(on_N.sum() / total).item() if total > 0 else None,
    )


def _auc(gates_N: np.ndarray, marked_N: np.ndarray) -> float | None:
    """Area under the ROC curve, from ranks: (mean rank of the marked − (n_on + 1) / 2) / n_off. Ties count ½."""
    on = int(marked_N.sum())
    off = len(marked_N) - on
    if not on or not off:
        return None
    ranks_N = rankdata(gates_N)
    return float((ranks_N[marked_N].mean() - (on + 1) / 2) / off)


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
        causal_QT = np.tril(np.ones((len(queries_T), len(queries_T)), dtype=bool))[queries_T]
        positions_P = matrices.positions_HTT[row][queries_T][causal_QT]
        self.limit = matrices.limit
        self.pairs += len(positions_P)
        self.clamped += 0 if self.limit is None else int((positions_P > self.limit).sum())
        self.position_sum += float(positions_P.sum(dtype=np.float64))
        self.position_max = max(self.position_max, float(positions_P.max()))
        gates_T = mean_gates(matrices.gates_HTT[row], queries_T)
        seen_T = ~np.isnan(gates_T)
        self.gates.append(gates_T[seen_T])
        for name, marked_T in marks.items():
            self.marks[name].append(marked_T[seen_T])

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
