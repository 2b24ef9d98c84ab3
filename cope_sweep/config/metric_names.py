"""Names of metrics. Those that were renamed keep older ablation files and records readable."""

from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator

RENAMED_METRICS = {"commonest_error": "majority_baseline_error"}
"""Former name → current name, without the test set and the context."""


@lru_cache(maxsize=4096)
def current_metric_name(name: str) -> str:
    """The current name of a metric: `in_dist/commonest_error` → `in_dist/majority_baseline_error`.

    `name` has the form `<test set>/<metric>` or `<test set>/<metric>@<context>`; other names are returned unchanged.
    """
    test_set, slash, metric = name.rpartition("/")
    metric, at, context = metric.partition("@")
    return f"{test_set}{slash}{RENAMED_METRICS.get(metric, metric)}{at}{context}"


MetricName = Annotated[str, AfterValidator(current_metric_name)]
"""A metric as runs report it. Former names are replaced by the current ones."""
