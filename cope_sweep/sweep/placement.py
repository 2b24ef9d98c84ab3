"""Decides how many worker groups of each shape a sweep has. It knows neither Ray nor the broker.

A shape is what a worker group takes: workers, and the CPUs and GPUs of each. Its number is its place in a list.

- Where several shapes have runs that wait and fit into what is free, the larger shape gets its group first.
- A shape that waits without any group for `TURN_S` has its turn, the one that waits longest first: nothing else is
  started, and as many groups of other shapes as it takes to make room are asked to leave, which they do when their run
  has ended. So every shape gets a group after `TURN_S` and the longest run of each shape before it.
- A group without a run, of a shape with no run left to start, leaves as soon as another shape needs its room.
- A shape whose room others on the cluster use loses its turn after `BLOCKED_S`, and waits for the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

TURN_S = 300.0
"""A shape waits so long for its first group before groups of other shapes leave for it. Starting a group takes 10 to
26 s, so that shapes which cannot train side by side lose less than a tenth of the time by taking turns."""
BLOCKED_S = 30.0
"""How long room that groups of this sweep have left may be missing. Ray takes seconds to count it as free."""
EPSILON = 1e-9

Amounts = Mapping[str, float]
"""Name of a resource (CPU, GPU) → how much of it."""


@dataclass(frozen=True)
class Needs:
    """What a worker group takes."""

    workers: int
    cpus: int
    """CPUs of each worker."""
    gpus: float
    """GPUs of each worker."""

    @property
    def bundle(self) -> dict[str, float]:
        """What one worker takes, as Ray names it."""
        return {"CPU": float(self.cpus)} | ({"GPU": self.gpus} if self.gpus else {})

    @property
    def size(self) -> tuple[float, float]:
        """GPUs and CPUs of a group; larger groups come first."""
        return self.workers * self.gpus, self.workers * self.cpus

    def workers_on(self, resources: Amounts) -> int:
        """How many workers such resources hold. Several may share a GPU; no worker has parts of several."""
        fits = max(0.0, resources.get("CPU", 0)) / self.cpus
        if self.gpus:
            gpus = max(0.0, resources.get("GPU", 0))
            if self.gpus < 1:
                # What is left of a GPU that others use is taken to be of one GPU.
                shared = int(1 / self.gpus + EPSILON)
                fits = min(fits, int(gpus + EPSILON) * shared + int(gpus % 1 / self.gpus + EPSILON))
            else:
                fits = min(fits, gpus / self.gpus)
        return int(fits + EPSILON)

    def fits(self, nodes: Iterable[Amounts]) -> bool:
        """Whether a group fits on the nodes together."""
        missing = self.workers
        for node in nodes:
            missing -= self.workers_on(node)
            if missing <= 0:
                return True
        return False

    def misfit(self, nodes: Collection[Amounts]) -> str | None:
        """Why a group does not fit on the nodes together, all of them free; None if it does."""
        if self.fits(nodes):
            return None
        for name, amount in sorted(self.bundle.items(), reverse=True):
            largest = max((node.get(name, 0) for node in nodes), default=0)
            if largest < amount:
                return f"needs {_counted(amount, name)}, the largest node has {largest:g}"
        wanted = " and ".join(_counted(amount, name) for name, amount in self.bundle.items())
        room = sum(map(self.workers_on, nodes))
        return f"needs {_counted(self.workers, 'worker')} with {wanted} each, the nodes have room for {room}"


def _counted(amount: float, name: str) -> str:
    return f"{amount:g} {name}{'s' * (amount != 1)}"


@dataclass(frozen=True)
class Placed:
    """A group that exists."""

    number: int
    shape: int
    nodes: tuple[str, ...] = ()
    """The node of each worker; empty until all have started."""
    idle: bool = False
    """Whether it has no run."""


@dataclass(frozen=True)
class Decision:
    """What has to be done now."""

    start: list[int]
    """The shapes of the groups to start."""
    leave: list[int]
    """The groups that have to leave when their run has ended."""


@dataclass
class Placement:
    """The groups that a sweep should have, as runs end and nodes come and go."""

    shapes: Sequence[Needs]
    """It may grow."""
    limit: int | None = None
    """How many groups there may be, which are started whether there is room or not; None: as many as there is room."""
    waits_since: dict[int, float] = field(default_factory=dict)
    """Shape that has runs and no group → since when."""
    leaving: set[int] = field(default_factory=set)
    """The groups that were asked to leave."""
    blocked_since: dict[int, float] = field(default_factory=dict)
    """Shape whose turn it is, and whose room is used by others on the cluster → since when."""

    def decide(
        self,
        now_s: float,
        nodes: Mapping[str, Amounts],
        free: Amounts,
        groups: Sequence[Placed],
        runs: Mapping[int, int],
    ) -> Decision:
        """What to do now.

        Args:
            now_s: The time, of a clock that does not jump.
            nodes: Node id → all that the node has, of the nodes that can train.
            free: What the cluster has left on these nodes together. Others may use it, too.
            groups: The groups that exist.
            runs: Shape → number of runs that are trained or wait for it. A shape has no more groups than that.
        """
        self.leaving &= {group.number for group in groups}
        return _Round(self, now_s, nodes, free, groups, runs).decide()


class _Round:
    """One decision."""

    def __init__(
        self,
        placement: Placement,
        now_s: float,
        nodes: Mapping[str, Amounts],
        free: Amounts,
        groups: Sequence[Placed],
        runs: Mapping[int, int],
    ) -> None:
        self.placement, self.shapes, self.now_s = placement, placement.shapes, now_s
        self.nodes, self.groups, self.runs = nodes, groups, runs
        self.free = dict(free)
        """What the cluster has left, without what groups take that have not started yet."""
        self.left = self._without(groups)
        """Node → what the groups of this sweep leave of it."""
        self.counts = Counter(group.shape for group in groups if group.number not in placement.leaving)
        self.busy = Counter(group.shape for group in groups if not group.idle)
        self.total = len(groups)
        self.start: list[int] = []
        self.leave: list[int] = []
        for group in groups:
            if not group.nodes:
                self._take(group.shape)
        self.turns = self._turns()

    def decide(self) -> Decision:
        others = [shape for shape in range(len(self.shapes)) if shape not in self.turns]
        for shape in [*self.turns, *sorted(others, key=lambda shape: self.shapes[shape].size, reverse=True)]:
            while self._is_short(shape) and self._has_room(shape):
                self._take(shape)
                self.start.append(shape)
                self.counts[shape] += 1
                self.total += 1
            if shape in self.turns:
                self._make_room(shape, [group for group in self.groups if group.shape != shape])
                if not self._is_blocked(shape):
                    break
            elif self._is_short(shape):
                spare = [group for group in self.groups if group.idle and group.nodes and self._is_spare(group.shape)]
                self._make_room(shape, spare)
        return Decision(self.start, self.leave)

    # -- whose turn it is ------------------------------------------------------------------------------------------

    def _turns(self) -> list[int]:
        """Note which shapes wait; those whose turn it is, the oldest first."""
        placement = self.placement
        served = {group.shape for group in self.groups if group.nodes}
        for shape in range(len(self.shapes)):
            if self.runs.get(shape, 0) and shape not in served:
                placement.waits_since.setdefault(shape, self.now_s)
            else:
                placement.waits_since.pop(shape, None)
                placement.blocked_since.pop(shape, None)
        if len(self.shapes) == 1:
            return []
        waits = {shape: since_s for shape, since_s in placement.waits_since.items() if self._may_start(shape)}
        return sorted((shape for shape in waits if self.now_s - waits[shape] >= TURN_S), key=lambda shape: waits[shape])

    def _may_start(self, shape: int) -> bool:
        """Whether it helps the shape if groups leave."""
        needs_slot = self.placement.limit is not None and not self.counts[shape]
        return needs_slot or self.shapes[shape].fits(self.nodes.values())

    def _is_blocked(self, shape: int) -> bool:
        """Whether the groups that had to leave are gone, and there is no room nevertheless. Then the turn ends."""
        starts = self.counts[shape] and self.placement.limit is None
        if self.placement.leaving or starts:
            self.placement.blocked_since.pop(shape, None)
            return False
        if self.now_s - self.placement.blocked_since.setdefault(shape, self.now_s) < BLOCKED_S:
            return False
        del self.placement.blocked_since[shape]
        self.placement.waits_since[shape] = self.now_s
        return True

    def _is_short(self, shape: int) -> bool:
        """Whether runs of the shape wait for a group."""
        return self.counts[shape] < self.runs.get(shape, 0)

    def _is_spare(self, shape: int) -> bool:
        """Whether groups of the shape that have no run have nothing to do."""
        return self.runs.get(shape, 0) <= self.busy[shape]

    # -- room ------------------------------------------------------------------------------------------------------

    def _has_room(self, shape: int) -> bool:
        if self.placement.limit is not None:
            return self.total < self.placement.limit
        needs = self.shapes[shape]
        return needs.workers_on(self.free) >= needs.workers and needs.fits(self.left.values())

    def _take(self, shape: int) -> None:
        """Subtract what a group takes that has not started yet. Ray packs it onto as few nodes as possible."""
        needs = self.shapes[shape]
        whole = next((left for left in self.left.values() if needs.workers_on(left) >= needs.workers), None)
        missing = needs.workers
        for left in self.left.values() if whole is None else [whole]:
            here = min(missing, needs.workers_on(left))
            missing -= here
            _subtract(left, needs, here)
        _subtract(self.free, needs, needs.workers)

    def _without(self, groups: Iterable[Placed]) -> dict[str, dict[str, float]]:
        """Node → what these groups leave of it."""
        left = {node: dict(resources) for node, resources in self.nodes.items()}
        for group in groups:
            for node in group.nodes:
                if node in left:
                    _subtract(left[node], self.shapes[group.shape], 1)
        return left

    def _make_room(self, shape: int, candidates: Sequence[Placed]) -> None:
        """Ask as few of the candidates as it takes to leave, so that one group fits; none if all are too few."""
        leaving = self.placement.leaving
        staying = [group for group in self.groups if group.number not in leaving]
        if not candidates or self._fits_beside(shape, staying, set()):
            return
        chosen: list[int] = []
        for group in self._victims(shape, candidates):
            chosen.append(group.number)
            if self._fits_beside(shape, staying, set(chosen)):
                break
        else:
            return
        for number in list(chosen):
            if self._fits_beside(shape, staying, set(chosen) - {number}):
                chosen.remove(number)
        self.leave += chosen
        leaving.update(chosen)

    def _fits_beside(self, shape: int, staying: Sequence[Placed], without: Collection[int]) -> bool:
        """Whether a group of the shape fits beside those that stay, as soon as the others have left."""
        groups = [group for group in staying if group.number not in without]
        limit, needs = self.placement.limit, self.shapes[shape]
        if limit is not None:
            if not any(group.shape == shape for group in groups) and len(groups) >= limit:
                return False
            if not needs.fits(self.nodes.values()):
                return True  # it waits for nodes that an autoscaler adds
        return needs.fits(self._without(groups).values())

    def _victims(self, shape: int, candidates: Sequence[Placed]) -> list[Placed]:
        """The candidates in the order in which they should leave.

        Groups that wait for a place come first, then those without a run, then one node after another.
        """
        room = {node: self.shapes[shape].workers_on(left) for node, left in self.left.items()}
        # Without a limit, a group is started only where there is room: it starts slowly, and waits for no place.
        may_leave = [group for group in candidates if group.nodes or self.placement.limit is not None]
        return sorted(
            (group for group in may_leave if group.number not in self.placement.leaving),
            key=lambda group: (
                bool(group.nodes),
                not group.idle,
                -max((room.get(node, 0) for node in group.nodes), default=0),
                group.nodes,
                -group.number,
            ),
        )


def _subtract(resources: dict[str, float], needs: Needs, workers: int) -> None:
    """Subtract what so many workers of a group take."""
    for name, amount in needs.bundle.items():
        resources[name] = resources.get(name, 0) - workers * amount
