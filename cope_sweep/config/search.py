"""Search and early stopping: `search` and `schedule` of an ablation file decide which runs are trained, and how long.

Neither is part of a run's identity: a run that another search suggests is the same run.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.config.distribution import Distribution
from cope_sweep.config.metric_names import MetricName
from cope_sweep.registry import Kind, Registry

Goal = Literal["min", "max"]
Positive = Annotated[int, Field(ge=1, le=10**9)]
Samples = Annotated[int, Field(ge=1, le=100_000)]
SearchSeed = Annotated[int, Field(ge=0, lt=2**31)]


class ScheduleSpec(Kind):
    """When a sweep stops a run early."""

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
        """What ended a run, where all settings are filled in: `ASHA (in_dist/loss, grace 3 steps)`."""
        return f"{self.NAME or self.kind} ({self.metric}, grace {self.grace} steps)"


class Asha(EarlyStopping):
    """Asynchronous successive halving (Li et al. 2020): few runs pass each rung, at grace × reduction^k steps."""

    NAME: ClassVar[str] = "ASHA"

    kind: Literal["asha"] = "asha"
    reduction: Annotated[float, Field(gt=1)] = Field(
        default=4, description="One of so many runs passes a rung; rungs are that factor apart."
    )


class Median(EarlyStopping):
    """A run is stopped if its best value is worse than the median of the other runs' means up to the same step."""

    NAME: ClassVar[str] = "the median rule"

    kind: Literal["median"] = "median"


SCHEDULERS = Registry("schedule", ScheduleSpec, (NoSchedule, Asha, Median), entry_points="cope_sweep.schedulers")

AnyScheduler = Annotated[ScheduleSpec, SCHEDULERS]
"""Any registered schedule of a sweep: its `kind` (`asha`), or a mapping with its options."""


class SearchSpec(Kind):
    """Which points of the grid and the search space become runs."""

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
    """Runs are suggested one after another by Optuna's TPE sampler, from the results so far.

    The axes of the grid are dimensions of the search, too.
    """

    kind: Literal["optuna"] = "optuna"
    samples: Samples = Field(description="Number of runs to suggest.")
    seed: SearchSeed = Field(default=0, description="Seed of the sampler.")
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


SEARCHES = Registry("search", SearchSpec, (GridSearch, RandomSearch, Optuna), entry_points="cope_sweep.searches")

AnySearch = Annotated[SearchSpec, SEARCHES]
"""Any registered search: its `kind` (`grid`), or a mapping with its options."""
