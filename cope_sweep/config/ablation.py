"""Ablation files: a base configuration, the axes that vary, seeds, metrics, and the numbers published in the paper.

`search` and `schedule` decide which runs are trained, and how long. Neither is part of a run's identity: a run that
another search suggests is the same run. `cope_sweep.read.figures.kinds` has the keys of each kind of `figures`.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import math
import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, Strict, field_validator, model_validator

from cope_sweep.config.resources import Resources
from cope_sweep.config.run import RunSpec
from cope_sweep.config.source import Json, default_label
from cope_sweep.errors import InvalidValue
from cope_sweep.figures import AnyFigure
from cope_sweep.frozen import Frozen, MetricName, Positive, learning_parts
from cope_sweep.registry import Kind, Registry

# -- search ------------------------------------------------------------------------------------------------------------

# Strict validation takes no list for a tuple, and files have only lists.
Floats = Annotated[tuple[float, float], Strict(False)]
Ints = Annotated[tuple[int, int], Strict(False)]


class Distribution(Frozen):
    """One of `uniform`, `log_uniform`, `int_uniform`, `log_int_uniform` and `choice`. Both bounds are included."""

    uniform: Floats | None = Field(default=None, description="[low, high]: a number, each equally likely.")
    log_uniform: Floats | None = Field(
        default=None, description="[low, high]: a positive number whose logarithm is uniform, as for learning rates."
    )
    int_uniform: Ints | None = Field(default=None, description="[low, high]: a whole number, each equally likely.")
    log_int_uniform: Ints | None = Field(
        default=None, description="[low, high]: a positive whole number whose logarithm is uniform, as for sizes."
    )
    choice: Annotated[list[Json], Field(min_length=1)] | None = Field(
        default=None, description="One of these values, each equally likely."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds_given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(kinds_given) != 1:
            kinds = ", ".join(type(self).model_fields)
            raise InvalidValue(
                f"{' and '.join(kinds_given) or 'no distribution'} given; give exactly one of {kinds}",
                code="several_distributions" if kinds_given else "no_distribution",
                given=kinds_given,
                allowed=list(type(self).model_fields),
            )
        if self.choice is not None:
            labels = [default_label(value) for value in self.choice]
            twice = next((label for label in labels if labels.count(label) > 1), None)
            if twice is not None:
                raise InvalidValue(f"choice has {twice} twice; list each value once", key="choice", value=twice)
            return self
        low, high = self.bounds
        if not low < high:
            raise InvalidValue(
                f"{self.kind}: [{low}, {high}] is empty; write the lower bound first", key=self.kind, value=[low, high]
            )
        if self.is_log and low <= 0:
            raise InvalidValue(
                f"{self.kind}: the lower bound {low} must be greater than 0, because its logarithm is taken",
                key=self.kind,
                value=low,
            )
        return self

    @cached_property
    def kind(self) -> str:
        """The name of the distribution: `log_uniform`."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def is_log(self) -> bool:
        """The logarithm of the values is uniform."""
        return self.kind in ("log_uniform", "log_int_uniform")

    @property
    def is_int(self) -> bool:
        """The values are whole numbers."""
        return self.kind in ("int_uniform", "log_int_uniform")

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest number; integers for a distribution of integers."""
        bounds: tuple[float, float] = getattr(self, self.kind)
        return bounds

    def value_at(self, share: float) -> Json:
        """The value below which `share` in [0, 1) of the distribution lies."""
        if self.choice is not None:
            return self.choice[int(share * len(self.choice))]
        low, high = self.bounds
        # A whole number owns the interval of length 1 around it.
        margin = 0.5 if self.is_int else 0.0
        if self.is_log:
            start, end = math.log(low - margin), math.log(high + margin)
            return self.rounded(math.exp(start + share * (end - start)))
        return self.rounded(low - margin + share * (high - low + 2 * margin))

    def rounded(self, number: float) -> float:
        """The number as a run uses it: whole, or with four significant digits, and within the bounds."""
        low, high = self.bounds
        # Four digits keep the names of rows short. Rounding may leave the bounds by a little.
        number = round(number) if self.is_int else float(f"{number:.4g}")
        return min(max(number, low), high)

    def number_of(self, label: str) -> float:
        """The number with the label that tables show. Raises ValueError where the distribution does not have it."""
        number: Any = json.loads(label)
        low, high = self.bounds
        # A bool is an int to Python.
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not low <= number <= high:
            raise InvalidValue(f"{label} is not a number in [{low}, {high}]", value=label, bounds=[low, high])
        if self.is_int and number != int(number):
            raise InvalidValue(f"{label} is not a whole number", value=label)
        return int(number) if self.is_int else float(number)


Goal = Literal["min", "max"]
Samples = Annotated[int, Field(ge=1, le=100_000)]
SearchSeed = Annotated[int, Field(ge=0, lt=2**31)]


class ScheduleSpec(Kind):
    """A rule by which a sweep stops runs early."""

    BARE: ClassVar[bool] = True


class NoSchedule(ScheduleSpec):
    """Every run is trained to its last step."""

    kind: Literal["none"] = "none"


class EarlyStopping(ScheduleSpec):
    """The settings of all schedules that stop runs early."""

    NAME: ClassVar[str] = ""

    metric: MetricName | None = Field(
        default=None,
        description="The metric that runs are compared by at each evaluation; null: the primary metric, on the "
        "validation set where there is one.",
    )
    goal: Goal | None = Field(
        default=None, description="Whether lower or higher values are better; null: as in the metric's column."
    )
    grace: Positive | None = Field(
        default=None,
        description="Steps before which no run is stopped; null: a tenth of the steps, and at least one evaluation.",
    )

    @property
    def rule(self) -> str:
        """The rule in words, where all settings are filled in: `ASHA (in_dist/loss, grace 3 steps)`."""
        return f"{self.NAME or self.kind} ({self.metric}, grace {self.grace} steps)"


class Asha(EarlyStopping):
    """Asynchronous successive halving (Li et al. 2020): few runs pass each rung, at grace × reduction^k steps."""

    NAME: ClassVar[str] = "ASHA"

    kind: Literal["asha"] = "asha"
    reduction: Annotated[float, Field(gt=1)] = Field(
        default=4,
        description="One in this many runs passes a rung, and each rung has this many times the steps of the last.",
    )


class Median(EarlyStopping):
    """A run is stopped if its best value is worse than the median of the other runs' means up to the same step."""

    NAME: ClassVar[str] = "the median rule"

    kind: Literal["median"] = "median"


