"""What a store says of its sweeps. The REST service's answers are these models, too."""

from pydantic import BaseModel, ConfigDict, Field

from cope_sweep.store.event import Status

ACTIVE: tuple[Status, ...] = ("pending", "running")
"""A sweep that was submitted, and one that is executed."""

Counts = dict[Status, int]


class SweepSummary(BaseModel):
    """A sweep of the store."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    sweep_id: str
    ablation: str
    title: str
    status: Status
    executor: str
    started_ms: int
    ended_ms: int | None
    runs: int
    reused: int = Field(description="Runs that were finished before the sweep.")
    counts: Counts = Field(default={}, description="The present number of its runs by status.")


class FailedMember(BaseModel):
    """A run of a sweep that failed."""

    model_config = ConfigDict(defer_build=True)

    run_id: str
    row: str
    message: str | None


class SweepProgress(BaseModel):
    """The progress of a sweep."""

    model_config = ConfigDict(defer_build=True)

    sweep_id: str
    ablation: str
    status: Status
    runs: int
    counts: Counts
    groups: int | None = Field(default=None, description="Worker groups that train; null: the sweep is not running.")
    nodes: int | None = Field(default=None, description="Machines on which they train.")
    steps_per_s: float | None = Field(default=None, description="Training steps of all runs together; null: not known.")
    eta_s: float | None = Field(default=None, description="Seconds until all steps are done, at this speed.")
    failures: list[FailedMember] = Field(default=[], description="The newest failed runs; `counts` has their number.")
    revision: int = Field(default=0, exclude=True, description="Revision of the index before this was read.")
    steps_done: int = Field(default=0, exclude=True, description="Steps of all its runs.")
    steps_left: float = Field(default=0.0, exclude=True, description="Estimated, where a run was not begun.")
