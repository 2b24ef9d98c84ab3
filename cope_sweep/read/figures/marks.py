"""Measures how well heads of trained models mark ends of paragraphs and titles, as the paper's Figures 4 and 6 claim.

The paper says about its figures that "attention tends to drop at specific tokens regardless of their relative
positions", because "one attention head can count paragraphs while another counts sections", and that the separators are
"newline tokens" and "section titles". So two quantities have a measure: the area under the ROC curve (AUC) of a label.

    gates                 Label: a token is marked. Value: its mean gate ḡ_j (`inference.probe`) over all queries i ≥ j
                          of its context. A token is compared with all others, in the same context and in others.
    position_attention    Label: no token from key j to query i, both included, is marked, so that a head that counts
                          marks has j at position 0. Value: position-only attention, as the figure draws it, for all
                          pairs with a distance i − j of 1, 2, 4, … tokens. A pair is compared with pairs of the same
                          distance alone, so every function of the distance, such as a decay, has an AUC of ½.

AUC is P(a value with the label > one without) + ½·P(they are equal), over all these comparisons. Marks are those of
`inference.probe.text_marks`: line breaks, and the first token of a title, because a title starts one section. Other
tokens of a title are unmarked.

**Which head.** Different seeds number their heads differently. So in each seed, the head with the largest AUC on the
first half of the sequences is chosen, and measured on the second half.

**Controls.** The best of several heads is above ½ by chance, and training makes heads respond to all kinds of tokens.
So a mark says something only if its AUC is larger than what the same model has for tokens that the claim does not name.
A control is the whole procedure again: the choice of a head on the first half, and its AUC on the second.

    other token types   The tokens of one id are marked. Ids: those with at least LEAST_MARKED tokens in each half (the
                        standard error of an AUC near ½ is then at most 0.06, √(1 / 12n)), of which no token is marked
                        by the figure; of more than MOST_TYPES, the most frequent ones.
    shifted marks       For position_attention, also the marks of each sequence, moved cyclically by a random number of
                        tokens: SHIFTS times, by fixed random numbers. They fall on other tokens at the same spacing.

All seeds of an ablation are measured on the same sequences, so the control of an id, or of a shift, is the same tokens
in every seed. Figures with the initial weights say what training has changed; no verdict depends on them.
`tables.controls.judge` has the verdict.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from scipy.stats import mannwhitneyu, rankdata

from cope_sweep.api.figures import Show
from cope_sweep.inference import Predictor
from cope_sweep.inference.probe import (
    LayerProbe,
    mean_gates,
    probe_layers,
    split_sequences,
    token_labels,
    token_marks,
)
from cope_sweep.read.numbers import fixed
from cope_sweep.read.tables.controls import HEAD_COLUMNS, SHIFTED, TYPES, kinds_of_controls, percentile

TOKENS = 1 << 14
"""Approximate number of tokens in each half of the sequences."""
LEAST_SEQUENCES = 4
"""Minimum number of sequences in each half."""
LEAST_MARKED = 25
"""Minimum number of tokens of a control in each half: as many as titles have."""
MOST_TYPES = 200
"""Maximum number of token types among the controls."""
SHIFTS = 199
"""Number of random shifts of the marks."""


def auc(with_label: np.ndarray, without: np.ndarray) -> float:
    """P(a value with the label > one without) + ½·P(they are equal); NaN if one of the two is empty."""
    pairs = len(with_label) * len(without)
    return float(mannwhitneyu(with_label, without, method="asymptotic").statistic) / pairs if pairs else math.nan


class Ranked:
    """Values of several heads, ranked within groups once, so that the AUC of each further label is a sum of ranks."""

    def __init__(self, values_HN: np.ndarray, groups_N: np.ndarray) -> None:
        """Rank the values, shape (H, N), among the values of the same head and group; `groups_N` are integers."""
        _, self._groups_N = np.unique(groups_N, return_inverse=True)
        self._sizes_G = np.bincount(self._groups_N)
        self._ranks_NH = np.empty(values_HN.T.shape)
        for group in range(len(self._sizes_G)):
            members = np.flatnonzero(self._groups_N == group)
            self._ranks_NH[members] = rankdata(values_HN[:, members], axis=1).T

    def auc_of_heads(self, labels_N: np.ndarray) -> np.ndarray:
        """The AUC of a label in each head, over the pairs of values in the same group; NaN without any pair."""
        with_label_G = np.bincount(self._groups_N[labels_N], minlength=len(self._sizes_G))
        pairs_G = with_label_G * (self._sizes_G - with_label_G)
        # Where all values of a group have the label, or none has, there are no pairs: the sum of ranks says so, too.
        won_H = self._ranks_NH[labels_N].sum(axis=0) - (with_label_G * (with_label_G + 1) / 2).sum()
        pairs = int(pairs_G.sum())
        return won_H / pairs if pairs else np.full(len(won_H), math.nan)


@dataclass(frozen=True)
class HeadMeasure:
    """The measure of one head on some sequences; NaN if no value has the label, or all have it."""

    auc: float
    on: float
    """Mean of the values with the label."""
    off: float
    """Mean of the values without."""
    with_label: int
    """Number of values with the label."""
    without: int
    """Number of values without."""


LayerAndHead = tuple[int, int]


class MarkedMaps(Protocol):
    """What is measured of a figure of maps."""

    @property
    def show(self) -> Show:
        """The quantity: gates or position_attention."""

    @property
    def mark(self) -> str | None:
        """The marked tokens."""

    @property
    def split(self) -> str | None:
        """The split of the sequences; None: the first test set."""


@dataclass(frozen=True)
class HalfProbe:
    """What is measured of half of the sequences: the values of all heads, and the tokens."""

    tokens: Sequence[np.ndarray]
    """The token ids of each sequence."""
    marks: Sequence[Mapping[str, np.ndarray]]
    """The marks of each sequence."""
    heads: Mapping[Show, Sequence[LayerAndHead]]
    """Quantity → the heads that have it; none if the model does not have it."""
    values_HN: Mapping[Show, np.ndarray]
    ranked: Mapping[Show, Ranked]

    @classmethod
    def of(cls, predictor: Predictor, shows: Collection[Show], sequences: Sequence[Sequence[int]]) -> HalfProbe:
        """Probe a model for some quantities over sequences of token ids."""
        tokens = [np.array(sequence) for sequence in sequences]
        marks = [token_marks(predictor, tokens_T) for tokens_T in tokens]
        values: dict[Show, dict[LayerAndHead, list[np.ndarray]]] = {show: defaultdict(list) for show in shows}
        groups: dict[Show, list[np.ndarray]] = defaultdict(list)
        for sequence in sequences:
            query, key = _pairs(len(sequence))
            groups["gates"].append(np.zeros(len(sequence), dtype=np.int64))
            groups["position_attention"].append(query - key)
            probe_layers(predictor, sequence, partial(_add_values, values))
        heads = {show: sorted(of_heads) for show, of_heads in values.items() if of_heads}
        values_HN = {
            show: np.stack([np.concatenate(values[show][head]) for head in of_show]) for show, of_show in heads.items()
        }
        ranked = {show: Ranked(values_HN[show], np.concatenate(groups[show])) for show in heads}
        return cls(tokens, marks, heads, values_HN, ranked)

    def marked(self, mark: str) -> list[np.ndarray]:
        """Whether each token of each sequence has this mark."""
        return [
            marks.get(mark, np.zeros(len(tokens_T), dtype=bool))
            for tokens_T, marks in zip(self.tokens, self.marks, strict=True)
        ]

    def measures(self, figure: MarkedMaps) -> dict[LayerAndHead, HeadMeasure]:
        """The measure of every head; empty if the model does not have what the figure shows."""
        if figure.show not in self.heads:
            return {}
        labels_N = _labels(figure.show, self.marked(figure.mark or ""))
        auc_H, values_HN = self.ranked[figure.show].auc_of_heads(labels_N), self.values_HN[figure.show]
        return {
            head: HeadMeasure(
                float(auc), _mean(values_N[labels_N]), _mean(values_N[~labels_N]), int(labels_N.sum()),
                int((~labels_N).sum()),
            )
            for head, auc, values_N in zip(self.heads[figure.show], auc_H, values_HN, strict=True)
        }  # fmt: skip


def _labels(show: Show, marked: Sequence[np.ndarray]) -> np.ndarray:
    """The labels of all values of a quantity, given the marked tokens of each sequence; Boolean, shape (N,)."""
    if show == "gates":
        return np.concatenate(marked)
    labels = []
    for marked_T in marked:
        query, key = _pairs(len(marked_T))
        before_T = np.concatenate([[0], marked_T.cumsum()])  # marks before each token
        labels.append(before_T[query + 1] == before_T[key])
    return np.concatenate(labels)


@cache
def _pairs(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The queries and the keys of all pairs with a distance of 1, 2, 4, … tokens."""
    distances = [1 << power for power in range(tokens.bit_length()) if 1 << power < tokens]
    queries = [np.arange(distance, tokens) for distance in distances]
    keys = [np.arange(tokens - distance) for distance in distances]
    return np.concatenate([*queries, np.zeros(0, dtype=int)]), np.concatenate([*keys, np.zeros(0, dtype=int)])