SCHEDULERS = Registry("schedule", ScheduleSpec, (NoSchedule, Asha, Median), entry_points=None)

AnyScheduler = Annotated[ScheduleSpec, SCHEDULERS]
"""Any registered schedule of a sweep: its `kind` (`asha`), or a mapping with its options."""


class SearchSpec(Kind):
    """The choice of points of the grid and of the search space that become runs."""

    BARE: ClassVar[bool] = True


class GridSearch(SearchSpec):
    """Every point of the grid."""

    kind: Literal["grid"] = "grid"


class RandomSearch(SearchSpec):
    """Every point of the grid, each with the same random draws from the space, so that points can be compared."""

    kind: Literal["random"] = "random"
    samples: Samples = Field(description="Draws for each point of the grid. Equal draws are one row.")
    seed: SearchSeed = Field(default=0, description="Seed of the draws. More samples keep the earlier draws.")
    space: Annotated[dict[str, Distribution], Field(min_length=1)] = Field(
        description="Dotted key of a run → its distribution, for example `train.lr: {log_uniform: [1e-4, 1e-2]}`."
    )


class Optuna(SearchSpec):
    """Rows are suggested one after another by Optuna's TPE sampler, from the results so far.

    The axes of the grid are dimensions of the search, too.
    """

    kind: Literal["optuna"] = "optuna"
    samples: Samples = Field(description="Number of rows to suggest: points of the space.")
    seed: SearchSeed = Field(default=0, description="Seed of the sampler.")
    seeds_per_sample: Positive | None = Field(
        default=None,
        description="Each sample is trained with this many of the ablation's `seeds`, the first ones, and the mean of "
        "the metric is optimised; null: with all of them.",
    )
    metric: MetricName | None = Field(
        default=None,
        description="The metric to optimise; null: the primary metric, on the validation set where there is one.",
    )
    goal: Goal | None = Field(
        default=None, description="Whether lower or higher values are better; null: as in the metric's column."
    )
    space: dict[str, Distribution] = Field(
        default={}, description="Dotted key of a run → its distribution, in addition to the axes of the grid."
    )


