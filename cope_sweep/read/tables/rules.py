"""The errors of simple rules that do not solve a task, by which runs are judged.

The rules are the most frequent answer and the task's shortcuts (`Task.shortcut_errors`). A run is stuck on a test set
if its error is at least `1 - NEAR` times the best rule's error. So the task decides, not the other runs of the row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cope_sweep.config import RunSpec
from cope_sweep.config.ablation import Metric

M = TypeVar("M", bound=Metric)

ERROR = "token_error"
METRIC = re.compile(r"(?P<split>.+)/(?P<measure>[^/]+?)(@(?P<times>\d+)x)?")
SEQUENCES = 2048
"""Number of sequences of each test set on which the rules are evaluated. For longer sequences it is smaller, but at
least `LEAST_SEQUENCES`."""
LEAST_SEQUENCES = 256
NEAR = 0.15
"""A run scores like a rule if their errors differ by at most this share of the rule's error."""
STUCK_SHARE = f"{100 * (1 - NEAR):g} %"
"""The share of a rule's errors from which on a run is stuck, in texts."""


def rule_errors(run: RunSpec, metric: str) -> Mapping[str, float]:
    """Rule → its error in percent on the test set of a metric, such as `in_dist/token_error@4x`.

    Empty if the metric has no rules (`Task.shortcut_errors`), or its task reads a text, which this machine may lack.
    """
    match, task = METRIC.fullmatch(metric), run.task
    if match is None or match["split"] not in task.splits or task.reads_text:
        return {}
    if match["times"] is None:
        return task.shortcut_errors(match["split"], SEQUENCES, match["measure"])
    times = int(match["times"])
    count = max(LEAST_SEQUENCES, SEQUENCES // times)
    return task.longer(times).shortcut_errors(match["split"], count, match["measure"])


def least_rule_error(run: RunSpec, metric: Metric) -> float | None:
    """The smallest error of a rule; None without a rule, or for a metric by which rows are not compared.

    Rules without any error are left out: they say nothing.
    """
    if not metric.compared:
        return None
    return min((error for error in rule_errors(run, metric.name).values() if error > 0), default=None)


def stuck_from(rule_error: float | None) -> float:
    """The smallest error with which a run is stuck at a rule with this error; infinite without a rule."""
    return math.inf if rule_error is None else (1 - NEAR) * rule_error


def has_learned(metric: Metric, value: Any, stuck_from: Any = math.inf) -> Any:
    """Whether a run with this value has learned its task and is not stuck; for pandas series, element by element."""
    return metric.is_learned(value) & (value < stuck_from)


def learning_metric(metrics: Iterable[M]) -> M | None:
    """The first metric or column with `learned`, by which rows are judged; None: no metric has it."""
    return next((metric for metric in metrics if metric.learned is not None), None)
