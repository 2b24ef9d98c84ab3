"""Questions about sweeps."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cope_sweep.api.question import Answer, Question
from cope_sweep.records import Progress, Status, SweepPage, SweepSummary

SweepId = Annotated[str, Field(description="The id of a sweep.")]


class ListSweeps(Question[SweepPage]):
    """The sweeps of the store, newest first, with the current number of their runs by status."""

    PATH = "/sweeps"
    WORK = "answers"

    ablation: Annotated[str | None, Field(max_length=200, description="Only the sweeps of this ablation.")] = None
    limit: Annotated[int, Field(ge=1, le=1000, description="Maximum number of sweeps.")] = 100
    offset: Annotated[int, Field(ge=0, le=2**31, description="Number of sweeps to skip.")] = 0


class SweepMember(Progress):
    """A run of a sweep: its progress, and its place in the sweep's table."""

    row: str
    labels: dict[str, str]
    seed: int
    reused: bool
    reason: str | None = Field(
        default=None,
        description="Why it is not in training here: what it waits for, or which other sweep trains it. null: it is, "
        "or it has ended.",
    )


class SweepDetail(SweepSummary):
    """A sweep with its runs, and the code and machine from its record."""

    hypothesis: str = ""
    command: list[str] = []
    git_commit: str | None = None
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    metrics: list[dict[str, Any]] = []
    notes: list[str] = []
    file_text: str = Field(default="", description="The ablation file.")
    members: list[SweepMember] = []
    to_suggest: int = Field(default=0, description="Rows that the search has still to choose, by the results so far.")
    leave_out: list[Status] = Field(
        default=[], description="Statuses of runs that it does not train, beside finished ones."
    )
    error: str | None = Field(
        default=None, description="Why its record cannot be read; the other fields are then empty."
    )


class GetSweep(Question[SweepDetail]):
    """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""

    PATH = "/sweeps/{sweep_id}"
    WORK = "answers"

    sweep_id: SweepId


class SweepState(Answer):
    """A sweep that was submitted, stopped or retried."""

    sweep_id: str
    ablation: str
    status: Status
    runs: int
    stop_requested: bool = Field(
        default=False, description="Whether it is about to stop; its runs write checkpoints first."
    )
    retry_of: str | None = Field(default=None, description="The sweep whose runs it trains again.")
    url: str = Field(description="URL of its state.")
    events: str = Field(description="URL of its progress as server-sent events.")


QUESTIONS = (ListSweeps, GetSweep)
"""A service has a route for each."""
