"""What each head counts, as numbers: its gates on marked tokens against all others, and how far its positions reach.

A gate g_ij is of key j as query i sees it. Here ḡ_j is its mean over the queries i ≥ j that are asked about (all, or
some), and tokens count alike, those of several sequences together:

    on, off     mean ḡ of the marked tokens, and of the others
    auc         P(ḡ_marked > ḡ_other) + ½·P(equal): 1 where gates tell the two apart without fail, ½ where not at all
    effect      (on − off) / pooled standard deviation: Cohen's d
    share       Σ ḡ over marked / Σ ḡ: how much of all that the head counts is marked
    clamped     share of pairs (i, j ≤ i) whose position is beyond the last embedding's, p_max − 1

"The head counts sections" then says: on is near 1, off near 0, and so auc and share are near 1 for section marks.

Shapes: T tokens, H heads, N tokens of all the sequences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cope_sweep.inference import Predictor, TokenIds
from cope_sweep.probe.matrices import Counted, LayerProbe, ProbeError, each_layer

Marks = Mapping[str, np.ndarray]
"""By name, the tokens of one sequence that are marked: bool, (T,)."""


@dataclass(frozen=True)
class Separation:
    """How a head's gates tell marked tokens from the others. None: not to be said of so few or so equal tokens."""

    tokens_on: int
    tokens_off: int
    on: float | None
    off: float | None
    auc: float | None
    effect: float | None
    share: float | None


@dataclass(frozen=True)
class Head:
    """One head's gates and positions, under one contextual encoding."""

    layer: int
    head: int
    encoding: str
    """Its kind."""
    limit: int | None
    """Where positions stop; None: nowhere."""
    clamped: float | None
    """None: positions never stop."""
    position_mean: float
    """Over pairs, before the limit."""
    position_max: float
    marks: Mapping[str, Separation]


def heads_of(
    predictor: Predictor,
    sequences: Sequence[TokenIds],
    marks: Sequence[Marks],
    *,
    seen_by: Sequence[np.ndarray] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[Head]:
    """Every chosen head of every contextual encoding, by layer and head; none for a model without gates.

    `marks` are of each sequence. `seen_by` are the queries to ask about, bool of each sequence's tokens; None: all.
    A layer's matrices are held at a time, whatever the number of sequences. Raises as `probe`, and ProbeError where
    marks do not fit their sequence and where no query is left to ask.
    """
    tallies: dict[tuple[int, int, str], _Tally] = defaultdict(_Tally)
    names = list(dict.fromkeys(name for each in marks for name in each))
    for index, token_ids in enumerate(sequences):
        T = len(token_ids)
        asked_T = np.ones(T, dtype=bool) if seen_by is None else seen_by[index]
        marked = {name: marks[index].get(name, np.zeros(T, dtype=bool)) for name in names}
        for name, marked_T in {**marked, "seen_by": asked_T}.items():
            if marked_T.shape != (T,):
                raise ProbeError(f"{name} is of {marked_T.size} tokens, and sequence {index} has {T}")
        if seen_by is not None and not asked_T.any():
            continue

        def on_layer(found: LayerProbe, asked_T: np.ndarray = asked_T, marked: Marks = marked) -> None:
            for kind, counted in found.counted.items():
                for row, head in enumerate(found.heads):
                    tallies[found.layer, head, kind].add(counted, row, asked_T, marked)

        each_layer(predictor, token_ids, on_layer, layers, heads)
    if seen_by is not None and not any(asked_T.any() for asked_T in seen_by):
        raise ProbeError("none of the sequences has a query to ask about; choose others with seen_by")
    return [tally.head(*key) for key, tally in sorted(tallies.items())]


def seen_from(gates_TT: np.ndarray, asked_T: np.ndarray | None = None) -> np.ndarray:
    """ḡ_j of each key, float64: the mean of g_ij over the queries i ≥ j that are asked; NaN where there is none."""
    T = len(gates_TT)
    asked_T = np.ones(T, dtype=bool) if asked_T is None else asked_T
    queries_T = asked_T[::-1].cumsum()[::-1]  # asked queries i ≥ j
    mean_T = np.full(T, math.nan)
    total_T = gates_TT[asked_T].sum(axis=0, dtype=np.float64)  # gates of keys after the query are 0
    np.divide(total_T, queries_T, out=mean_T, where=queries_T > 0)
    return mean_T


def separation(gates_N: np.ndarray, marked_N: np.ndarray) -> Separation:
    """How these gates tell the marked tokens from the others."""
    on_N, off_N = gates_N[marked_N].astype(np.float64), gates_N[~marked_N].astype(np.float64)
    total = gates_N.sum(dtype=np.float64)
    return Separation(
        tokens_on=len(on_N),
        tokens_off=len(off_N),
        on=on_N.mean().item() if len(on_N) else None,
        off=off_N.mean().item() if len(off_N) else None,
        auc=_auc(on_N, off_N),
        effect=_effect(on_N, off_N),
        share=(on_N.sum() / total).item() if total > 0 else None,
    )


def _auc(on_N: np.ndarray, off_N: np.ndarray) -> float | None:
    if not len(on_N) or not len(off_N):
        return None
    ordered_N = np.sort(off_N)
    below_N, not_above_N = np.searchsorted(ordered_N, on_N, "left"), np.searchsorted(ordered_N, on_N, "right")
    return float((below_N + not_above_N).mean() / 2 / len(off_N))


def _effect(on_N: np.ndarray, off_N: np.ndarray) -> float | None:
    freedom = len(on_N) + len(off_N) - 2
    if not len(on_N) or not len(off_N) or freedom < 1:
        return None
    squares = ((on_N - on_N.mean()) ** 2).sum() + ((off_N - off_N.mean()) ** 2).sum()
    return float((on_N.mean() - off_N.mean()) / math.sqrt(squares / freedom)) if squares > 0 else None


@dataclass
class _Tally:
    """What has been seen of one head so far."""

    limit: int | None = None
    pairs: int = 0
    clamped: int = 0
    position_sum: float = 0.0
    position_max: float = 0.0
    gates: list[np.ndarray] = field(default_factory=list)
    marks: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    def add(self, counted: Counted, row: int, asked_T: np.ndarray, marks: Marks) -> None:
        asked_QT = np.tril(np.ones((len(asked_T), len(asked_T)), dtype=bool))[asked_T]
        positions_P = counted.positions_HTT[row][asked_T][asked_QT]
        self.limit = counted.limit
        self.pairs += len(positions_P)
        self.clamped += 0 if self.limit is None else int((positions_P > self.limit).sum())
        self.position_sum += float(positions_P.sum(dtype=np.float64))
        self.position_max = max(self.position_max, float(positions_P.max()))
        gates_T = seen_from(counted.gates_HTT[row], asked_T)
        known_T = ~np.isnan(gates_T)
        self.gates.append(gates_T[known_T])
        for name, marked_T in marks.items():
            self.marks[name].append(marked_T[known_T])

    def head(self, layer: int, head: int, encoding: str) -> Head:
        gates_N = np.concatenate(self.gates)
        return Head(
            layer=layer,
            head=head,
            encoding=encoding,
            limit=self.limit,
            clamped=None if self.limit is None else self.clamped / self.pairs,
            position_mean=self.position_sum / self.pairs,
            position_max=self.position_max,
            marks={name: separation(gates_N, np.concatenate(parts)) for name, parts in self.marks.items()},
        )
