"""The broker, without Ray: which group gets which run, and when."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.broker import MAX_IDLE_FAILURES, Broker, Lease, LeaseResult
from tests.sweep.runs import seeds


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def broker_of(store: Store, runs: list[RunSpec], max_failures: int = 1) -> Broker:
    return Broker(str(store.root), runs, max_failures=max_failures, trials=1, ahead=0)


async def lease_of(broker: Broker, group: int = 0) -> Lease:
    lease = await broker.lease(group, None, 0.0)
    assert isinstance(lease, Lease)
    return lease


def end(broker: Broker, lease: Lease, group: int = 0, outcome: Literal["finished", "interrupted"] = "finished") -> None:
    """The group ends its lease and asks for no other."""
    broker.end_lease(group, LeaseResult(lease.number, outcome, Event(lease.run.run_id, outcome, 6, 6)))


async def turns(count: int = 5) -> None:
    """Let the other tasks run until they wait."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_runs_are_leased_in_order_until_there_are_none(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(2)
        broker = broker_of(store, runs)
        first, second = await lease_of(broker, 0), await lease_of(broker, 1)
        assert [first.run, second.run] == runs
        assert [first.number, second.number] == [1, 2]
        end(broker, second, group=1)
        # The first run may still come back, so this group has to wait.
        assert await broker.lease(1, None, 0.01) == "wait"
        end(broker, first)
        assert await broker.lease(1, None, 1.0) is None
        batch = await broker.poll_events(0, 0.0)
        assert batch.ended
        assert [event.run_id for _, event in batch.events] == [runs[1].run_id, runs[0].run_id]

    run(scenario())


