"""The errors of simple rules that do not solve a task, beside which the errors of runs are judged.

The rules are the most frequent answer and the task's shortcuts (`Task.shortcut_errors`). A run is stuck on a test set
where it does no better than the best of them: its error is at least `1 - NEAR` times the rule's error. So a run is
judged by its task, and not by the other runs of its row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from cope_sweep.config import RunSpec

ERROR = "token_error"
SEQUENCES = 2048
"""Sequences of each test set on which the rules are evaluated; of longer ones fewer, but at least `LEAST_SEQUENCES`."""
LEAST_SEQUENCES = 256
NEAR = 0.15
"""A run errs as a rule does where the errors differ by at most this share of the rule's."""


def rule_errors(run: RunSpec, metric: str) -> Mapping[str, float]:
    """Rule → its error in percent on the test set of a metric, as `in_dist/token_error@4x`.

    Empty where the metric is not a token error, or its task reads a text.
    """
    name, _, length = metric.partition("@")
    split, _, quantity = name.rpartition("/")
    task = run.task
    if quantity != ERROR or split not in task.splits or task.has_windows or (length and not length.endswith("x")):
        return {}
    if not length:
        return task.shortcut_errors(split, SEQUENCES)
    times = int(length[:-1])
    return task.longer(times).shortcut_errors(split, max(LEAST_SEQUENCES, SEQUENCES // times))


def best_rule(run: RunSpec, metric: str) -> tuple[str, float] | None:
    """The rule with the least error, and its error; None without one. A rule without an error says nothing."""
    errors = [(error, rule) for rule, error in rule_errors(run, metric).items() if error > 0]
    if not errors:
        return None
    error, rule = min(errors)
    return rule, error


def stuck_from(rule_error: float | None) -> float:
    """The error from which on a run does no better than a rule with this error; infinite without a rule."""
    return math.inf if rule_error is None else (1 - NEAR) * rule_error


def are_most(seeds: Iterable[int], number: int) -> bool:
    """Whether these are more than half of `number` seeds."""
    return len(list(seeds)) > number / 2