def _add_values(values: Mapping[Show, dict[LayerAndHead, list[np.ndarray]]], layer: LayerProbe) -> None:
    """Add the values of each head of a layer: of each key, or of each pair of a query and a key."""
    gates = next(iter(layer.contextual.values()), None)
    matrix_HTT = layer.position_only_attention_HTT
    for row, head in enumerate(layer.heads):
        if "gates" in values and gates is not None:
            values["gates"][layer.layer, head].append(mean_gates(gates.gates_HTT[row], gates.seen_TT))
        if "position_attention" in values and matrix_HTT is not None:
            values["position_attention"][layer.layer, head].append(matrix_HTT[row][_pairs(matrix_HTT.shape[1])])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def best_head(heads: Mapping[LayerAndHead, HeadMeasure]) -> LayerAndHead | None:
    """The head with the largest AUC, the first of equal ones; None if no AUC is known."""
    auc_by_head = {head: measure.auc for head, measure in heads.items() if not math.isnan(measure.auc)}
    return max(auc_by_head, key=lambda head: auc_by_head[head], default=None)


def halves(predictor: Predictor, split: str | None) -> tuple[list[list[int]], list[list[int]]]:
    """The sequences of a split that choose a head, and those that measure it."""
    task = predictor.run.task
    count = max(LEAST_SEQUENCES, TOKENS // task.context)
    sequences = split_sequences(task, split, 0, 2 * count)
    half = len(sequences) // 2
    return sequences[:half], sequences[half:]


@dataclass(frozen=True)
class Control:
    """The AUC for tokens that the claim does not name: see the module's docstring."""

    kind: str
    """`tables.controls.TYPES` or `tables.controls.SHIFTED`."""
    number: int
    """The token id, or the number of the shift. It names the same tokens in all seeds."""
    label: str
    """The text of the token; empty for a shift."""
    head: LayerAndHead
    """The head that is chosen for these tokens on the first half."""
    auc: float
    """Its AUC on the second half."""


def controls_of(predictor: Predictor, figure: MarkedMaps, first: HalfProbe, second: HalfProbe) -> list[Control]:
    """The controls of a figure; none if the model does not have what it shows."""
    if figure.show not in first.heads:
        return []
    mark = figure.mark or ""
    types = _frequent_types(mark, first, second)
    labels = token_labels(predictor, np.array(types, dtype=np.int64)) if types else []
    candidates = [
        (TYPES, token, label, [[tokens_T == token for tokens_T in half.tokens] for half in (first, second)])
        for token, label in zip(types, labels, strict=True)
    ]
    if SHIFTED in kinds_of_controls(figure.show):
        candidates += [
            (SHIFTED, number, "", _shifted([first.marked(mark), second.marked(mark)], number))
            for number in range(SHIFTS)
        ]
    controls = []
    for kind, number, label, (in_first, in_second) in candidates:
        auc_H = first.ranked[figure.show].auc_of_heads(_labels(figure.show, in_first))
        if np.isnan(auc_H).all():
            continue
        chosen = int(np.nanargmax(auc_H))
        auc = float(second.ranked[figure.show].auc_of_heads(_labels(figure.show, in_second))[chosen])
        if not math.isnan(auc):
            controls.append(Control(kind, number, label, first.heads[figure.show][chosen], auc))
    return controls


def _shifted(halves_of_marks: Sequence[Sequence[np.ndarray]], number: int) -> list[list[np.ndarray]]:
    """The marks of each sequence, moved cyclically by a random number of tokens."""
    rng = np.random.default_rng(number)
    return [
        [np.roll(marked_T, rng.integers(1, max(2, len(marked_T)))) for marked_T in marks] for marks in halves_of_marks
    ]


def _frequent_types(mark: str, first: HalfProbe, second: HalfProbe) -> list[int]:
    """The token ids that are controls, most frequent first."""
    marked = np.unique(
        np.concatenate([
            tokens_T[marked_T]
            for half in (first, second)
            for tokens_T, marked_T in zip(half.tokens, half.marked(mark), strict=True)
        ])
    )  # fmt: skip
    in_halves = [Counter(np.concatenate(half.tokens).tolist()) for half in (first, second)]
    counts = in_halves[0] + in_halves[1]
    frequent = [
        token
        for token in counts
        if token not in marked and all(in_half[token] >= LEAST_MARKED for in_half in in_halves)
    ]
    return sorted(frequent, key=lambda token: (-counts[token], token))[:MOST_TYPES]


@dataclass(frozen=True)
class ChosenHead:
    """The head that marks best what a figure claims, and the controls."""

    head: LayerAndHead
    measure: HeadMeasure
    """On the second half of the sequences."""
    controls: Sequence[Control]

    def caption(self, mark: str) -> str:
        """How well it marks, for a caption: `AUC 0.88 for newline, percentile 74 among 137 other token types`."""
        places = []
        for kind in dict.fromkeys(control.kind for control in self.controls):
            values = [control.auc for control in self.controls if control.kind == kind]
            places.append(f"{fixed(percentile(self.measure.auc, values), 0)} among {len(values)} {kind}")
        auc = f"AUC {fixed(self.measure.auc, 2)} for {mark}"
        return f"{auc}, percentile {' and '.join(places)}" if places else auc


def chosen_head(predictor: Predictor, figure: MarkedMaps) -> ChosenHead | None:
    """The head that marks best what a figure shows, by the first half of the sequences; None without any measure."""
    first, second = (
        HalfProbe.of(predictor, {figure.show}, sequences) for sequences in halves(predictor, figure.split)
    )  # fmt: skip
    head = best_head(first.measures(figure))
    if head is None:
        return None
    return ChosenHead(head, second.measures(figure)[head], controls_of(predictor, figure, first, second))


@torch.inference_mode()
def measure_run(checkpoint: Path, figures: Mapping[str, MarkedMaps]) -> pd.DataFrame:
    """A line for each head of a run and figure (name → figure):

    figure, run_id, seed, layer, head
    chosen                         whether its AUC on the first half of the sequences is the largest
    auc, on, off                   AUC on the second half; mean values with the label, and without
    with_label, without            number of values with the label, and without
    initial_chosen, initial_auc    the same with the initial weights
    control                        empty

    and a line for each control and figure, in which nothing is chosen and only these have values:

    layer, head, auc               the head that was chosen for the control, and its AUC
    control                        its kind (`tables.controls.TYPES`, `tables.controls.SHIFTED`)
    control_id, control_label      `Control.number` and `Control.label`

    Raises what `Predictor.load` and a probe raise.
    """
    trained = Predictor.load(checkpoint)
    untrained = trained.untrained()
    lines: list[dict[str, object]] = []
    for split in dict.fromkeys(figure.split for figure in figures.values()):
        of_split = {name: figure for name, figure in figures.items() if figure.split == split}
        shows = {figure.show for figure in of_split.values()}
        of_halves = halves(trained, split)
        first, second = (HalfProbe.of(trained, shows, sequences) for sequences in of_halves)
        first_initial, second_initial = (HalfProbe.of(untrained, shows, sequences) for sequences in of_halves)
        for name, figure in of_split.items():
            of_run = {"figure": name, "run_id": trained.run.run_id, "seed": trained.run.seed}
            chosen, initial = best_head(first.measures(figure)), best_head(first_initial.measures(figure))
            initial_measures = second_initial.measures(figure)
            lines += [
                of_run | vars(measure) | {
                    "layer": head[0], "head": head[1], "chosen": head == chosen, "initial_chosen": head == initial,
                    "initial_auc": initial_measures[head].auc, "control": "", "control_id": 0, "control_label": "",
                }
                for head, measure in second.measures(figure).items()
            ]  # fmt: skip
            lines += [
                of_run | {
                    "layer": control.head[0], "head": control.head[1], "chosen": False, "auc": control.auc,
                    "on": math.nan, "off": math.nan, "with_label": 0, "without": 0, "initial_chosen": False,
                    "initial_auc": math.nan, "control": control.kind, "control_id": control.number,
                    "control_label": control.label,
                }
                for control in controls_of(trained, figure, first, second)
            ]  # fmt: skip
    return pd.DataFrame(lines, columns=list(HEAD_COLUMNS)).astype(HEAD_COLUMNS)