def test_a_lease_ends_with_the_request_for_the_next(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(2)
        broker = broker_of(store, runs)
        first = await lease_of(broker)
        event = Event(runs[0].run_id, "finished", 6, 6, {"in_dist/loss": 0.5})
        second = await broker.lease(0, LeaseResult(first.number, "finished", event), 0.0)
        assert isinstance(second, Lease)
        assert second.run == runs[1]
        batch = await broker.poll_events(0, 0.0)
        assert [event for _, event in batch.events] == [event]
        assert (batch.leased, batch.ended) == (1, False)

    run(scenario())


def test_a_result_without_an_event_is_read_from_the_store(store: Store) -> None:
    async def scenario() -> None:
        (only,) = runs = seeds(1)
        broker = broker_of(store, runs)
        lease = await lease_of(broker)
        folder = store.run(only.run_id)
        with folder.lock():
            folder.begin(only, "a worker")
            folder.finish({"in_dist/loss": 0.5}, {})
        broker.end_lease(0, LeaseResult(lease.number, "finished", None))
        ((_, event),) = (await broker.poll_events(0, 0.0)).events
        assert (event.status, event.metrics, event.worker_id) == ("finished", {"in_dist/loss": 0.5}, "a worker")

    run(scenario())


def test_trials_limit_which_runs_may_be_leased(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(4)
        broker = broker_of(store, runs)
        assert (await lease_of(broker, 0)).run == runs[0]  # no trial has started: no limit
        await broker.open(runs[1].run_id, "trial 1")
        assert (await lease_of(broker, 1)).run == runs[1]
        waiting = asyncio.create_task(broker.lease(2, None, 60.0))
        await turns()
        assert not waiting.done()
        await broker.open(runs[3].run_id, "trial 2")  # trials start in order, so the third is starting
        lease = await waiting
        assert isinstance(lease, Lease)
        assert lease.run == runs[2]

    run(scenario())


def test_runs_may_be_leased_a_few_ahead_of_their_trials(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(4)
        broker = Broker(str(store.root), runs, max_failures=1, trials=1, ahead=2)
        await broker.open(runs[0].run_id, "trial 1")
        for expected in runs[:3]:
            assert (await lease_of(broker)).run == expected
        assert await broker.lease(0, None, 0.0) == "wait"

    run(scenario())


def test_a_run_whose_worker_died_is_leased_again_first_and_fails_after_max_failures(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(2)
        broker = broker_of(store, runs, max_failures=1)
        assert (await lease_of(broker)).run == runs[0]
        await broker.group_failed(0, "killed", died=True)
        assert (await lease_of(broker)).run == runs[0]
        await broker.group_failed(0, "killed\nagain", died=True)
        folder = store.run(runs[0].run_id)
        assert folder.status == "failed"
        assert folder.state["message"] == "its worker died 2 times: killed again"
        batch = await broker.poll_events(0, 0.0)
        assert [event.status for _, event in batch.events] == ["failed"]
        assert (await lease_of(broker)).run == runs[1]
        assert batch.fatal is None

    run(scenario())


def test_a_death_does_not_replace_a_result(store: Store) -> None:
    """The worker wrote the result and died before it ended its lease."""

    async def scenario() -> None:
        (only,) = runs = seeds(1)
        broker = broker_of(store, runs, max_failures=0)
        await lease_of(broker)
        folder = store.run(only.run_id)
        with folder.lock():
            folder.begin(only, "a worker")
            folder.finish({"in_dist/loss": 0.5}, {})
        await broker.group_failed(0, "killed", died=True)
        assert folder.status == "finished"
        assert folder.state["status"] == "running"

    run(scenario())


def test_an_error_on_a_rank_fails_the_run_when_it_is_repeated(store: Store) -> None:
    async def scenario() -> None:
        (only,) = runs = seeds(1)
        broker = broker_of(store, runs, max_failures=5)
        for _ in range(2):
            assert (await lease_of(broker)).run == only
            with store.run(only.run_id).lock():
                store.run(only.run_id).begin(only, "rank 0")
                store.run(only.run_id).fail("RuntimeError: too long", "Traceback …")
            await broker.group_failed(0, "rank 0: RuntimeError", died=False)
        batch = await broker.poll_events(0, 0.0)
        assert batch.ended
        assert batch.events[-1][1].message == "RuntimeError: too long"
        assert store.run(only.run_id).state["traceback"] == "Traceback …"

    run(scenario())


def test_messages_about_an_ended_lease_are_ignored(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(1)
        broker = broker_of(store, runs)
        lease = await lease_of(broker)
        await broker.register(0, None)  # its workers were restarted
        end(broker, lease)
        await broker.report(lease.number, Event(runs[0].run_id, "running"))
        assert not (await broker.poll_events(0, 0.0)).events
        assert (await lease_of(broker)).run == runs[0]

    run(scenario())


def test_workers_that_fail_without_a_lease_end_the_sweep(store: Store) -> None:
    async def scenario() -> None:
        broker = broker_of(store, seeds(1))
        for _ in range(MAX_IDLE_FAILURES):
            assert (await broker.poll_events(0, 0.0)).fatal is None
            await broker.group_failed(0, "ModuleNotFoundError: cope_sweep", died=False)
        assert "ModuleNotFoundError" in str((await broker.poll_events(0, 0.0)).fatal)
        assert await broker.lease(0, None, 0.0) is None

    run(scenario())


def test_training_resets_the_count_of_idle_failures(store: Store) -> None:
    async def scenario() -> None:
        broker = broker_of(store, seeds(2))
        await broker.group_failed(0, "killed", died=True)
        end(broker, await lease_of(broker))
        await broker.group_failed(0, "killed", died=True)
        assert (await broker.poll_events(0, 0.0)).fatal is None

    run(scenario())


def test_a_group_that_registers_with_a_problem_ends_the_sweep(store: Store) -> None:
    async def scenario() -> None:
        broker = broker_of(store, seeds(1))
        await broker.register(0, "node x cannot see the store")
        assert (await broker.poll_events(0, 0.0)).fatal == "node x cannot see the store"

    run(scenario())


def test_a_stopped_trial_interrupts_its_run_only(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(3)
        broker = broker_of(store, runs)
        lease = await lease_of(broker)
        watching = asyncio.create_task(broker.watch(0, 0))
        await turns()
        assert not watching.done()
        await broker.interrupt(runs[1].run_id)  # pending: never leased
        await broker.interrupt(runs[0].run_id)
        assert await watching == lease.number
        end(broker, lease, outcome="interrupted")
        last = await lease_of(broker)
        assert last.run == runs[2]
        assert not (await broker.poll_events(0, 0.0)).ended
        end(broker, last)
        assert (await broker.poll_events(0, 0.0)).ended

    run(scenario())


def test_a_death_after_its_trial_was_stopped_leaves_a_run_interrupted(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(1)
        broker = broker_of(store, runs, max_failures=5)
        await lease_of(broker)
        await broker.interrupt(runs[0].run_id)
        await broker.group_failed(0, "killed", died=True)
        batch = await broker.poll_events(0, 0.0)
        assert (batch.ended, [event.status for _, event in batch.events]) == (True, ["interrupted"])

    run(scenario())


def test_close_interrupts_all_runs_and_grants_no_more_leases(store: Store) -> None:
    async def scenario() -> None:
        runs = seeds(2)
        broker = broker_of(store, runs)
        lease = await lease_of(broker)
        end(broker, await lease_of(broker, 1), group=1, outcome="interrupted")
        watching = asyncio.create_task(broker.watch(0, 0))
        idle = asyncio.create_task(broker.lease(1, None, 60.0))
        await turns()
        await broker.close()
        assert await watching == lease.number
        assert await idle is None
        # A worker that dies now leaves its run to be resumed.
        await broker.group_failed(0, "killed", died=True)
        assert (await broker.poll_events(0, 0.0)).events[-1][1].status == "interrupted"

    run(scenario())


def test_progress_replaces_older_progress(store: Store) -> None:
    async def scenario() -> None:
        (only,) = runs = seeds(1)
        broker = broker_of(store, runs)
        lease = await lease_of(broker)
        for step in range(3):
            await broker.report(lease.number, Event(only.run_id, "running", step, 6))
        batch = await broker.poll_events(0, 0.0)
        assert [event.step for _, event in batch.events] == [2]
        assert await broker.progress(only.run_id, 0.0) == (batch.events[0][1], False)
        # Events are sent again until they are acknowledged.
        end(broker, lease)
        acknowledged = batch.events[-1][0]
        first = await broker.poll_events(acknowledged, 0.0)
        assert [event.status for _, event in first.events] == ["finished"]
        assert await broker.poll_events(acknowledged, 0.0) == first
        assert not (await broker.progress(only.run_id, 0.01))[1]  # its trial has not started
        await broker.open(only.run_id, "trial 1")
        assert (await broker.progress(only.run_id, 60.0))[1]

    run(scenario())


def test_the_driver_waits_for_an_event(store: Store) -> None:
    async def scenario() -> None:
        (only,) = runs = seeds(1)
        broker = broker_of(store, runs)
        lease = await lease_of(broker)
        waiting = asyncio.create_task(broker.poll_events(0, 60.0))
        await turns()
        assert not waiting.done()
        await broker.report(lease.number, Event(only.run_id, "running", 3, 6))
        assert [event.step for _, event in (await waiting).events] == [3]

    run(scenario())


def test_a_run_that_another_process_trains_is_leased_when_that_process_gives_it_up(store: Store) -> None:
    async def scenario() -> None:
        busy, other = runs = seeds(2)
        broker = broker_of(store, runs)
        first = await lease_of(broker)
        with store.run(busy.run_id).lock():
            store.run(busy.run_id).begin(busy, "another process")
            second = await broker.lease(0, LeaseResult(first.number, "busy", None), 0.0)
            assert isinstance(second, Lease)
            assert second.run == other
            assert await broker.lease(1, None, 0.2) == "wait"
        end(broker, second)
        again = await broker.lease(0, None, 60.0)
        assert isinstance(again, Lease)
        assert again.run == busy

    run(scenario())


def test_the_end_of_a_run_in_another_process_is_reported(store: Store) -> None:
    async def scenario() -> None:
        (busy,) = runs = seeds(1)
        broker = broker_of(store, runs)
        first = await lease_of(broker)
        folder = store.run(busy.run_id)
        with folder.lock():
            folder.begin(busy, "another process")
            assert await broker.lease(0, LeaseResult(first.number, "busy", None), 0.2) == "wait"
            folder.finish({}, {})
        assert await broker.lease(0, None, 60.0) is None
        ((_, event),) = (await broker.poll_events(0, 0.0)).events
        assert (event.status, event.worker_id) == ("finished", "another process")

    run(scenario())
