"""Starts worker groups where the cluster has room, and replaces those that fail.

`placement` decides how many groups of each shape there are. Ray's scheduler finds the place of each group: it counts
free resources, knows the single GPUs, and leaves out nodes that are drained. A node that cannot train is left out from
then on (quarantined); the sweep goes on with the others.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cope_sweep.sweep.cluster import HeadLost, Node, check_head, free_resources, needs_of, no_room, nodes
from cope_sweep.sweep.executor import ClusterError
from cope_sweep.sweep.messages import Failure
from cope_sweep.sweep.placement import Needs, Placed, Placement
from cope_sweep.sweep.shapes import Shapes
from cope_sweep.sweep.workers import GroupPlan, Place, Worker, WorkerEnd, WorkerError

MAX_IDLE_FAILURES = 2
"""A node is left out when workers fail there this often in a row without having had a run."""
REFRESH_INTERVAL_S = 1.0
"""Time between two looks at the nodes and their resources."""
UNAVAILABLE_TIMEOUT_S = 30.0
"""How long a worker that does not answer is observed before it is taken for dead. Ray needs 5 to 20 s to notice that a
node is gone; until then, the worker of a node that was taken away looks like one that crashed."""
OTHER_RANKS_TIMEOUT_S = 1.0
"""How long a group that failed is observed for errors of its other ranks, before it is ended."""
NODE_LABEL = "ray.io/node-id"


@dataclass
class _Group:
    number: int
    shape: int
    reservation: Any
    """Its placement group."""
    workers: list[Any]
    """Its actors, by rank."""
    placing: list[Any]
    """The futures of the workers' places."""
    ends: list[Any]
    """The futures of the workers' ends."""
    places: list[Place] = field(default_factory=list)
    """By rank; empty until all workers have started."""
    failed_s: float | None = None
    """When its first worker failed."""
    probe: Any = None
    """A call to a worker that did not answer."""

    def nodes(self, ranks: Iterable[int]) -> set[str]:
        """The ids of the nodes of some ranks; empty if they are not known."""
        return {self.places[rank].node_id for rank in ranks} if self.places else set()


