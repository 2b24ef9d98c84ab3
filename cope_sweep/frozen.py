"""The base of every declared object: frozen, strict, literal; and types of its fields."""

import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


class Frozen(BaseModel):
    """An immutable record of literals: an unknown key or a value of the wrong type raises `ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


# Every size has a limit, so that no text from outside keeps a process busy before anything is trained.
Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGBT])")


def _amount(value: Any) -> Any:
    """The whole number that `300M`, `1.5B` or `3e8` means; other numbers unchanged. Raises ValueError for a text."""
    if isinstance(value, str):
        match = _AMOUNT.fullmatch(value)
        if match is None:
            raise ValueError(f"{value!r} is not an amount; write a whole number, or as in 20k, 300M, 1.5B")
        # Rounded, because 1.005 × 10⁹ is 1004999999.9999999.
        factors = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
        value = round(float(match[1]) * factors[match[2]], 6)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Amount = Annotated[
    int,
    Field(ge=1, le=10**15),
    BeforeValidator(_amount),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 1}, {"type": "string", "pattern": f"^{_AMOUNT.pattern}$"}]}
    ),
]
"""A large whole number: 300000, `300k`, `300M`, `1.5B`, `2T`."""

RENAMED_METRICS = {"commonest_error": "majority_baseline_error"}
"""Former name → current name, without the test set and the context."""


# A curve asks for the same few names at each of its points.
@lru_cache(maxsize=4096)
def current_metric_name(name: str) -> str:
    """The current name of a metric: `in_dist/commonest_error` → `in_dist/majority_baseline_error`.

    `name` has the form `<test set>/<metric>` or `<test set>/<metric>@<context>`; other names are returned unchanged.
    """
    test_set, slash, metric = name.rpartition("/")
    metric, at, context = metric.partition("@")
    return f"{test_set}{slash}{RENAMED_METRICS.get(metric, metric)}{at}{context}"


MetricName = Annotated[str, AfterValidator(current_metric_name)]
"""A metric as runs report it, or a mean of them (`metric_parts`). Former names are replaced by the current ones."""


@lru_cache(maxsize=4096)
def metric_parts(name: str) -> tuple[str, ...]:
    """The metrics that a name is computed from; empty if it names a single metric.

    `validation_and_test/perplexity@512` is the mean of `validation/perplexity@512` and `test/perplexity@512`;
    `test/perplexity@128..512` is how much larger `test/perplexity@512` is than `test/perplexity@128`.
    """
    if (ends := _ends_of_change(name)) is not None:
        return tuple(part for end in ends for part in (metric_parts(end) or (end,)))
    test_sets, _, metric = name.rpartition("/")
    variant, slash, sets = test_sets.rpartition("/")
    names = sets.split("_and_")
    return tuple(f"{variant}{slash}{each}/{metric}" for each in names) if len(names) > 1 and all(names) else ()


def _ends_of_change(name: str) -> tuple[str, str] | None:
    """The metrics at the two contexts that `METRIC@A..B` compares; None for other names."""
    metric, _, contexts = name.partition("@")
    start, dots, end = contexts.partition("..")
    return (f"{metric}@{start}", f"{metric}@{end}") if dots else None


STEPS_UNTIL = "steps_until/"
"""The prefix of a metric that is computed from learning curves: the steps until another one is learned."""
SHARE_LEARNED = "share_learned/"
"""The prefix of a metric that is 100 % for a run that has learned another one, and 0 for others."""
OF_LEARNED = "of_learned/"
"""The prefix of a metric that only runs have that have learned the task."""


def learning_parts(name: str) -> tuple[str, str]:
    """The prefix of a metric that depends on whether a run has learned its task, and the metric that follows it.

    The prefix is empty, and the metric the whole name, for metrics that runs report or that are computed from them.
    """
    prefix = next((each for each in (STEPS_UNTIL, SHARE_LEARNED, OF_LEARNED) if name.startswith(each)), "")
    return prefix, name.removeprefix(prefix)


def is_reported(name: str, reported: Collection[str]) -> bool:
    """Whether a metric, or all that it is computed from, are among those that a run reports."""
    _, name = learning_parts(name)
    parts = metric_parts(name)
    return name in reported or bool(parts and all(part in reported for part in parts))


def metric_value(metrics: Mapping[str, float], name: str) -> float | None:
    """The value of a metric, or what it is computed from its parts; None if a part is missing.

    The mean of perplexities is that of their logarithms: each test set counts as much as another. Of other metrics, it
    is the plain mean. A change from one context to another is the quotient of perplexities, and otherwise a difference.
    """
    if name in metrics:
        return metrics[name]
    if (ends := _ends_of_change(name)) is not None:
        start, end = (metric_value(metrics, each) for each in ends)
        if start is None or end is None:
            return None
        if not name.partition("@")[0].endswith("perplexity"):
            return end - start
        return end / start if start > 0 else None
    parts = metric_parts(name)
    if not parts or not all(part in metrics for part in parts):
        return None
    values = [metrics[part] for part in parts]
    if name.partition("@")[0].endswith("perplexity") and min(values) > 0:
        return math.exp(math.fsum(map(math.log, values)) / len(values))
    return math.fsum(values) / len(values)
