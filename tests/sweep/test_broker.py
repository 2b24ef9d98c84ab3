"""The broker, without Ray: which group gets which run, and when. The leases are those of a real index."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Lease, LeaseHolder, Store
from cope_sweep.sweep import broker as broker_module
from cope_sweep.sweep.broker import Broker
from cope_sweep.sweep.messages import Assignment, AssignmentResult, Poll, Report
from cope_sweep.train import Outcome
from tests.sweep.runs import Recorded, other_sweep, seeds

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "HOUSEKEEPING_INTERVAL_S", 0.02)
    monkeypatch.setattr(broker_module, "FOREIGN_POLL_INTERVAL_S", 0.02)


class Scene:
    """A broker, and the calls of its groups, trials and driver."""

    def __init__(self, store: Store, runs: list[RunSpec], **settings: Any) -> None:
        self.store, self.runs = store, runs
        settings = {"max_failures": 1, "leases": LeaseHolder(store, "this-sweep", ttl_s=5.0)} | settings
        self.broker = Broker(store, "this-sweep", runs, **settings)
        self.trials: dict[str, asyncio.Task[Report]] = {}

    async def start(self, *runs: RunSpec) -> None:
        """Start the trials of some runs, or of all."""
        for run in runs or self.runs:
            await self.broker.start(run.run_id)
            self.ask(run)
        await asyncio.sleep(0)

    def ask(self, run: RunSpec) -> None:
        """Have the trial of a run ask for its progress."""
        self.trials[run.run_id] = asyncio.create_task(self.broker.progress(run.run_id))

    async def trial(self, run: RunSpec) -> Report:
        """What the trial of a run receives next. It then asks again, unless the run has ended."""
        report = await self.trials[run.run_id]
        if not report.ended:
            self.ask(run)
        return report

    async def lease(self, group: int = 0, wait_s: float = TIMEOUT_S) -> Assignment:
        assignment = await self.broker.lease(group, None, wait_s)
        assert isinstance(assignment, Assignment)
        return assignment

    async def end(self, assignment: Assignment, outcome: Outcome = "finished", group: int = 0) -> object:
        """Write what a worker writes, end the assignment and ask for the next; "wait" if there is none now."""
        recorded = Recorded(self.store, assignment.run, assignment.attempt)
        recorded.end(outcome)
        return await self.broker.lease(group, AssignmentResult(assignment.number, outcome, None), 0.05)

    async def poll(self, after: int = 0) -> Poll:
        return await self.broker.poll(after, 0.0)

    async def settled(self) -> None:
        """Wait until nothing is being written."""
        while self.broker.records.tasks:
            await asyncio.sleep(0.01)

    async def poll_until_ended(self) -> Poll:
        while not (poll := await self.poll()).ended:
            await asyncio.sleep(0.01)
        return poll

    async def statuses(self) -> list[str]:
        """The statuses of the events that end runs, in order."""
        return [event.status for _, event in (await self.poll()).events if event.status != "running"]


@pytest.fixture
def scenes(store: Store) -> Any:
    """Runs a scenario: an async function of a scene."""

    def play(scenario: Any, runs: list[RunSpec], **settings: Any) -> None:
        async def whole() -> None:
            scene = Scene(store, runs, **settings)
            try:
                await scenario(scene)
            finally:
                for task in scene.trials.values():
                    task.cancel()
                await scene.broker.close()
                await scene.broker.release()

        run(whole())

    return play


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


def progress(run: RunSpec, step: int, *, evaluated: bool = False, **metrics: float) -> Event:
    return Event(run.run_id, "running", step, 6, metrics, worker_id="host:1", evaluated=evaluated)


def test_runs_are_trained_in_the_order_of_the_plan_when_their_trials_have_started(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        first, second, third = scene.runs
        assert await scene.broker.lease(0, None, 0.01) == "wait"
        await scene.start(third, second)
        await asyncio.sleep(0.01)
        assert (await scene.lease(0)).run == second
        assert (await scene.lease(1)).run == third
        waiting = asyncio.create_task(scene.lease(2))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await scene.start(first)
        assert (await waiting).run == first
        poll = await scene.poll()
        assert (poll.leased, poll.to_train, poll.ended) == (3, {0: 3}, False)

    scenes(scenario, seeds(3))


def test_the_index_says_running_and_then_how_the_run_ended(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        assignment = await scene.lease()
        assert (assignment.number, assignment.attempt) == (1, 1)
        assert store.status(only.run_id) == "running"
        assert await scene.end(assignment) is None
        poll = await scene.poll_until_ended()
        assert store.status(only.run_id) == "finished"
        ((_, event),) = poll.events
        assert (event.status, event.metrics) == ("finished", {"in_dist/loss": 0.5})
        report = await scene.trial(only)
        assert (report.ended, report.event) == (True, event)

    scenes(scenario, seeds(1))


def test_groups_that_have_no_run_left_end(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        first, second = await scene.lease(0), await scene.lease(1)
        # One run is left, and the other group may need to be replaced: this one ends.
        assert await scene.end(first, group=0) is None
        assert await scene.end(second, group=1) is None
        assert (await scene.poll_until_ended()).leased == 0

    scenes(scenario, seeds(2))


def test_trials_report_every_evaluation_and_the_end(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        assignment = await scene.lease()
        await scene.broker.report(assignment.number, progress(only, 1))
        await scene.broker.report(assignment.number, progress(only, 2, evaluated=True, loss=3.0))
        await scene.broker.report(assignment.number, progress(only, 3))
        await scene.broker.report(assignment.number, progress(only, 4, evaluated=True, loss=2.0))
        # After a failure, the steps since the last checkpoint are trained again.
        await scene.broker.report(assignment.number, progress(only, 4, evaluated=True, loss=2.0))
        await scene.end(assignment)
        reports = [await scene.trial(only) for _ in range(3)]
        assert [(report.event.step, report.event.status) for report in reports] == [
            (2, "running"), (4, "running"), (6, "finished"),
        ]  # fmt: skip
        assert [report.ended for report in reports] == [False, False, True]

    scenes(scenario, seeds(1))


def test_a_resumed_run_first_reports_the_evaluations_that_it_made_before(scenes: Any, store: Store) -> None:
    (only,) = seeds(1)
    recorded = Recorded(store, only)
    recorded.log(1, {"train/loss": 3.0})
    recorded.log(3, {"train/loss": 2.0})
    recorded.log(3, {"in_dist/loss": 1.5})
    recorded.end("interrupted")

    async def scenario(scene: Scene) -> None:
        await scene.start()
        assignment = await scene.lease()
        assert assignment.attempt == 2
        report = await scene.trial(only)
        assert (report.event.step, report.event.metrics["in_dist/loss"], report.ended) == (3, 1.5, False)
        await scene.broker.report(assignment.number, progress(only, 3, evaluated=True))
        await scene.broker.report(assignment.number, progress(only, 6, evaluated=True))
        assert (await scene.trial(only)).event.step == 6

    scenes(scenario, [only], replay=True)


def test_a_run_that_the_scheduler_ends_is_stopped_with_its_reason(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        first, second = scene.runs
        await scene.start()
        assignment = await scene.lease()
        watching = asyncio.create_task(scene.broker.watch(0))
        await scene.broker.stop(first.run_id, "stopped by ASHA at step 3")
        order = await watching
        assert (order.number, order.request) == (assignment.number, "stopped")
        await scene.broker.stop(second.run_id, "stopped by ASHA at step 0")  # in the queue
        await scene.end(assignment, "stopped")
        assert (await scene.broker.lease(0, None, 0.05)) is None
        await scene.poll_until_ended()
        assert await scene.statuses() == ["stopped", "stopped"]
        assert store.run(first.run_id).state["message"] == "stopped by ASHA at step 3"
        assert set(store.index.statuses().values()) == {"stopped"}

    scenes(scenario, seeds(2))


def test_a_trial_that_is_cleaned_up_leaves_its_run_alone(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        assignment = await scene.lease()
        scene.trials[only.run_id].cancel()
        await asyncio.sleep(0.05)
        assert scene.broker.groups.of(0).order is None
        scene.ask(only)  # Tune starts the trial again, on another node
        await scene.end(assignment)
        assert (await scene.trial(only)).event.status == "finished"

    scenes(scenario, seeds(1))


def test_a_run_whose_worker_died_is_trained_again_as_a_new_attempt_and_fails_at_last(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        first, second = scene.runs
        await scene.start()
        for attempt in (1, 2):
            assignment = await scene.lease(attempt)
            assert (assignment.run, assignment.attempt) == (first, attempt)
            Recorded(store, first, attempt)
            assert await scene.broker.group_failed(attempt, "killed\nagain", "died")
            await scene.settled()
        assert (await scene.lease(3)).run == second
        while not (statuses := await scene.statuses()):
            await asyncio.sleep(0.01)
        assert statuses == ["failed"]
        assert store.run(first.run_id).state["message"] == "its worker died 2 times: killed again"
        assert store.status(first.run_id) == "failed"

    scenes(scenario, seeds(2), max_failures=1)


def test_a_preemption_is_not_counted(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        for attempt in range(1, 5):
            assignment = await scene.lease(attempt)
            assert assignment.attempt == attempt
            Recorded(store, only, attempt)
            assert await scene.broker.group_failed(attempt, "the node is gone", "preempted")
        # A worker that received SIGTERM: it wrote a checkpoint, and leaves.
        assignment = await scene.lease(5)
        Recorded(store, only, assignment.attempt).end("interrupted")
        result = AssignmentResult(assignment.number, "interrupted", None)
        assert await scene.broker.lease(5, result, TIMEOUT_S, leaves=True) is None
        assert (await scene.lease(6)).run == only
        assert await scene.statuses() == []

    scenes(scenario, seeds(1), max_failures=0)


def test_a_death_does_not_replace_a_result(scenes: Any, store: Store) -> None:
    """The worker wrote the result and died before it ended its assignment."""

    async def scenario(scene: Scene) -> None:
        await scene.start()
        assignment = await scene.lease()
        Recorded(store, assignment.run, assignment.attempt).end("finished")
        await scene.broker.group_failed(0, "killed", "died")
        await scene.poll_until_ended()
        assert await scene.statuses() == ["finished"]

    scenes(scenario, seeds(1), max_failures=0)


def test_an_error_on_a_rank_fails_the_run_when_it_is_repeated(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        for attempt in (1, 2):
            await scene.lease(attempt)
            Recorded(store, only, attempt).folder.fail("RuntimeError: too long", "Traceback …")
            await scene.broker.group_failed(attempt, "rank 0: RuntimeError", "error")
        poll = await scene.poll_until_ended()
        assert poll.events[-1][1].message == "RuntimeError: too long"
        assert store.run(only.run_id).state["traceback"] == "Traceback …"

    scenes(scenario, seeds(1), max_failures=5)


def test_messages_about_an_ended_assignment_are_ignored(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        old = await scene.lease(0)
        Recorded(scene.store, only, old.attempt)
        assert await scene.broker.group_failed(0, "killed", "died")
        assert not await scene.broker.group_failed(0, "killed", "died")
        new = await scene.lease(1)
        scene.broker.end_assignment(AssignmentResult(old.number, "finished", None))
        await scene.broker.report(old.number, progress(only, 5))
        assert not (await scene.poll()).events
        assert (await scene.poll()).leased == 1
        assert new.attempt == 2

    scenes(scenario, seeds(1))


def test_a_group_that_fails_without_a_run_says_so(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.broker.lease(0, None, 0.01) == "wait"
        assert not await scene.broker.group_failed(0, "ModuleNotFoundError", "error")
        assert (await scene.poll()).to_train == {0: 1}

    scenes(scenario, seeds(1))


def test_a_run_without_steps_is_taken_for_hanging_and_trained_again(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        await scene.poll()
        assignment = await scene.lease(7)
        Recorded(store, only, assignment.attempt)
        until = time.monotonic() + 0.6
        for step in range(100):  # as long as there are steps, it is left alone
            if time.monotonic() > until:
                break
            await scene.broker.report(assignment.number, progress(only, step + 1))
            await asyncio.sleep(0.02)
        assert (await scene.poll()).hanging == ()
        while not (hanging := (await scene.poll()).hanging):
            await asyncio.sleep(0.02)
        assert hanging == (7,)
        assert (await scene.poll()).hanging == ()
        second = await scene.lease(8)
        assert (second.run, second.attempt) == (only, 2)
        poll = await scene.poll_until_ended()
        assert poll.events[-1][1].message == (
            "its worker died 2 times: it made no step for 0.3 s (resources.step_timeout_s)"
        )

    scenes(scenario, seeds(1), max_failures=1, step_timeout_s=0.3)


def test_no_more_runs_are_started_after_too_many_have_failed(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        first, second, third = scene.runs
        await scene.start(first, second)
        bad, good = await scene.lease(0), await scene.lease(1)
        await scene.start(third)
        assert await scene.end(bad, "failed") is None
        while not (await scene.poll()).draining:
            await asyncio.sleep(0.01)
        assert not (await scene.poll()).ended
        assert await scene.end(good, "finished", group=1) is None
        assert (await scene.poll_until_ended()).leased == 0
        report = await scene.trial(third)
        assert (report.ended, report.event.status) == (True, "pending")
        assert store.status(third.run_id) == "pending"

    scenes(scenario, seeds(3), max_failed_runs=1)


def test_close_interrupts_all_runs_and_assigns_no_more(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        first, second, third = scene.runs
        await scene.start(first, second)
        assignment, dying = await scene.lease(0), await scene.lease(1)
        idle = asyncio.create_task(scene.broker.lease(2, None, TIMEOUT_S))
        watching = asyncio.create_task(scene.broker.watch(0))
        await asyncio.sleep(0.01)
        await scene.broker.close()
        order = await watching
        assert (order.number, order.request) == (assignment.number, "interrupted")
        assert await idle is None
        assert (await scene.trial(first)).ended
        await scene.start(third)
        assert (await scene.trial(third)).ended
        await scene.broker.stop(first.run_id, "stopped by ASHA")  # too late
        assert await scene.end(assignment, "interrupted") is None
        Recorded(store, second, dying.attempt)
        await scene.broker.group_failed(1, "killed", "died")  # it is left to be resumed
        while (await scene.poll()).leased:
            await asyncio.sleep(0.01)
        assert store.status(first.run_id) == store.status(second.run_id) == "interrupted"
        assert store.status(third.run_id) == "pending"

    scenes(scenario, seeds(3))


def test_leases_end_with_the_broker(scenes: Any, store: Store) -> None:
    (only,) = seeds(1)

    async def scenario(scene: Scene) -> None:
        await scene.start()
        assignment = await scene.lease()
        Recorded(store, only, assignment.attempt)

    scenes(scenario, [only])
    assert store.status(only.run_id) == "interrupted"
    with other_sweep(store) as other:
        assert isinstance(other.acquire(only), Lease)


def test_progress_is_written_with_the_lease(scenes: Any, store: Store) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        assignment = await scene.lease()
        await scene.broker.report(assignment.number, progress(only, 4))
        while store.index.records([only.run_id])[only.run_id].step != 4:
            await asyncio.sleep(0.02)
        assert store.index.records([only.run_id])[only.run_id].worker_id == "host:1"

    scenes(scenario, seeds(1), leases=LeaseHolder(store, "this-sweep", ttl_s=0.2))


def test_progress_replaces_older_progress(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        assignment = await scene.lease()
        for step in range(3):
            await scene.broker.report(assignment.number, progress(only, step))
        poll = await scene.poll()
        assert [event.step for _, event in poll.events] == [2]
        acknowledged = poll.events[-1][0]
        await scene.end(assignment)
        while not (events := (await scene.poll(acknowledged)).events):
            await asyncio.sleep(0.01)
        assert [event.status for _, event in events] == ["finished"]
        # Events are sent again until they are acknowledged.
        assert (await scene.poll(acknowledged)).events == events
        assert (await scene.poll(events[-1][0])).events == ()

    scenes(scenario, seeds(1))


def test_the_driver_waits_for_an_event(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        (only,) = scene.runs
        await scene.start()
        assignment = await scene.lease()
        waiting = asyncio.create_task(scene.broker.poll(0, TIMEOUT_S))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await scene.broker.report(assignment.number, progress(only, 3))
        assert [event.step for _, event in (await waiting).events] == [3]

    scenes(scenario, seeds(1))


def test_a_run_of_another_sweep_is_left_to_it_and_its_end_is_reported(scenes: Any, store: Store) -> None:
    taken, free = seeds(2)

    async def scenario(scene: Scene) -> None:
        with other_sweep(store) as other:
            other.acquire(taken)
            await scene.start()
            assignment = await scene.lease()
            assert assignment.run == free
            report = await scene.trial(taken)
            assert (report.ended, report.elsewhere) == (True, True)
            assert (await scene.poll()).to_train == {0: 1}
            await scene.end(assignment)
            await asyncio.sleep(0.1)
            assert not (await scene.poll()).ended
            Recorded(store, taken).end("finished")
            other.end(taken.run_id)
            poll = await scene.poll_until_ended()
        assert [(event.run_id, event.status) for _, event in poll.events] == [
            (free.run_id, "finished"), (taken.run_id, "finished"),
        ]  # fmt: skip
        assert poll.returned == ()

    scenes(scenario, [taken, free])


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_another_sweep_gives_up_is_trained_here(scenes: Any, store: Store, begun: bool) -> None:
    (taken,) = seeds(1)

    async def scenario(scene: Scene) -> None:
        with other_sweep(store) as other:
            other.acquire(taken)
            await scene.start()
            group = asyncio.create_task(scene.broker.lease(0, None, TIMEOUT_S))
            assert (await scene.trial(taken)).elsewhere
            assert await group is None  # there is nothing to train at this moment
            if begun:
                Recorded(store, taken).end("interrupted")
            other.end(taken.run_id)
            while not (returned := (await scene.poll()).returned):
                await asyncio.sleep(0.01)
        assert returned == (taken.run_id,)
        await scene.start()
        assert (await scene.lease(1)).attempt == 1 + begun

    scenes(scenario, [taken])


def test_a_run_that_is_finished_meanwhile_is_not_trained(scenes: Any, store: Store) -> None:
    (only,) = seeds(1)

    async def scenario(scene: Scene) -> None:
        with other_sweep(store) as other:
            other.acquire(only)
            Recorded(store, only).end("finished")
            other.end(only.run_id)
        await scene.start()
        assert await scene.broker.lease(0, None, 0.1) is None
        assert await scene.statuses() == ["finished"]
        assert (await scene.trial(only)).event.status == "finished"

    scenes(scenario, [only])


def test_a_lost_lease_interrupts_the_run_which_then_belongs_to_the_other_sweep(scenes: Any, store: Store) -> None:
    (only,) = seeds(1)

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.poll()
        assignment = await scene.lease()
        # The broker was suspended for so long that its lease expired.
        store.index.renew(scene.broker.leases.owner, -1.0)
        with other_sweep(store) as other:
            assert isinstance(other.acquire(only), Lease)
            order = await scene.broker.watch(0)
            assert (order.number, order.request) == (assignment.number, "interrupted")
            scene.broker.end_assignment(AssignmentResult(assignment.number, "fenced", None))
            assert (await scene.trial(only)).elsewhere
            assert store.status(only.run_id) == "running"

    scenes(scenario, [only], leases=LeaseHolder(store, "this-sweep", ttl_s=1.0))


def test_no_end_is_reported_while_the_process_of_another_trial_starts(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        first, second = scene.runs
        await scene.broker.start(first.run_id)
        await scene.broker.start(second.run_id)
        scene.ask(first)
        await scene.end(await scene.lease())
        await asyncio.sleep(0.05)
        assert not scene.trials[first.run_id].done()
        scene.ask(second)
        assert (await scene.trial(first)).ended

    scenes(scenario, seeds(2))


def test_a_store_that_cannot_be_written_ends_the_sweep(
    scenes: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: RunSpec) -> None:
        raise OSError("No space left on device")

    async def scenario(scene: Scene) -> None:
        monkeypatch.setattr(scene.broker.leases, "acquire", fail)
        await scene.start()
        assert await scene.broker.lease(0, None, TIMEOUT_S) is None
        assert (await scene.poll()).problem == "OSError: No space left on device"

    scenes(scenario, seeds(1))


def test_runs_are_added_while_a_search_suggests_them(scenes: Any) -> None:
    async def scenario(scene: Scene) -> None:
        first, second = seeds(2)
        assert (await scene.poll()).to_train == {0: 3}
        await scene.broker.start(first.run_id, first)
        scene.ask(first)
        result = await scene.end(await scene.lease())
        assert result == "wait"  # for the runs that are still to be suggested
        scene.ask(second)  # the trial's call overtakes that of the driver
        await asyncio.sleep(0.02)
        await scene.broker.start(second.run_id, second)
        assert scene.broker.trials.none_left
        assignment = await scene.lease()
        assert assignment.run == second
        await scene.broker.add_no_more()
        assert await scene.end(assignment) is None
        assert len((await scene.poll_until_ended()).events) == 2

    scenes(scenario, [], more_runs=3)


def test_ten_thousand_runs_take_no_time_that_grows_with_their_number(store: Store) -> None:
    """Runs through queue, assignment, report and end, with leases that cost nothing."""

    class NoLeases:
        def acquire(self, run: RunSpec) -> Lease:
            return Lease(run.run_id, 1)

        def progress(self, run_id: str, step: int, worker_id: str) -> None: ...

        def end(self, run_id: str) -> str:
            return "finished"

        def lost(self) -> set[str]:
            return set()

        def close(self) -> None: ...

    async def seconds(count: int) -> float:
        runs = seeds(count)
        broker = Broker(store, "this-sweep", runs, max_failures=1, leases=NoLeases())  # type: ignore[arg-type]
        for each in broker.runs.values():
            broker.table.queue(each)
        started_s = time.perf_counter()
        result, acknowledged = None, 0
        while isinstance(assignment := await broker.lease(0, result, 0.0), Assignment):
            await broker.report(assignment.number, progress(assignment.run, 3))
            result = AssignmentResult(assignment.number, "finished", Event(assignment.run.run_id, "finished"))
            acknowledged = max([acknowledged, *(n for n, _ in (await broker.poll(acknowledged, 0.0)).events)])
        taken_s = time.perf_counter() - started_s
        await broker.close()
        await broker.release()
        return taken_s / count

    async def scenario() -> None:
        await seconds(100)
        few, many = await seconds(500), await seconds(10_000)
        assert many < 3 * few

    run(scenario())


def test_a_group_that_is_asked_to_leave_trains_one_run_at_least(scenes: Any) -> None:
    """Else shapes whose groups start slowly would take turns without training anything."""

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.broker.ask_to_leave([0, 1])
        assignment = await scene.lease(0)
        assert await scene.end(assignment, group=0) is None
        last = await scene.lease(1)
        idle = asyncio.create_task(scene.broker.lease(2, None, TIMEOUT_S))
        await asyncio.sleep(0.01)
        await scene.broker.ask_to_leave([2])
        assert await idle is None  # there is no run that it could take
        assert await scene.end(last, group=1) is None

    scenes(scenario, seeds(2))
