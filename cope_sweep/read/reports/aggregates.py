"""Aggregates over the tasks of an ablation: interquartile mean and probability of improvement.

Both measures come from Agarwal et al. 2021 (arXiv 2108.13264). Errors of different tasks have no common scale, so a
score is a row's error ÷ the error of the best simple rule on the same test set (`tables.rules`): 0 is solved, and 1 is
no better than a rule that does not solve the task. Seeds are resampled within each task (stratified bootstrap).

They are implemented here because `rliable`, the authors' library, is archived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import trim_mean

from cope_sweep.read.numbers import MISSING, interval_text
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.model import TASK, TableModel, first_rows
from cope_sweep.read.tables.stats import RESAMPLES, TAILS

FEW_SEEDS = 10
"""With fewer seeds, a percentile interval is too narrow."""

TaskScores = Mapping[str, Sequence[float]]
"""Task → the score of each seed."""


def interquartile_mean(scores: TaskScores) -> tuple[float, float, float]:
    """The mean of the middle half of all scores of all tasks, and its 95 % interval."""
    rng = np.random.default_rng(0)
    drawn = [rng.choice(np.asarray(seeds, dtype=np.float64), (RESAMPLES, len(seeds))) for seeds in scores.values()]
    low, high = np.quantile(trim_mean(np.concatenate(drawn, axis=1), 0.25, axis=1), TAILS)
    return float(trim_mean(np.concatenate(list(scores.values())), 0.25)), float(low), float(high)


def probability_of_improvement(scores: TaskScores, others: TaskScores) -> tuple[float, float, float]:
    """The probability that a seed has a lower score than a seed of `others`, and its 95 % interval.

    It is the mean over the tasks that both have. Equal scores count one half.
    """
    rng = np.random.default_rng(0)
    means, drawn = [], []
    for task in filter(others.__contains__, scores):  # in a fixed order, so that random numbers are reproducible
        score, other = np.asarray(scores[task])[:, None], np.asarray(others[task])[None, :]
        wins = (score < other) + 0.5 * (score == other)
        n, m = wins.shape
        rows, columns = rng.integers(n, size=(RESAMPLES, n, 1)), rng.integers(m, size=(RESAMPLES, 1, m))
        means.append(wins.mean())
        drawn.append(wins[rows, columns].mean(axis=(1, 2)))
    low, high = np.quantile(np.mean(drawn, axis=0), TAILS)
    return float(np.mean(means)), float(low), float(high)


def aggregates(model: TableModel, reference: str | None) -> Layout | None:
    """One line per encoding, best first, by the primary metric; None for fewer than two tasks that report it.

    Args:
        model: The table. Rows with fewer than two seeds on a task, with an infinite value, or with a run that failed or
            has no value, are left out: seeds that diverge are often the worst ones.
        reference: The label of the rows to compare the others with; None: no comparison.
    """
    if TASK not in model.axes:
        return None
    primary = model.primary.name
    reporting = [row for row in model.rows if TASK in row.labels and primary in row.runs[0][0].metrics]
    tasks = dict.fromkeys(row.labels[TASK] for row in reporting)
    scores_of: dict[str, dict[str, list[float]]] = {}
    without_values: dict[str, None] = {}  # an ordered set
    for row in reporting:
        cell = row.metrics[primary]
        name = " · ".join(label for key, label in row.labels.items() if key != TASK)
        if cell.lost:
            without_values[name] = None
        elif cell.rule_error and len(cell.values) > 1 and all(map(math.isfinite, cell.values.values())):
            scores = [value / cell.rule_error for value in cell.values.values()]
            scores_of.setdefault(name, {})[row.labels[TASK]] = scores
    complete = {name: by_task for name, by_task in scores_of.items() if len(by_task) == len(tasks)}
    if len(tasks) < 2 or len(complete) < 2:
        return None
    means = {name: interquartile_mean(by_task) for name, by_task in complete.items()}
    against = complete.get(reference or "")
    lines = []
    for name in sorted(means, key=lambda name: means[name][0]):
        texts = [name, interval_text(*means[name])]
        if name == reference:
            texts.append(MISSING)
        elif against is not None:
            texts.append(interval_text(*probability_of_improvement(complete[name], against)))
        lines.append(tuple(map(TextCell, texts)))
    headers = [ColumnHeader("row", numeric=False), ColumnHeader("interquartile mean")]
    headers += [ColumnHeader(f"P(better than {reference})")] * (against is not None)
    seeds = min(len(values) for by_task in complete.values() for values in by_task.values())
    return Layout(tuple(headers), tuple(lines), _note(model, len(tasks), seeds, list(without_values)))


def _note(model: TableModel, tasks: int, seeds: int, without_values: Sequence[str]) -> str:
    note = (
        f"Over {tasks} tasks with at least {seeds} seeds each. A score is {model.primary.label} ÷ the error of the "
        "best simple rule on the same test set: 0 is solved, 1 is no better than the rule. Interquartile mean: the "
        "mean of the middle half of all scores. P: the probability that a seed of the row has the lower score on a "
        "task; ties count one half (Agarwal et al. 2021). In brackets: 95 % intervals by bootstrap within each task."
    )
    if seeds < FEW_SEEDS:
        note += f" With {seeds} seeds these intervals are too narrow: read them as a description, not as a test."
    if without_values:
        note += f" Left out, because runs failed or have no value: {first_rows(without_values)}."
    return note
