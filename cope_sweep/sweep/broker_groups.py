"""The worker groups that the broker knows, and which run each of them trains."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cope_sweep.sweep.broker_state import BrokerRun
from cope_sweep.sweep.messages import Assignment, StopOrder

if TYPE_CHECKING:
    from cope_sweep.train import StopRequest


@dataclass
class BrokerGroup:
    """One worker group."""

    shape: int
    is_new: bool = True
    """Whether it has had no run."""
    assignment: Assignment | None = None
    order: StopOrder | None = None
    ordered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is an order that the group has not received."""
    step: int = -1
    """The last step that its run reported."""
    progress_s: float = 0.0
    """When that was, by `time.monotonic`."""


class GroupTable:
    """The groups that have asked for a run and have not ended."""

    def __init__(self) -> None:
        self._groups: dict[int, BrokerGroup] = {}
        self._training: dict[int, int] = {}
        """The number of each running assignment → its group."""
        self._assigned = 0
        self._leaving: set[int] = set()
        """Groups that have to end when their run has ended."""
        self.counts: Counter[int] = Counter()
        """Shape → number of groups."""
        self.busy: Counter[int] = Counter()
        """Shape → number of groups that train."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def training(self) -> int:
        """Number of running assignments."""
        return len(self._training)

    def of(self, number: int, shape: int = 0) -> BrokerGroup:
        """The group with this number; a new one of this shape, if it has not asked before."""
        if number not in self._groups:
            self._groups[number] = BrokerGroup(shape)
            self.counts[shape] += 1
        return self._groups[number]

    def assignment_of(self, number: int) -> int | None:
        """The number of the assignment that a group has."""
        group = self._groups.get(number)
        return None if group is None or group.assignment is None else group.assignment.number

    def remove(self, number: int) -> None:
        """The group has ended. Its assignment has to be released before."""
        group = self._groups.pop(number, None)
        if group is not None:
            self.counts[group.shape] -= 1
        self._leaving.discard(number)

    def assign(self, number: int, run: BrokerRun, attempt: int, parent_id: str | None) -> Assignment:
        """Give a run to a group."""
        group = self.of(number, run.shape)
        self._assigned += 1
        run.assignment = self._assigned
        group.assignment = Assignment(self._assigned, run.spec, attempt, parent_id)
        group.step, group.progress_s, group.order = -1, time.monotonic(), None
        group.ordered.clear()
        group.is_new = False
        self._training[self._assigned] = number
        self.busy[group.shape] += 1
        return group.assignment

    def with_assignment(self, assignment: int) -> BrokerGroup | None:
        """The group that an assignment was given to; None if it has ended."""
        return self._groups.get(self._training.get(assignment, -1))

    def release(self, assignment: int) -> str | None:
        """End an assignment; the id of its run, or None if it has ended before."""
        group = self._groups.get(self._training.pop(assignment, -1))
        if group is None or group.assignment is None:
            return None
        run_id, group.assignment = group.assignment.run.run_id, None
        self.busy[group.shape] -= 1
        return run_id

    def order(self, assignment: int, request: StopRequest, reason: str | None = None) -> None:
        """Tell the group of an assignment to end its run early."""
        group = self._groups[self._training[assignment]]
        group.order = StopOrder(assignment, request, reason)
        group.ordered.set()

    def order_all(self, request: StopRequest) -> None:
        """Tell all groups to end their runs early."""
        for assignment in self._training:
            self.order(assignment, request)

    def hanging(self, before_s: float) -> Iterator[tuple[int, int]]:
        """Group and assignment, of those without a new step since `before_s`."""
        for assignment, number in list(self._training.items()):
            if self._groups[number].progress_s < before_s:
                yield number, assignment

    def ask_to_leave(self, numbers: Iterable[int]) -> None:
        """Have groups end when their run has ended."""
        self._leaving.update(numbers)

    def is_leaving(self, number: int, *, has_run: bool) -> bool:
        """Whether a group has to end now. One that has trained nothing yet first takes a run, if there is one."""
        return number in self._leaving and not (has_run and self._groups[number].is_new)

    def idle(self) -> frozenset[int]:
        """The groups without a run."""
        return frozenset(number for number, group in self._groups.items() if group.assignment is None)