class Groups:
    """The worker groups of a sweep."""

    def __init__(
        self,
        plan: GroupPlan,
        shapes: Shapes,
        limit: int | None,
        *,
        on_failed: Callable[[int, str, Failure], bool],
        on_leave: Callable[[Sequence[int]], object],
        on_refused: Callable[[int, str], object],
        on_note: Callable[[str], None],
        on_left_out: Callable[[int], object] = lambda nodes: None,
    ) -> None:
        """No group is started before `update` is called.

        Args:
            plan: What the workers need to know. Shape, resources and GPUs are set for each group.
            shapes: What groups take. There may be more later.
            limit: How many groups to start, whether there is room or not; None: as many as there is room for.
            on_failed: Called with a group, the reason and the kind of its failure; returns whether it had a run.
            on_leave: Called with groups that have to end when their runs have ended.
            on_refused: Called with a shape of which no group can be started, and the reason.
            on_note: Called with what the user should know.
            on_left_out: Called with the number of nodes that cannot train, whenever there is one more.
        """
        self.plan, self.shapes, self.limit = plan, shapes, limit
        self.on_failed, self.on_leave, self.on_refused, self.on_note = on_failed, on_leave, on_refused, on_note
        self.on_left_out = on_left_out
        self.needs: list[Needs] = []
        """What a group takes, by shape."""
        self.refused: set[int] = set()
        """The shapes of which no group can be started."""
        self.placement = Placement(self.needs, limit)
        self.groups: dict[int, _Group] = {}
        self.count = 0
        self.quarantined: dict[str, str] = {}
        """Node id → why the node cannot train."""
        self.idle_failures: Counter[str] = Counter()
        """Node id, or "" where it is not known → failures in a row of workers that had no run."""
        self.nodes: dict[str, Node] = {}
        self.refreshed_s = 0.0
        self.head_lost = False
        """Whether nothing can be started or ended any more; calls would block."""
        self.placed: Mapping[int, int] = {}
        """Shape of the groups that exist → how many of them have started. Replaced as a whole: threads read it."""

    def update(
        self, wanted: Mapping[int, int], idle: Collection[int] = frozenset(), hanging: Iterable[int] = ()
    ) -> None:
        """Notice what has ended or failed, and start groups and have groups leave as `placement` decides.

        Args:
            wanted: Shape → number of groups; more are of no use.
            idle: The groups that have no run.
            hanging: Groups that have to be ended because their run makes no steps.

        Raises:
            ClusterError: No node is left that can train, none has room for a group, or the cluster's head is gone.
        """
        if self.head_lost:
            return
        for number in hanging:
            if group := self.groups.get(number):
                self._remove(group)
        self._notice_places()
        for group in self._with_ends():
            self._handle_ends(group)
        if time.monotonic() - self.refreshed_s >= REFRESH_INTERVAL_S:
            self._refresh_nodes()
            self.refreshed_s = time.monotonic()
            self._note_shapes(wanted)
            wanted = {shape: number for shape, number in wanted.items() if number and shape not in self.refused}
            self._follow(wanted, idle)
            self._check_anything_left(wanted)
        placed = dict.fromkeys((group.shape for group in self.groups.values()), 0)
        for group in self.groups.values():
            placed[group.shape] += bool(group.places)
        self.placed = placed

    def close(self) -> None:
        """End all groups at once. Without the cluster's head they end by themselves."""
        if self.head_lost:
            return
        for group in list(self.groups.values()):
            self._remove(group)

    def _refresh_nodes(self) -> None:
        try:
            check_head()
        except HeadLost:
            self.head_lost = True
            raise
        self.nodes = nodes()

    # -- starting --------------------------------------------------------------------------------------------------

    def _note_shapes(self, wanted: Mapping[int, int]) -> None:
        """Find out what groups of new shapes take, and refuse those for which there can be no room."""
        new = range(len(self.needs), len(self.shapes))
        self.needs += [needs_of(resources, self.nodes) for resources in self.shapes.resources[len(self.needs) :]]
        if self.limit is not None:
            return
        there = [node.resources for node in self.nodes.values()]
        misfits = {shape: self.needs[shape].misfit(there) for shape in new if wanted.get(shape)}
        reasons = {shape: reason for shape, reason in misfits.items() if reason is not None}
        if reasons and not self.count and reasons.keys() == {shape for shape, number in wanted.items() if number}:
            raise no_room(self.needs[min(reasons)], self.nodes)
        for shape, reason in reasons.items():
            self._refuse(shape, f"{reason}; lower its resources, or use a larger cluster")

    def _refuse(self, shape: int, reason: str) -> None:
        self.refused.add(shape)
        self.on_refused(shape, reason)
        self.on_note(f"runs that take {self.shapes.resources[shape].shape} fail: {reason}")

    def _follow(self, wanted: Mapping[int, int], idle: Collection[int]) -> None:
        """Do what `placement` decides."""
        groups = [
            Placed(group.number, group.shape, tuple(place.node_id for place in group.places), group.number in idle)
            for group in self.groups.values()
        ]
        staying = Counter(group.shape for group in groups if group.number not in self.placement.leaving)
        is_short = any(number > staying[shape] for shape, number in wanted.items())
        free = free_resources(self.nodes, self.quarantined) if is_short and self.limit is None else {}
        decision = self.placement.decide(time.monotonic(), self._usable(), free, groups, wanted)
        for shape in decision.start:
            self._start_group(shape)
        waiting = [number for number in decision.leave if not self.groups[number].places]
        for number in waiting:
            self._remove(self.groups[number])
            self.on_failed(number, "its place is given to a group of another shape", "preempted")
        if leaving := [number for number in decision.leave if number not in waiting]:
            self.on_leave(leaving)

    def _usable(self) -> dict[str, Mapping[str, float]]:
        """Node id → all that the node has, of the nodes that can train."""
        return {node_id: node.resources for node_id, node in self.nodes.items() if node_id not in self.quarantined}

    def _start_group(self, shape: int) -> None:
        needs = self.needs[shape]
        plan = replace(self.plan, shape=shape, resources=self.shapes.resources[shape], gpus=needs.gpus)
        others = {NODE_LABEL: f"!in({','.join(self.quarantined)})"} if self.quarantined else {}
        reservation = placement_group(
            [needs.bundle] * needs.workers, strategy="PACK", bundle_label_selector=[others] * needs.workers
        )
        actor = ray.remote(Worker)
        workers: list[Any] = [
            actor.options(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(reservation, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(needs.workers)
        ]
        placing = [worker.place.remote() for worker in workers]
        ends = [worker.train.remote(self.count, rank, plan, placing[0]) for rank, worker in enumerate(workers)]
        self.groups[self.count] = _Group(self.count, shape, reservation, workers, placing, ends)
        self.count += 1

    def _notice_places(self) -> None:
        for group in self.groups.values():
            if not group.places and len(ray.wait(group.placing, num_returns=len(group.placing), timeout=0)[1]) == 0:
                with contextlib.suppress(ray.exceptions.RayError):  # its end will say it, too
                    group.places = ray.get(group.placing)

    # -- ending ----------------------------------------------------------------------------------------------------

    def _with_ends(self) -> list[_Group]:
        """The groups of which a worker has ended or failed."""
        owners = {end: group for group in self.groups.values() for end in group.ends}
        if not owners:
            return []
        ready, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
        return list({owners[end].number: owners[end] for end in ready}.values())

    def _handle_ends(self, group: _Group) -> None:
        ready, running = ray.wait(group.ends, num_returns=len(group.ends), timeout=0)
        errors: dict[int, Exception] = {}
        problems: dict[int, str] = {}
        for end in ready:
            rank = group.ends.index(end)
            try:
                result: WorkerEnd = ray.get(end)
            except Exception as error:
                errors[rank] = error
            else:
                if result.problem is not None:
                    problems[rank] = result.problem
        if problems:
            self._remove(group)
            for rank, problem in problems.items():
                for node_id in group.nodes([rank]):
                    self._quarantine(node_id, problem)
        elif errors:
            group.failed_s = group.failed_s or time.monotonic()
            waits_s = time.monotonic() - group.failed_s
            if self._may_be_alive(group, errors) and waits_s < UNAVAILABLE_TIMEOUT_S:
                return
            if not running or waits_s > OTHER_RANKS_TIMEOUT_S:
                self._remove(group)
                self._handle_failure(group, errors)
        elif not running:
            self._remove(group)

    def _may_be_alive(self, group: _Group, errors: dict[int, Exception]) -> bool:
        """Whether only the connection to a worker is known to be broken, and its node has not been reported dead."""
        unavailable = [rank for rank in errors if isinstance(errors[rank], ray.exceptions.ActorUnavailableError)]
        if not unavailable or group.nodes(unavailable) - self.nodes.keys():
            return False
        if group.probe is None:
            group.probe = group.workers[unavailable[0]].place.remote()
        if not ray.wait([group.probe], timeout=0)[0]:
            return True
        try:
            ray.get(group.probe)
        except ray.exceptions.ActorUnavailableError:
            group.probe = None
            return True
        except ray.exceptions.RayError:
            pass
        return False

    def _handle_failure(self, group: _Group, errors: dict[int, Exception]) -> None:
        self._refresh_nodes()
        places = group.nodes(errors)
        failure: Failure = "error" if all(isinstance(error, WorkerError) for error in errors.values()) else "died"
        if any(getattr(error, "preempted", False) for error in errors.values()) or places - self.nodes.keys():
            failure = "preempted"
        reason = "\n".join(f"rank {rank}: {_cause(error)}" for rank, error in sorted(errors.items()))
        if self.on_failed(group.number, reason, failure):
            for node_id in places:
                self.idle_failures.pop(node_id, None)
        elif failure != "preempted":
            for node_id in places or [""]:
                self.idle_failures[node_id] += 1
                if self.idle_failures[node_id] >= MAX_IDLE_FAILURES:
                    self._quarantine(
                        node_id, f"its workers fail before they train anything: {' '.join(reason.split())}"
                    )

    def _quarantine(self, node_id: str, reason: str) -> None:
        """Start no more groups on a node, and end those that have not started to train there."""
        if node_id in self.quarantined:
            return
        self.quarantined[node_id] = reason
        address = self.nodes[node_id].address if node_id in self.nodes else node_id[:8] or "unknown"
        self.on_note(f"node {address} is left out: {reason}")
        self.on_left_out(len(self.quarantined))

    def _remove(self, group: _Group) -> None:
        """End a group's processes and give its resources back."""
        del self.groups[group.number]
        for worker in group.workers:
            ray.kill(worker)
        remove_placement_group(group.reservation)

    def _check_anything_left(self, wanted: Mapping[int, int]) -> None:
        """Raise ClusterError if there is no node left to start a group on; refuse single shapes without one."""
        if not self.quarantined:
            return
        has_groups = {group.shape for group in self.groups.values() if group.places}
        usable = self._usable().values()
        lost = [
            shape
            for shape in wanted
            if shape not in has_groups and ("" in self.quarantined or not self.needs[shape].fits(usable))
        ]
        reason = f"no node is left that can train: {'; '.join(dict.fromkeys(self.quarantined.values()))}"
        if lost and len(lost) == len(wanted) and not has_groups:
            raise ClusterError(reason)
        for shape in lost:
            self._refuse(shape, reason)


def _cause(error: Exception) -> object:
    """What was raised in a worker, without the traceback that Ray adds."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
