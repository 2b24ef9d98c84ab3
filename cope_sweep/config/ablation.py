"""Ablation files: a base configuration, the axes that vary, seeds, metrics, and the numbers published in the paper."""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from cope_sweep.config.explain import explain_all
from cope_sweep.config.figure import AnyFigure
from cope_sweep.config.inherit import with_inherited
from cope_sweep.config.metric_names import MetricName
from cope_sweep.config.resources import Resources
from cope_sweep.config.search import AnyScheduler, AnySearch, Goal, GridSearch, NoSchedule
from cope_sweep.config.source import Json, Source, SpecError, read_source
from cope_sweep.frozen import Frozen
from cope_sweep.registry import PluginError, load_plugins

Axis = list[Json] | dict[str, Json]
"""The values of one key: a list, or a mapping from the label that tables show to the value."""

Point = dict[str, Json]
"""Dotted keys of a run with values. As a condition, a list of values means: any of these."""

Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""The bounds are those of `RunSpec.seed`."""


def _module_name(name: str) -> str:
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
        raise ValueError(
            f"{name!r} is not the name of a Python module; write identifiers joined by dots, "
            "as in my_package.my_encoding"
        )
    return name


class Condition(Frozen):
    """Further axes and values for the points that match `if`."""

    match: Point = Field(
        alias="if", description="Dotted keys, and the labels or values that a point must have; of a list, any."
    )
    grid: dict[str, Axis] = Field(default={}, description="Axes to add to these points.")
    set: Point = Field(
        default={},
        description="Values to set in these points; they replace an axis value. Keys `resources.…` (workers, cpus, "
        "gpus, …) give the runs resources of their own, which are no part of what a run is.",
    )


class Metric(Frozen):
    """A column of the table."""

    name: MetricName = Field(
        description="As runs report it: `in_dist/token_error`, `test/perplexity@2048`, `facts.tokens_per_s`, …"
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
        "such as those of CSV and JSON, are not scaled.",
    )
    decimals: Annotated[int, Field(ge=0, le=6)] = Field(default=2, description="Digits after the decimal point.")
    learned: Annotated[float | None, Field(allow_inf_nan=False)] = Field(
        default=None,
        description="For a task that a run learns or does not learn: a run whose value is at least as good as this one "
        "has learned it. Tables then show the share of the seeds that have, with its interval.",
    )

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
    std: dict[MetricName, float] = Field(default={}, description="Metric name → published standard deviation.")
    seeds: Annotated[int | None, Field(ge=2, le=10**9)] = Field(
        default=None,
        description="Number of runs behind the values that have a standard deviation; null: the source does not say. "
        "A comparison then assumes 2, the smallest number that has a standard deviation.",
    )
    source: str = Field(default="", description="Where the numbers are from, for example `Table 1`.")


class Scale(Frozen):
    """A named size of the same ablation, chosen with `--scale NAME`."""

    description: str = ""
    title: str | None = Field(
        default=None, description="A title that replaces the ablation's own: of another text, say."
    )
    set: Point = Field(default={}, description="Dotted keys of a run, and values that replace those of the base.")
    grid: dict[str, Axis] = Field(default={}, description="Axes that replace those of the same key.")
    exclude: list[Point] | None = Field(default=None, description="Exclusions that replace the ablation's own.")
    seeds: Annotated[list[Seed] | None, Field(min_length=1)] = Field(
        default=None, description="Seeds that replace the ablation's own."
    )
    metrics: Annotated[list[Metric] | None, Field(min_length=1)] = Field(
        default=None, description="Columns that replace the ablation's own."
    )
    primary: MetricName | None = Field(default=None, description="A primary metric that replaces the ablation's own.")
    exploratory: bool | None = Field(default=None, description="Replaces the ablation's own.")
    published: list[Published] | None = Field(
        default=None,
        description="Published numbers that replace the ablation's own; [] where a scale cannot be compared with them.",
    )
    search: AnySearch | None = Field(default=None, description="A search that replaces the ablation's own.")
    schedule: AnyScheduler | None = Field(default=None, description="A schedule that replaces the ablation's own.")


class Ablation(Frozen):
    """The content of an ablation file."""

    title: str
    inherit: str | None = Field(
        default=None,
        description="The name of another file of the same folder, without suffix. Its keys are used where this file "
        "does not have them, except title, hypothesis, reproduces and figures. A key given here replaces the inherited "
        "one; mappings merge by key. An axis of the grid and a mapping of another `kind` are replaced as a whole; null "
        "removes an inherited axis or scale. Runs that both files have are the same runs, and are trained once.",
    )
    hypothesis: str = ""
    reproduces: str = Field(default="", description="The table or figure of the paper that this ablation reproduces.")
    plugins: list[Annotated[str, AfterValidator(_module_name)]] = Field(
        default=[],
        description="Python modules to import first, as `my_package.my_encoding`; they register encodings, tasks, …",
    )
    base: dict[str, Json] = Field(description="The keys of a run (task, model, train, evaluate) that do not vary.")
    grid: dict[str, Axis] = Field(default={}, description="Dotted key → its values; every combination is a row.")
    zip: list[dict[str, list[Json]]] = Field(
        default=[], description="Groups of axes that vary together: the first values of all, the second, …"
    )
    when: list[Condition] = Field(default=[], description="Further axes and values for some combinations only.")
    exclude: list[Point] = Field(
        default=[], description="Combinations to leave out: those that match any entry, each entry with all its keys."
    )
    include: list[Point] = Field(default=[], description="Single rows to add to the grid.")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(default=[0], description="Each row is run once per seed.")
    metrics: Annotated[list[Metric], Field(min_length=1)] = Field(description="The table's columns.")
    primary: MetricName | None = Field(
        default=None,
        description="The metric of `metrics` that the hypothesis is about; null: the first. Rows are tested by it "
        "alone, the others are descriptive. Searches, schedules and the best run of a row go by it, too.",
    )
    exploratory: bool = Field(
        default=False,
        description="Whether the recipe was chosen by looking at results like those that are reported. Reports say so.",
    )
    search: AnySearch = Field(
        default=GridSearch(),
        description="Which runs are trained. grid: every row of the grid. random: every row with random draws from a "
        "space. optuna: runs that are suggested from the results so far.",
    )
    schedule: AnyScheduler = Field(
        default=NoSchedule(),
        description="Which runs are stopped early. none: no run. asha: asynchronous successive halving. median: runs "
        "that are worse than the median.",
    )
    published: list[Published] = []
    figures: list[AnyFigure] = Field(default=[], description="What to draw from the runs, in addition to the table.")
    scales: dict[str, Scale] = {}
    resources: Resources = Resources()

    @property
    def primary_metric(self) -> Metric:
        """The metric that rows are tested by."""
        return next((metric for metric in self.metrics if metric.name == self.primary), self.metrics[0])

    @field_validator("grid", mode="after")
    @classmethod
    def _axes_have_values(cls, grid: dict[str, Axis]) -> dict[str, Axis]:
        for key, values in grid.items():
            if not values:
                raise ValueError(f"the axis {key!r} is empty; give it a value, or remove the axis")
        return grid

    @field_validator("seeds", mode="after")
    @classmethod
    def _seeds_differ(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds {seeds} contain duplicates; list each seed once")
        return seeds

    @model_validator(mode="after")
    def _zipped_lengths_agree(self) -> Self:
        for group in self.zip:
            lengths = {key: len(values) for key, values in group.items()}
            if len(set(lengths.values())) != 1 or 0 in lengths.values():
                listed = ", ".join(f"{key} has {n}" for key, n in lengths.items())
                raise ValueError(f"zipped axes need the same number of values, at least one: {listed}")
        return self


@dataclass(frozen=True)
class LoadedAblation:
    """An ablation with its name and the source file that error messages refer to."""

    name: str
    content: Ablation
    source: Source
    replaced: tuple[str, ...] = ()
    """Keys that a scale or `--set` has replaced and that decide what is trained: not what the paper trained."""


def validate(source: Source, name: str, *, folder: Path | None = None, allow_plugins: bool = True) -> LoadedAblation:
    """The ablation in a parsed file. Imports its plugins.

    Base and axes are validated later, when the ablation is expanded: only whole runs can be.

    Args:
        source: The parsed file.
        name: The ablation's name.
        folder: The only folder of files that it may inherit from; None: it may not inherit.
        allow_plugins: Whether it, or a file that it inherits from, may name plugins.

    Raises SpecError with one line per problem.
    """
    if source.data.get("inherit") is not None and not source.parents:
        source = with_inherited(source, folder)
    try:
        content = Ablation.model_validate(source.data)
    except ValidationError as error:
        problems = [str(source.error(*problem)) for problem in explain_all(error, Ablation)]
        raise SpecError("\n".join(problems)) from error
    if content.plugins and not allow_plugins:
        raise source.error(
            ("plugins",),
            f"plugins ({', '.join(content.plugins)}) are not allowed here, because importing them runs code; remove "
            "the key. The operator can install the plugins and declare them as entry points or in COPE_SWEEP_PLUGINS",
        )
    for index, module in enumerate(content.plugins):
        try:
            load_plugins([module])
        except PluginError as error:
            raise source.error(("plugins", index), str(error)) from error
    return LoadedAblation(name, content, source)


def load_ablation(path: Path, *, allow_plugins: bool = True) -> LoadedAblation:
    """Read an ablation file and import its plugins. The ablation's name is the file's name without suffix.

    Raises SpecError; also where the file names plugins and `allow_plugins` is false.
    """
    return validate(read_source(path), path.stem, folder=path.parent, allow_plugins=allow_plugins)
