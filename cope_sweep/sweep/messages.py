"""What the broker of a sweep exchanges with worker groups, trials and the driver: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event

if TYPE_CHECKING:
    from cope_sweep.train import Outcome, StopRequest

Failure = Literal["died", "error", "preempted"]
"""How the workers of a group failed: a process died, a rank raised an error, or the node was taken away."""


@dataclass(frozen=True)
class Assignment:
    """A run that a worker group has to train."""

    number: int
    """Counts the assignments of the sweep from 1."""
    run: RunSpec
    attempt: int
    """The attempt of the run's lease. A worker of an older attempt cannot overwrite its files."""
    parent_id: str | None = None
    """A finished run that this one continues, unless it was begun before."""


@dataclass(frozen=True)
class AssignmentResult:
    """How an assignment ended."""

    number: int
    outcome: Outcome
    event: Event | None
    """The run's last event; None if `train_run` sent none."""


@dataclass(frozen=True)
class StopOrder:
    """A request to a group to end its run early."""

    number: int
    request: StopRequest
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """What a trial gets: the run's last event, or an evaluation."""

    event: Event
    ended: bool
    elsewhere: bool = False
    """Another sweep trains the run. Its trial ends; the run gets another one if that sweep gives it up."""


@dataclass(frozen=True)
class Poll:
    """What the driver gets from one call."""

    events: tuple[tuple[int, Event], ...]
    """Events with their numbers."""
    leased: int
    """Number of runs in training."""
    to_train: dict[int, int]
    """Shape → number of runs that are in training or wait for it: more groups than this are of no use."""
    idle: frozenset[int]
    """The groups without a run, where there are several shapes."""
    returned: tuple[str, ...]
    """Runs that need another trial, because the sweep that trained them gave them up."""
    hanging: tuple[int, ...]
    """Groups that have to be killed: their run makes no steps."""
    draining: bool
    """Whether no more runs are started, because too many have failed."""
    ended: bool
    """Whether there is nothing left to train."""
    problem: str | None
    """Why the sweep cannot continue."""
