"""Records of runs and sweeps, which the store keeps, sweeps send, and the REST service and its clients exchange.

They are apart from the code that loads them: a client imports no store.
"""

import re
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cope_sweep.frozen import Frozen, metric_value
from cope_sweep.redaction import redacted_value

Status = Literal["finished", "stopped", "failed", "running", "interrupted", "pending"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""In the order in which texts name them."""

ACTIVE: tuple[Status, ...] = ("pending", "running")
"""A sweep that was submitted, and one that is executed."""
ENDED: tuple[Status, ...] = ("finished", "failed", "stopped")
"""The statuses of runs that a sweep is done with. Interrupted runs are trained further."""

SWEEP_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{1,32}")
"""The ids of sweeps: time of the start, and random digits. Who starts a sweep, or submits it, chooses its id."""

Counts = dict[Status, int]
Value = bool | int | float | str
Message = Annotated[str | None, AfterValidator(redacted_value)]
"""Why a run failed. An older version may have recorded a secret in it."""


def new_sweep_id() -> str:
    """The id of a sweep that starts now."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


class Progress(BaseModel):
    """How far a run is: the fields that its events, its record and the answers about runs have in common.

    A field that is added here is in all of them. `train/loop.py` sets it, the index keeps it in a column of the same
    name (`store/index/tables.py`), and the page shows what `page/status.js` lists.
    """

    # defer_build, as below: a command that reads no record does not wait until its validator is built.
    model_config = ConfigDict(frozen=True, defer_build=True)

    run_id: str
    status: Status = "pending"
    step: int = Field(default=0, description="The last step that is known; of a finished run, the last step.")
    steps: int = Field(default=0, description="Number of training steps.")
    worker_id: str | None = Field(
        default=None, description="The last worker that trained the run, as `host:pid`; null: none has started it."
    )
    message: Message = Field(default=None, description="Why it failed or was stopped, or which file is lost.")
    tokens_per_s: float | None = Field(
        default=None, description="Training tokens per second since its attempt began; null: it is not in training."
    )

    def progress(self) -> dict[str, Any]:
        """These fields alone, for another model that has them, `as_counted`."""
        counted = self.as_counted()
        return {name: getattr(counted, name) for name in Progress.model_fields}

    def as_counted(self) -> Self:
        """The same for answers, which say what counts say: a leased run that waits for its worker is pending."""
        is_waiting = self.status == "running" and self.worker_id is None
        return self.model_copy(update={"status": "pending"}) if is_waiting else self


class RunRecord(Progress):
    """A run of the store: a row of the index, made from the run's folder.

    Reading from the index leaves `spec` empty. `ablations`, `row` and `values` are filled in for answers about runs.
    """

    steps: int | None = Field(  # type: ignore[assignment]
        default=None, description="Number of training steps; null: the run has not started, and no plan has it."
    )
    ablations: list[str] = Field(default=[], description="The ablations that contain the run, by file or by sweep.")
    row: str | None = Field(default=None, description="Its row in the first of these ablations.")
    seed: int | None = Field(default=None, description="null: the run has not started, and no plan has it.")
    attempt: int = Field(default=0, description="Number of times that the run was started.")
    created_ms: int | None = Field(default=None, description="Time of its first start, in ms since 1970.")
    updated_ms: int | None = Field(default=None, description="Time of the last known change, in ms since 1970.")
    ended_ms: int | None = Field(default=None, exclude=True, description="Time at which the last attempt ended.")
    sweep_id: str | None = Field(default=None, description="The sweep that trained the run last.")
    revision: int = Field(
        default=0, exclude=True, description="Grows with every change; no two changes in a store have the same."
    )
    metrics: dict[str, float] = Field(
        default={}, description="Final values of a finished run; of a running one, the newest."
    )
    values: dict[str, Value] = Field(
        default={}, description="The values of the keys by which the runs were filtered and sorted."
    )
    facts: dict[str, Any] = Field(default={}, exclude=True, description="For example parameters, duration and memory.")
    spec: dict[str, Any] | None = Field(default=None, exclude=True, description="The resolved configuration.")

    @classmethod
    def of(cls, run_id: str, status: Status, spec: Mapping[str, Any], **columns: Any) -> "RunRecord":
        """A run as it is written into the index, from documents that were not checked.

        Seed and steps come from the spec; 0 if it cannot be read.
        """
        train = spec.get("train")
        seed, steps = (
            value if isinstance(value, int) else 0
            for value in (spec.get("seed"), train.get("steps") if isinstance(train, Mapping) else 0)
        )
        return cls.model_construct(run_id=run_id, status=status, seed=seed, steps=steps, spec=dict(spec), **columns)

    def value(self, name: str) -> float | None:
        """A metric of the run or a mean of some, or for `facts.<name>` a fact; None if it has none."""
        fact = name.removeprefix("facts.")
        return metric_value(self.metrics, name) if fact == name else self.facts.get(fact)


class RunPage(BaseModel):
    """A page of runs. Of chosen fields, each run has these, `run_id` and `status`, and the values of chosen keys."""

    model_config = ConfigDict(defer_build=True)

    total: int = Field(description="Runs that match, on all pages.")
    limit: int
    offset: int
    next: int | None = Field(default=None, description="The `offset` of the next page; null on the last one.")
    runs: list[RunRecord]


class SweepSummary(BaseModel):
    """A sweep of the store."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    sweep_id: str
    ablation: str
    title: str
    scale: str | None = Field(default=None, description="The scale of the ablation; null: none.")
    sets: list[str] = Field(
        default=[], description="The values of `--set` that decide which runs it has: a variant of the ablation."
    )
    status: Status
    executor: str
    started_ms: int
    ended_ms: int | None
    runs: int
    reused: int = Field(description="Runs that were finished before the sweep.")
    counts: Counts = Field(default={}, description="The present number of its runs by status.")


class SweepPage(BaseModel):
    """Sweeps, newest first."""

    model_config = ConfigDict(defer_build=True)

    total: int
    limit: int
    offset: int
    next: int | None = Field(default=None, description="The `offset` of the next page; null on the last one.")
    sweeps: list[SweepSummary]


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
    steps_left: float = Field(default=0.0, exclude=True, description="Estimated for runs that have not started.")


class Event(Progress):
    """The state of a run at one moment, which it reports while it trains. Picklable, as it crosses processes."""

    metrics: dict[str, float] = {}
    """The latest values by metric name (`train/loss`, `in_dist/token_error`, …)."""
    steps_per_s: float | None = None
    """The speed since the attempt started; only for the terminal."""
    evaluated: bool = False
    """The test sets were evaluated at `step`."""
    warnings: tuple[str, ...] = ()
    """What the run's attempt has warned about so far: an event that is lost takes none with it."""

    def value(self, name: str) -> float | None:
        """A metric of the run or a mean of some; None if it has none."""
        return metric_value(self.metrics, name)

    @classmethod
    def of(cls, record: RunRecord, steps: int) -> "Event":
        """The last event of a run that has ended, from its record.

        `steps` comes from its plan: the spec in its folder may be damaged.
        """
        return cls(**record.progress() | {"steps": steps}, metrics=record.metrics)


Seconds = Annotated[float, Field(gt=0)]
RunLimit = Annotated[int, Field(ge=1, le=1 << 31)]


class Budget(Frozen):
    """Limits of a sweep. Runs that are left then are trained by the next one."""

    time_budget_s: Seconds | None = Field(
        default=None, description="Stop after this time; runs in training write checkpoints first."
    )
    max_runs: RunLimit | None = Field(default=None, description="Train at most this many runs.")
    max_failures: RunLimit | None = Field(default=None, description="Start no more runs after this many have failed.")