SEARCHES = Registry("search", SearchSpec, (GridSearch, RandomSearch, Optuna), entry_points=None)

AnySearch = Annotated[SearchSpec, SEARCHES]
"""Any registered search: its `kind` (`grid`), or a mapping with its options."""


# -- the file ----------------------------------------------------------------------------------------------------------


def _not_empty(axis: list[Json] | dict[str, Json]) -> list[Json] | dict[str, Json]:
    if not axis:
        raise InvalidValue(f"the axis is empty ({json.dumps(axis)}); give it a value, or remove it", value=axis)
    return axis


Axis = Annotated[list[Json] | dict[str, Json], AfterValidator(_not_empty)]
"""The values of one key: a list, or a mapping from the label that tables show to the value."""

Point = dict[str, Json]
"""Dotted keys of a run with values. As a condition, a list of values means: any of these."""

Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""Same bounds as `RunSpec.seed`."""


def _module_name(name: str) -> str:
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise InvalidValue(
            f"{name!r} is not the name of a Python module; write identifiers joined by dots, "
            "as in my_package.my_encoding",
            code="plugin_name",
            plugin=name,
        )
    return name


Plugins = list[Annotated[str, AfterValidator(_module_name)]]
"""Names of Python modules."""


class Condition(Frozen):
    """Further axes and values for the points that match `if`."""

    match: Point = Field(
        alias="if", description="Dotted keys, and the labels or values that a point must have; of a list, any."
    )
    grid: dict[str, Axis] = Field(default={}, description="Axes to add to these points.")
    set: Point = Field(default={}, description="Values to set in these points; they replace an axis value.")

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.grid and not self.set:
            raise InvalidValue("a condition without `set` and `grid` has no effect; add one of them, or remove it")
        return self


class Metric(Frozen):
    """A column of the table."""

    name: MetricName = Field(
        description="As runs report it: `in_dist/token_error`, `test/perplexity@2048`, `facts.tokens_per_s`, … Or the "
        "mean over test sets, `validation_and_test/perplexity`: of perplexities, that of their logarithms. Or the "
        "change from one context to another, `test/perplexity@128..512`: of perplexities, their quotient. Or "
        "`steps_until/METRIC`: the steps until METRIC, another column, is `learned`; all steps if it never is. Or "
        "`share_learned/METRIC`: 100 % for a run that has learned METRIC, another column, and 0 for others. Or "
        "`of_learned/METRIC`: METRIC of the runs that have learned the first column with `learned`. Runs without the "
        "metric, of another task for example, have an empty cell."
    )
    label: str | None = Field(default=None, description="The column's title; null: the name.")
    goal: Goal = Field(default="min", description="Whether lower or higher values are better.")
    compared: bool = Field(
        default=True,
        description="Whether rows are compared by it. False: it describes the data or the cost of a row, so that no "
        "value is the best, none is a stuck seed, and none is tested.",
    )
    unit: str = Field(default="", description="Shown in the title, for example `%`.")
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Tables print values times this factor: 1e-6 and the unit `M` for millions. Exported values, "
        "as in CSV and JSON, are not scaled.",
    )
    decimals: Annotated[int, Field(ge=0, le=6)] = Field(default=2, description="Digits after the decimal point.")
    learned: Annotated[float | None, Field(allow_inf_nan=False)] = Field(
        default=None,
        description="For a task that a run learns or does not learn: a run whose value is at least as good as this one "
        "has learned it. Tables then show the share of the seeds that have, with its interval.",
    )

    def is_learned(self, value: Any) -> Any:
        """Whether a run with this value has learned the task; for a pandas series, element by element."""
        if self.learned is None:
            return False
        return value <= self.learned if self.goal == "min" else value >= self.learned

    @property
    def title(self) -> str:
        """The label with its unit."""
        text = self.label or self.name
        return f"{text} ({self.unit})" if self.unit else text


class Published(Frozen):
    """The paper's numbers for one row, shown beside the measured ones."""

    match: Point = Field(
        description="The row: axis keys, and labels or values. If several entries match a row, the first is shown."
    )
    values: dict[MetricName, float] = Field(description="Metric name → published value.")
    std: dict[MetricName, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="Metric name → published standard deviation."
    )
    seeds: Annotated[int | None, Field(ge=2, le=10**9)] = Field(
        default=None,
        description="Number of runs behind the values that have a standard deviation; null: the source does not say. "
        "A comparison then assumes 2, the smallest number that has a standard deviation.",
    )
    source: str = Field(default="", description="Where the numbers are from, for example `Table 1`.")

    @model_validator(mode="after")
    def _deviations_have_values(self) -> Self:
        for name in self.std.keys() - self.values.keys():
            raise InvalidValue(f"std has {name!r}, and values do not; a deviation needs a value", key="std", value=name)
        return self


