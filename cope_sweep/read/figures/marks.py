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
first half of the sequences is chosen, and measured on the second half. The best of several heads is above ½ even by
chance: a mark is mostly one token of the vocabulary, and some head may rank it high before it has learned anything. So
the same is done with the initial weights. `tables.claims` has the verdict.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from scipy.stats import mannwhitneyu

from cope_sweep.api.figures import Show
from cope_sweep.inference import Predictor
from cope_sweep.inference.probe import LayerProbe, mean_gates, probe_layers, split_sequences, token_marks

TOKENS = 1 << 14
"""Approximate number of tokens in each half of the sequences."""
LEAST_SEQUENCES = 4
"""Minimum number of sequences in each half."""
COLUMNS = {
    "figure": "str", "run_id": "str", "seed": "int64", "layer": "int64", "head": "int64", "chosen": "bool",
    "auc": "float64", "on": "float64", "off": "float64", "with_label": "int64", "without": "int64",
    "initial_chosen": "bool", "initial_auc": "float64",
}  # fmt: skip
"""Columns of the frame of `measure_run`."""


def auc(with_label: np.ndarray, without: np.ndarray) -> float:
    """P(a value with the label > one without) + ½·P(they are equal); NaN if one of the two is empty."""
    pairs = len(with_label) * len(without)
    return float(mannwhitneyu(with_label, without, method="asymptotic").statistic) / pairs if pairs else math.nan


def auc_within(values: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    """The AUC of a label over the pairs of values in the same group; NaN if no group has both kinds.

    All arrays have the shape (N,); `labels` are Boolean, `groups` integers.
    """
    order = np.argsort(groups, kind="stable")
    values, labels, groups = values[order], labels[order], groups[order]
    ends = np.flatnonzero(np.diff(groups)) + 1
    won, pairs = 0.0, 0
    for group_values, group_labels in zip(np.split(values, ends), np.split(labels, ends), strict=True):
        group_pairs = int(group_labels.sum()) * int((~group_labels).sum())
        if group_pairs:
            won += group_pairs * auc(group_values[group_labels], group_values[~group_labels])
            pairs += group_pairs
    return won / pairs if pairs else math.nan


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


def measure_heads(
    predictor: Predictor, figures: Mapping[str, MarkedMaps], sequences: Sequence[Sequence[int]]
) -> dict[str, dict[LayerAndHead, HeadMeasure]]:
    """Name of a figure → the measure of every head; empty if the model does not have what the figure shows.

    `sequences` are token ids.
    """
    task = predictor.run.task
    tokenizer = predictor.tokenizer if predictor.reads_text else None
    labels: dict[str, list[np.ndarray]] = defaultdict(list)
    shows = {figure.show for figure in figures.values()}
    values: dict[Show, dict[LayerAndHead, list[np.ndarray]]] = {show: defaultdict(list) for show in shows}
    groups: dict[Show, list[np.ndarray]] = defaultdict(list)
    for tokens in sequences:
        query, key = _pairs(len(tokens))
        marks = token_marks(task, np.array(tokens), tokenizer)
        for name, figure in figures.items():
            marked_T = marks.get(figure.mark or "", np.zeros(len(tokens), dtype=bool))
            before_T = np.concatenate([[0], marked_T.cumsum()])  # marks before each token
            labels[name].append(marked_T if figure.show == "gates" else before_T[query + 1] == before_T[key])
        groups["gates"].append(np.zeros(len(tokens), dtype=np.int64))
        groups["position_attention"].append(query - key)
        probe_layers(predictor, tokens, partial(_add_values, values))
    measured: dict[str, dict[LayerAndHead, HeadMeasure]] = {}
    for name, figure in figures.items():
        figure_labels, figure_groups = np.concatenate(labels[name]), np.concatenate(groups[figure.show])
        heads = sorted(values[figure.show].items())
        measured[name] = {head: _measure(np.concatenate(parts), figure_labels, figure_groups) for head, parts in heads}
    return measured


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
            values["gates"][layer.layer, head].append(mean_gates(gates.gates_HTT[row]))
        if "position_attention" in values and matrix_HTT is not None:
            values["position_attention"][layer.layer, head].append(matrix_HTT[row][_pairs(matrix_HTT.shape[1])])


def _measure(values: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> HeadMeasure:
    with_label, without = values[labels], values[~labels]
    on = float(with_label.mean()) if len(with_label) else math.nan
    off = float(without.mean()) if len(without) else math.nan
    return HeadMeasure(auc_within(values, labels, groups), on, off, len(with_label), len(without))


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


def chosen_head(predictor: Predictor, figure: MarkedMaps) -> LayerAndHead | None:
    """The head that marks best what a figure shows, on the first half of the sequences; None without any measure."""
    return best_head(measure_heads(predictor, {"": figure}, halves(predictor, figure.split)[0])[""])


@torch.inference_mode()
def measure_run(checkpoint: Path, figures: Mapping[str, MarkedMaps]) -> pd.DataFrame:
    """A line for each head of a run and figure (name → figure):

    figure, run_id, seed, layer, head
    chosen                         whether its AUC on the first half of the sequences is the largest
    auc, on, off                   AUC on the second half; mean values with the label, and without
    with_label, without            number of values with the label, and without
    initial_chosen, initial_auc    the same with the initial weights

    Raises what `Predictor.load` and a probe raise.
    """
    trained = Predictor.load(checkpoint)
    untrained = trained.untrained()
    lines = []
    for split in dict.fromkeys(figure.split for figure in figures.values()):
        of_split = {name: figure for name, figure in figures.items() if figure.split == split}
        first_half, second_half = halves(trained, split)
        chosen = {name: best_head(heads) for name, heads in measure_heads(trained, of_split, first_half).items()}
        initial = {name: best_head(heads) for name, heads in measure_heads(untrained, of_split, first_half).items()}
        measures = measure_heads(trained, of_split, second_half)
        initial_measures = measure_heads(untrained, of_split, second_half)
        lines += [
            {
                "figure": name, "run_id": trained.run.run_id, "seed": trained.run.seed, "layer": head[0],
                "head": head[1], "chosen": head == chosen[name], **vars(measure),
                "initial_chosen": head == initial[name], "initial_auc": initial_measures[name][head].auc,
            }
            for name, heads in measures.items()
            for head, measure in heads.items()
        ]  # fmt: skip
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)
