"""Progress events: the small messages that a run sends while it trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["pending", "running", "finished", "failed", "interrupted", "stopped", "damaged"]


@dataclass(frozen=True)
class Event:
    """The state of a run at one moment. Plain data, so that it can be sent between processes."""

    run_id: str
    status: Status
    step: int = 0
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest values by metric name (`train/loss`, `in_dist/token_error`, …)."""
    steps_per_s: float | None = None
    worker_id: str = ""
    """The worker that trains the run, as `host:pid`."""
    message: str | None = None
    """Why the run failed or was stopped, in one line."""
    evaluated: bool = False
    """Whether the test sets were evaluated at `step`."""