_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


def _margin(value: float | str) -> float | str:
    """The margin, a share as `1 %`. Raises InvalidValue unless it is a number above 0, or such a share in percent."""
    number = value
    if isinstance(value, str):
        match = _PERCENT.fullmatch(value.strip())
        number = float(match[1]) if match else 0.0
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise InvalidValue(
            f"{value!r} is not a margin; write a number above 0 in the units of the column, as in 0.5, or a share of "
            "the mean, as in 1 %",
            code="margin",
            value=value,
        )
    return f"{number:.15g} %" if isinstance(value, str) else value


def margin_value(margin: float | str, mean: float, scale: float) -> float:
    """A margin as a difference of values of a metric.

    Args:
        margin: A number in the units in which a table shows the metric, or a share of the mean, as in 1 %.
        mean: The mean of the row called worse.
        scale: The factor by which the table multiplies values.

    Raises InvalidValue if it is neither.
    """
    _margin(margin)
    if isinstance(margin, str):
        return abs(mean) * float(margin.strip().rstrip("% ")) / 100
    return margin / scale


def _matched(point: Point) -> dict[str, Json]:
    """Key → the labels or values that a point may have, in one form and order."""
    choices = {key: value if isinstance(value, list) else [value] for key, value in point.items()}
    return {key: sorted(default_label(value) for value in values) for key, values in choices.items()}


Says = Literal["better", "equivalent", "not worse"]


class Claim(Frozen):
    """A statement that some rows are better than others, or equivalent. Reports say whether the runs show it."""

    text: str = Field(description="The statement, in a sentence.")
    source: str = Field(default="", description="Where the paper makes it, for example `Table 2`.")
    better: Point = Field(
        description="The rows that are better: axis keys, and labels or values; of a list, any. A row is compared with "
        "the rows of `than` that have the same labels of all axes which neither of the two names, or both with the "
        "same values."
    )
    than: Point = Field(description="The rows that they are better than, in the same form.")
    metric: MetricName | None = Field(default=None, description="The column that decides; null: the primary metric.")
    variant: str | None = Field(
        default=None,
        description="The rows of `better` are judged as this variant of `evaluate.variants` evaluates them: with "
        "`capped`, by the column capped/METRIC.",
    )
    than_variant: str | None = Field(
        default=None,
        description="The variant of the rows of `than`.",
    )
    says: Says = Field(
        default="better",
        description="What it says of the rows of `better`: that they are better than those of `than`, equivalent to "
        "them (they differ by less than `margin`), or not worse by more than `margin`.",
    )
    margin: Annotated[float | str, AfterValidator(_margin)] | None = Field(
        default=None,
        description="The smallest difference that matters: in the units in which the table shows the column (0.5), or "
        "a share of the mean of the row of `than` (1 %). Needed for `equivalent` and `not worse`; with `better`, "
        "reports say whether the difference matters.",
    )

    note: str = Field(
        default="",
        description="What a reader has to know beside the verdict: why the runs do not show it, what would settle it.",
    )

    @model_validator(mode="after")
    def _has_margin(self) -> Self:
        if self.says != "better" and self.margin is None:
            raise InvalidValue(
                f"a claim that says {self.says!r} needs the smallest difference that matters; add `margin: 0.5`, in "
                "the units of the column, or `margin: 1 %`",
                code="no_margin",
                says=self.says,
            )
        return self

    @property
    def differing_axes(self) -> frozenset[str]:
        """The keys that one side alone names, or both with other values: the rows of a pair may differ in them."""
        better, than = _matched(self.better), _matched(self.than)
        return frozenset(key for key in better.keys() | than.keys() if better.get(key) != than.get(key))

    def margin_at(self, mean: float, scale: float) -> float | None:
        """The margin as a difference of values of the metric; None without one.

        Args:
            mean: The mean of the row called worse.
            scale: The factor by which the table multiplies values.
        """
        return None if self.margin is None else margin_value(self.margin, mean, scale)

    def identity(self, primary: str, *, is_paired: bool = False) -> str:
        """16 hex digits that stand for what is claimed, whatever its wording: rows, direction, column and test.

        The margin belongs to it where the verdict depends on it. `primary` is the metric that decides where the claim
        names none. `is_paired`: the ablation compares runs in pairs, so that another p decides.
        """
        claimed: dict[str, Json] = {
            "better": _matched(self.better),
            "than": _matched(self.than),
            "metric": self.metric or primary,
            "than_variant": self.than_variant,
        }
        if self.variant is not None:
            claimed |= {"variant": self.variant}
        if self.says != "better":
            claimed |= {"says": self.says, "margin": str(self.margin)}
        if is_paired:
            claimed |= {"paired": True}
        return hashlib.sha256(json.dumps(claimed, sort_keys=True).encode()).hexdigest()[:16]

    def columns(self, primary: str) -> tuple[str, str]:
        """The columns that decide for the rows of `better` and for those of `than`."""
        metric = self.metric or primary
        better, than = (
            metric if variant is None else f"{variant}/{metric}" for variant in (self.variant, self.than_variant)
        )
        return better, than


