"""Groups of different shapes, simulated: what fits where, whose turn it is, and whole sweeps with a real broker."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Lease, LeaseHolder, Status, Store
from cope_sweep.sweep.broker import Broker
from cope_sweep.sweep.messages import Assignment, AssignmentResult
from cope_sweep.sweep.placement import BLOCKED_S, TURN_S, Needs, Placed, Placement
from tests.sweep.runs import seeds

SMALL, LARGE = Needs(1, 1, 0), Needs(2, 2, 0)


@pytest.mark.parametrize(
    ("needs", "held", "workers"),
    [
        (Needs(1, 1, 0), {"CPU": 2}, 2),
        (Needs(1, 2, 0), {"CPU": 3}, 1),
        (Needs(1, 1, 0), {}, 0),
        (Needs(1, 1, 0), {"CPU": -3}, 0),
        (Needs(1, 1, 1), {"CPU": 8, "GPU": 2}, 2),
        (Needs(1, 1, 2), {"CPU": 8, "GPU": 3}, 1),
        (Needs(1, 1, 0.5), {"CPU": 8, "GPU": 2}, 4),
        (Needs(1, 1, 0.4), {"CPU": 8, "GPU": 2}, 4),
        (Needs(1, 1, 0.25), {"CPU": 8, "GPU": 1}, 4),
        (Needs(1, 1, 0.1), {"CPU": 32, "GPU": 1}, 10),
        (Needs(1, 1, 0.5), {"CPU": 8, "GPU": 0.5}, 1),  # the other half is in use
        (Needs(1, 1, 0.4), {"CPU": 8, "GPU": 1.2}, 2),
    ],
)
def test_workers_share_a_gpu_and_none_has_parts_of_two(needs: Needs, held: dict[str, float], workers: int) -> None:
    assert needs.workers_on(held) == workers


@pytest.mark.parametrize(
    ("needs", "nodes", "reason"),
    [
        (Needs(2, 1, 0), [{"CPU": 1}, {"CPU": 1}], None),
        (Needs(1, 1, 4), [{"CPU": 8, "GPU": 2}, {"CPU": 8}], "needs 4 GPUs, the largest node has 2"),
        (Needs(1, 4, 1), [{"CPU": 1, "GPU": 1}], "needs 4 CPUs, the largest node has 1"),
        (Needs(1, 1, 1), [{"CPU": 8}], "needs 1 GPU, the largest node has 0"),
        (Needs(3, 2, 0), [{"CPU": 3}, {"CPU": 2}], "needs 3 workers with 2 CPUs each, the nodes have room for 2"),
        (Needs(1, 1, 0), [], "needs 1 CPU, the largest node has 0"),
    ],
)
def test_why_a_group_never_fits(needs: Needs, nodes: list[dict[str, float]], reason: str | None) -> None:
    assert needs.misfit(nodes) == reason


def decide(
    placement: Placement, now_s: float, cpus: int, groups: list[Placed], **runs: int
) -> tuple[list[int], list[int]]:
    """A decision on one node."""
    used = sum(placement.shapes[g.shape].workers * placement.shapes[g.shape].cpus for g in groups if g.nodes)
    wanted = {0: runs.get("small", 0), 1: runs.get("large", 0)}
    decision = placement.decide(now_s, {"n": {"CPU": cpus}}, {"CPU": cpus - used}, groups, wanted)
    return decision.start, decision.leave


def test_the_larger_shape_comes_first_and_the_smaller_one_fills_what_is_left() -> None:
    placement = Placement([SMALL, LARGE])
    assert decide(placement, 0, 10, [], small=9, large=2) == ([1, 1, 0, 0], [])
    assert decide(placement, 0, 3, [], small=9, large=2) == ([0, 0, 0], [])
    assert decide(placement, 0, 10, [], small=1) == ([0], [])


def test_groups_leave_for_a_shape_that_waits_too_long_and_no_more_than_it_takes() -> None:
    placement = Placement([SMALL, LARGE])
    groups = [Placed(number, 0, ("n",)) for number in range(6)]
    assert decide(placement, 0, 6, groups, small=9, large=1) == ([], [])
    assert decide(placement, TURN_S - 1, 6, groups, small=9, large=1) == ([], [])
    start, leave = decide(placement, TURN_S, 6, groups, small=9, large=1)
    assert (start, len(leave)) == ([], 4)
    left = [group for group in groups if group.number != leave[0]]
    # One has left: its room is kept free.
    assert decide(placement, TURN_S + 9, 6, left, small=9, large=1) == ([], [])
    left = [group for group in groups if group.number not in leave]
    assert decide(placement, TURN_S + 99, 6, left, small=9, large=1) == ([1], [])
    # While it starts, nothing else does; then its turn is over.
    assert decide(placement, TURN_S + 99, 6, [*left, Placed(7, 1)], small=9, large=1) == ([], [])
    assert decide(placement, TURN_S + 99, 7, [*left, Placed(7, 1, ("n", "n"))], small=9, large=1) == ([0], [])


def test_a_group_that_starts_slowly_is_not_replaced() -> None:
    placement = Placement([SMALL, LARGE])
    assert decide(placement, 0, 4, [], small=9, large=1) == ([1], [])
    for now_s in (TURN_S, TURN_S + BLOCKED_S, 9 * TURN_S):
        assert decide(placement, now_s, 4, [Placed(0, 1)], small=9, large=1) == ([], [])
    assert decide(placement, 9 * TURN_S, 5, [Placed(0, 1, ("n", "n"))], small=9, large=1) == ([0], [])


def test_groups_with_nothing_to_do_leave_at_once() -> None:
    placement = Placement([SMALL, LARGE])
    groups = [Placed(number, 0, ("n",), idle=number != 1) for number in range(4)]
    assert decide(placement, 0, 4, groups, small=1, large=1) == ([], [])  # the three that are idle are not enough
    groups[1] = dataclasses.replace(groups[1], idle=True)
    assert decide(placement, 0, 4, groups, small=2, large=1) == ([], [])  # their runs come soon
    start, leave = decide(placement, 0, 4, groups, small=0, large=1)
    assert (start, sorted(leave)) == ([], [0, 1, 2, 3])


def test_a_shape_loses_its_turn_where_others_use_the_room() -> None:
    placement = Placement([SMALL, LARGE])

    def others_use_all_but_one(now_s: float) -> list[int]:
        small = [Placed(0, 0, ("n",))]
        return placement.decide(now_s, {"n": {"CPU": 5}}, {"CPU": 1}, small, {0: 2, 1: 1}).start

    assert others_use_all_but_one(0) == [0]
    assert others_use_all_but_one(TURN_S) == []
    assert others_use_all_but_one(TURN_S + BLOCKED_S - 1) == []
    assert others_use_all_but_one(TURN_S + BLOCKED_S) == [0]
    assert others_use_all_but_one(TURN_S + BLOCKED_S + 1) == [0]


def test_a_limit_counts_groups_of_all_shapes() -> None:
    placement = Placement([SMALL, LARGE], limit=2)
    assert decide(placement, 0, 2, [], small=9, large=1) == ([1, 0], [])
    waiting = [Placed(0, 1), Placed(1, 0, ("n",))]  # Ray finds no room for the larger one beside the other
    assert decide(placement, 0, 4, waiting, small=9, large=1) == ([], [])
    assert decide(placement, TURN_S, 4, waiting, small=9, large=1) == ([], [1])
    assert decide(placement, TURN_S, 4, [Placed(0, 1)], small=9, large=1) == ([], [])
    # What no node holds waits for an autoscaler, and the others go on.
    placement = Placement([SMALL, LARGE], limit=1)
    assert decide(placement, 0, 2, [Placed(0, 1)], small=9, large=1) == ([], [])
    assert decide(placement, TURN_S, 2, [Placed(0, 1)], small=9, large=1) == ([], [0])


class LeasesInMemory(LeaseHolder):
    """Leases that are in no database."""

    def acquire(self, run: RunSpec) -> Lease:
        return Lease(run.run_id, 1)

    def end(self, run_id: str) -> Status:
        return "finished"


@dataclass
class Group:
    number: int
    shape: int
    nodes: tuple[str, ...] = ()
    assignment: Assignment | None = None
    ends_at: int = 0


@dataclass
class Simulation:
    """A cluster, the groups on it, and a broker. Time passes in rounds of a minute."""

    store: Store
    nodes: dict[str, dict[str, float]]
    shapes: list[Needs]
    shape_of: list[int]
    """The shape of each run."""
    durations: list[int]
    """Rounds that each run takes."""
    limit: int | None = None
    kills: frozenset[int] = frozenset()
    """Rounds in which the first group with a run dies."""
    suggested_at: dict[int, int] = field(default_factory=dict)
    """Shape → round in which a search suggests its runs; no entry: they are known from the start."""
    trained: Counter[str] = field(default_factory=Counter)
    longest_wait: dict[int, int] = field(default_factory=dict)
    """Shape → most rounds in a row with runs to train and no group."""
    groups: dict[int, Group] = field(default_factory=dict)
    count: int = 0

    ROUND_S = 60.0

    def execute(self, rounds: int) -> int:
        """Train all runs; in how many rounds. Fails where `rounds` are not enough."""
        return asyncio.run(self._execute(rounds))

    async def _execute(self, rounds: int) -> int:
        runs = seeds(len(self.shape_of))
        shapes = {run.run_id: shape for run, shape in zip(runs, self.shape_of, strict=True)}
        leases = LeasesInMemory(self.store, "simulated")
        later = [run for run in runs if shapes[run.run_id] in self.suggested_at]
        known = [run for run in runs if run not in later]
        self.broker = Broker(
            self.store, "simulated", known, shapes=shapes, max_failures=0, leases=leases, more_runs=len(later)
        )
        self.runs = {run.run_id: index for index, run in enumerate(runs)}
        placement = Placement(self.shapes, self.limit)
        for shape, needs in enumerate(self.shapes):
            if reason := needs.misfit(list(self.nodes.values())):
                await self.broker.refuse(shape, reason)
        for run in known:
            await self.broker.start(run.run_id)
        waits: Counter[int] = Counter()
        try:
            for now in range(rounds):
                self._place()
                for run in later:
                    if self.suggested_at[shapes[run.run_id]] == now:
                        await self.broker.start(run.run_id, run, shapes[run.run_id])
                if now in self.kills:
                    await self._kill()
                for group in list(self.groups.values()):
                    await self._work(group, now)
                while self.broker.records.tasks:
                    await asyncio.sleep(0.001)
                poll = await self.broker.poll(0, 0.0)
                if poll.ended:
                    return now
                wanted = {s: n for s, n in poll.to_train.items() if n and s not in self.broker.refused}
                served = {group.shape for group in self.groups.values() if group.nodes}
                for shape in range(len(self.shapes)):
                    waits[shape] = waits[shape] + 1 if shape in wanted and shape not in served else 0
                    self.longest_wait[shape] = max(self.longest_wait.get(shape, 0), waits[shape])
                await self._follow(placement, now, poll.idle, wanted)
        finally:
            await self.broker.close()
            await self.broker.release()
        raise AssertionError(f"after {rounds} rounds, runs are left: {self.broker.table.to_do}")

    async def _follow(self, placement: Placement, now: int, idle: frozenset[int], wanted: dict[int, int]) -> None:
        placed = [Placed(g.number, g.shape, g.nodes, g.number in idle) for g in self.groups.values()]
        free: Counter[str] = Counter()
        for left in self._left().values():
            free.update(left)
        decision = placement.decide(now * self.ROUND_S, self.nodes, free, placed, wanted)
        for shape in decision.start:
            self.groups[self.count] = Group(self.count, shape)
            self.count += 1
        for number in decision.leave:
            if not self.groups[number].nodes:
                del self.groups[number]
        await self.broker.ask_to_leave([number for number in decision.leave if number in self.groups])

    async def _work(self, group: Group, now: int) -> None:
        if not group.nodes or (group.assignment and now < group.ends_at):
            return
        result = None
        if group.assignment is not None:
            run_id = group.assignment.run.run_id
            self.trained[run_id] += 1
            result = AssignmentResult(group.assignment.number, "finished", Event(run_id, "finished", 6, 6, {"x": 1.0}))
        answer = await self.broker.lease(group.number, result, 0.0, shape=group.shape)
        group.assignment = answer if isinstance(answer, Assignment) else None
        if answer is None:
            del self.groups[group.number]
        elif group.assignment is not None:
            index = self.runs[group.assignment.run.run_id]
            assert self.shape_of[index] == group.shape
            group.ends_at = now + self.durations[index]

    async def _kill(self) -> None:
        for group in self.groups.values():
            if group.assignment is not None:
                del self.groups[group.number]
                assert await self.broker.group_failed(group.number, "killed", "preempted")
                return

    def _left(self) -> dict[str, Counter[str]]:
        left = {node: Counter(resources) for node, resources in self.nodes.items()}
        for group in self.groups.values():
            for node in group.nodes:
                left[node].subtract(self.shapes[group.shape].bundle)
        return left

    def _place(self) -> None:
        """Place what fits, as Ray does: the workers of a group at once, on nodes with room."""
        for group in self.groups.values():
            if group.nodes:
                continue
            needs, left = self.shapes[group.shape], self._left()
            rooms: Iterator[str] = (node for node in left for _ in range(needs.workers_on(left[node])))
            nodes = tuple(node for node, _ in zip(rooms, range(needs.workers), strict=False))
            group.nodes = nodes if len(nodes) == needs.workers else ()


def needs_strategy() -> Any:
    return st.builds(Needs, st.integers(1, 3), st.integers(1, 4), st.sampled_from([0.0, 0.0, 0.5, 1.0]))


@st.composite
def simulations(draw: Any) -> dict[str, Any]:
    nodes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=3))
    shapes = draw(st.lists(needs_strategy(), min_size=2, max_size=3))
    runs = draw(st.lists(st.tuples(st.integers(0, len(shapes) - 1), st.integers(1, 9)), min_size=1, max_size=10))
    return {
        "nodes": {f"n{index}": {"CPU": float(cpus), "GPU": float(gpus)} for index, (cpus, gpus) in enumerate(nodes)},
        "shapes": shapes,
        "shape_of": [shape for shape, _ in runs],
        "durations": [duration for _, duration in runs],
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=simulations(), kills=st.frozensets(st.integers(1, 60), max_size=4), limit=st.sampled_from([None, None, 1, 2])
)
def test_every_run_is_trained_once_and_no_shape_starves(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], kills: frozenset[int], limit: int | None
) -> None:
    store = Store(tmp_path_factory.mktemp("store"), create=True)
    simulation = Simulation(store, **values, kills=kills, limit=limit)
    fits = [needs.fits(simulation.nodes.values()) for needs in simulation.shapes]
    turn = TURN_S / Simulation.ROUND_S + max(simulation.durations) + 3
    bound = len(simulation.shapes) * turn
    simulation.execute(int((len(simulation.durations) + len(kills) + 1) * bound) + 60)
    for run_id, index in simulation.runs.items():
        fitting = fits[simulation.shape_of[index]]
        assert simulation.trained[run_id] == fitting
        if not fitting:
            message = str(store.run(run_id).state["message"])
            assert message == simulation.shapes[simulation.shape_of[index]].misfit(list(simulation.nodes.values()))
    if not kills:
        assert max(simulation.longest_wait.values(), default=0) <= bound


@pytest.mark.parametrize("waits", [SMALL, LARGE])
def test_one_run_waits_no_longer_than_its_turn_behind_many_of_another_shape(store: Store, waits: Needs) -> None:
    """The groups of the other shape fill the cluster before the run is suggested."""
    others = LARGE if waits is SMALL else SMALL
    simulation = Simulation(
        store, {"a": {"CPU": 2}, "b": {"CPU": 2}}, [others, waits], [0] * 60 + [1], [3] * 61, suggested_at={1: 7}
    )
    rounds = simulation.execute(400)
    assert set(simulation.trained.values()) == {1}
    assert len(simulation.trained) == 61
    assert 4 <= simulation.longest_wait[1] <= TURN_S / Simulation.ROUND_S + 3 + 3
    assert rounds > 40
