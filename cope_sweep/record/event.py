"""What a run says while it trains: one small message, whoever listens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["pending", "running", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Event:
    """A run's state at a moment. Plain data: it crosses processes."""

    run_id: str
    status: Status
    step: int = 0
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest values, by name (`train/loss`, `in_dist/token_error`, …)."""
    steps_per_s: float | None = None
    worker_id: str = ""
    """The worker that trains it."""
    message: str | None = None
    """Why it failed, in one line."""