class Scale(Frozen):
    """A named size of the same ablation, chosen with `--scale NAME`."""

    description: str = ""
    title: str | None = Field(
        default=None, description="A title that replaces the ablation's own: of another text, say."
    )
    set: Point = Field(default={}, description="Dotted keys of a run, and values that replace the values in base.")
    grid: dict[str, Axis] = Field(default={}, description="Axes that replace the axes with the same keys.")
    exclude: list[Point] | None = Field(default=None, description="Exclusions that replace the ablation's own.")
    seeds: Annotated[list[Seed] | None, Field(min_length=1)] = Field(
        default=None, description="Seeds that replace the ablation's own."
    )
    metrics: Annotated[list[Metric] | None, Field(min_length=1)] = Field(
        default=None, description="Columns that replace the ablation's own."
    )
    primary: MetricName | None = Field(default=None, description="A primary metric that replaces the ablation's own.")
    exploratory: bool | None = Field(default=None, description="Replaces the ablation's own.")
    paired: bool | None = Field(default=None, description="Replaces the ablation's own.")
    claims: list[Claim] | None = Field(default=None, description="Claims that replace the ablation's own.")
    published: list[Published] | None = Field(
        default=None,
        description="Published numbers that replace the ablation's own; [] where a scale cannot be compared with them.",
    )
    search: AnySearch | None = Field(default=None, description="A search that replaces the ablation's own.")
    schedule: AnyScheduler | None = Field(default=None, description="A schedule that replaces the ablation's own.")


class Ablation(Frozen):
    """The content of an ablation file."""

    title: str = Field(description="The heading of tables, figures and reports.")
    inherit: str | None = Field(
        default=None,
        description="The name of another file in the same folder, without suffix. Its keys hold where this file has "
        "none, except title, hypothesis, reproduces, tuned, claims and figures. Mappings merge by key; an axis of the "
        "grid and a mapping of another `kind` are replaced as a whole; null removes an inherited axis or scale.",
    )
    hypothesis: str = Field(default="", description="What you expect, in a sentence; reports show it.")
    reproduces: str = Field(default="", description="The table or figure of the paper that this ablation reproduces.")
    plugins: Plugins = Field(
        default=[],
        description="Python modules to import first, such as `my_package.my_encoding`: they register encodings, tasks, "
        "optimisers, figures, …",
    )
    base: dict[str, Json] = Field(description="The keys of a run (task, model, train, evaluate) that do not vary.")
    grid: dict[str, Axis] = Field(default={}, description="Dotted key → its values; every combination is a row.")
    when: list[Condition] = Field(default=[], description="Further axes and values for some combinations only.")
    exclude: list[Point] = Field(
        default=[], description="Combinations to leave out: those that match any entry, each entry with all its keys."
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(
        default=[0], description="Each row is trained once per seed."
    )
    metrics: Annotated[list[Metric], Field(min_length=1)] = Field(description="The table's columns.")
    primary: MetricName | None = Field(
        default=None,
        description="The metric that decides; null: the first. Rows are tested by it alone, the others are "
        "descriptive. Searches, schedules and the best run of a row go by it, too; if it is `share_learned/METRIC`, "
        "by METRIC.",
    )
    exploratory: bool = Field(
        default=False,
        description="Whether the recipe was chosen by looking at the reported results. Reports say so.",
    )
    paired: bool = Field(
        default=False,
        description="Whether runs of the same seed are compared in pairs: for rows that start from the same weights "
        "and see the same batches, as in language modelling. Decide before you look at results.",
    )
    tuned: str | None = Field(
        default=None,
        description="The ablation that chose the recipe of each row (its learning rate, say), all rows by the same "
        "draws and on other seeds than those reported; null: one recipe for all rows. Where several files make a claim "
        "about the same task in the same words, the tuned ones decide. A file of this name must be in the same folder.",
    )
    claims: list[Claim] = Field(
        default=[], description="What the hypothesis says about the rows, so that reports can say whether it holds."
    )
    search: AnySearch = Field(default=GridSearch(), description="Which runs are trained.")
    schedule: AnyScheduler = Field(default=NoSchedule(), description="Which runs are stopped early.")
    published: list[Published] = Field(default=[], description="Numbers of a paper, shown beside yours.")
    figures: list[AnyFigure] = Field(default=[], description="What to draw from the runs, in addition to the table.")
    scales: dict[str, Scale] = Field(default={}, description="Named sizes of the same question: `--scale NAME`.")
    resources: Resources = Field(default=Resources(), description="How runs use machines; never part of a run's id.")

    @property
    def has_claims(self) -> bool:
        """The ablation claims something about its rows, or one of its figures about heads."""
        return bool(self.claims) or any(figure.has_claim for figure in self.figures)

    @property
    def primary_metric(self) -> Metric:
        """The metric that rows are tested by."""
        return next((metric for metric in self.metrics if metric.name == self.primary), self.metrics[0])

    @property
    def measured_metric(self) -> Metric:
        """The primary metric; where that one depends on when another is learned, this other one, which runs report."""
        name = learning_parts(self.primary_metric.name)[1]
        # Of these metrics, only those of `of_learned` need no such column: they have its goal.
        return next((m for m in self.metrics if m.name == name), self.primary_metric.model_copy(update={"name": name}))

    @property
    def row_seeds(self) -> list[int]:
        """The seeds that each row is trained with: all; or as many as a search takes for each sample."""
        return self.seeds[: self.search.seeds_per_sample if isinstance(self.search, Optuna) else None]

    @field_validator("metrics", mode="after")
    @classmethod
    def _metrics_differ(cls, metrics: list[Metric]) -> list[Metric]:
        names = [metric.name for metric in metrics]
        for name in names:
            if names.count(name) > 1:
                raise InvalidValue(f"two columns are {name!r}; leave one out", key="metrics", value=name)
        return metrics

    @field_validator("seeds", mode="after")
    @classmethod
    def _seeds_differ(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise InvalidValue(f"seeds {seeds} contain duplicates; list each seed once", key="seeds", value=seeds)
        return seeds


def ablation_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of an ablation file.

    No key of `base` is required, because an axis may supply it.
    """
    schema = Ablation.model_json_schema(by_alias=True)
    run = RunSpec.model_json_schema()
    definitions = run.pop("$defs") | schema.pop("$defs")
    for key in ("required", "title"):
        run.pop(key, None)
    del run["properties"]["seed"]
    run["description"] = "The keys of a run that do not vary."
    schema["properties"]["base"] = run
    schema["$defs"] = definitions
    # A file that inherits has the other required keys from there.
    needed = [key for key in schema["required"] if key != "title"]
    schema["required"] = ["title"]
    schema["anyOf"] = [{"required": ["inherit"]}, {"required": needed}]
    # There, null removes an inherited axis or scale.
    for part in (
        schema["properties"]["grid"],
        schema["properties"]["scales"],
        definitions["Scale"]["properties"]["grid"],
    ):
        part["additionalProperties"] = {"anyOf": [part["additionalProperties"], {"type": "null"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A cope-sweep ablation"}
