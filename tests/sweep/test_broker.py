"""The broker, without Ray: who gets which run, and when."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from cope_sweep.record import Event, Ledger
from cope_sweep.spec import RunSpec
from cope_sweep.sweep.broker import IDLE_LOSSES, Broker, Ended, Lease
from tests.sweep.conftest import seeds


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


def broker_of(ledger: Ledger, runs: list[RunSpec], max_failures: int = 1) -> Broker:
    return Broker(str(ledger.root), runs, max_failures=max_failures, trials=1, ahead=0)


async def leased(broker: Broker, group: int = 0) -> RunSpec:
    lease = await broker.lease(group, None, 0.0)
    assert isinstance(lease, Lease)
    return lease.run


async def ended(broker: Broker, run: RunSpec, status: str = "finished") -> None:
    """The group that trains `run` says how it ended, and is given nothing new."""
    group, number = next((g, s.lease.number) for g, s in broker.groups.items() if s.lease and s.lease.run == run)
    broker._end_lease(group, Ended(number, status, Event(run.run_id, status, 6, 6)))  # type: ignore[arg-type]


def test_runs_are_leased_in_order_until_there_are_none(ledger: Ledger) -> None:
    async def scenario() -> None:
        runs = seeds(2)
        broker = broker_of(ledger, runs)
        assert await leased(broker, 0) == runs[0]
        assert await leased(broker, 1) == runs[1]
        await ended(broker, runs[1])
        # The other run may still come back, so this group is kept.
        assert await broker.lease(1, None, 0.01) == "wait"
        await ended(broker, runs[0])
        assert await broker.lease(1, None, 1.0) is None
        news = await broker.news(0, 0.0)
        assert news.over
        assert [event.run_id for _, event in news.events] == [runs[1].run_id, runs[0].run_id]

    run(scenario())


def test_trials_open_the_gate(ledger: Ledger) -> None:
    async def scenario() -> None:
        runs = seeds(4)
        broker = broker_of(ledger, runs)
        assert await leased(broker, 0) == runs[0]  # before the first trial is up, nothing waits for it
        await broker.open(runs[1].run_id, "trial 1")
        assert await leased(broker, 1) == runs[1]
        waiting = asyncio.create_task(broker.lease(2, None, 5.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await broker.open(runs[3].run_id, "trial 2")  # trials start in order: run 2's is on its way
        lease = await waiting
        assert isinstance(lease, Lease)
        assert lease.run == runs[2]

    run(scenario())


def test_a_lost_run_is_leased_again_first_and_fails_after_its_tries(ledger: Ledger) -> None:
    async def scenario() -> None:
        runs = seeds(2)
        broker = broker_of(ledger, runs, max_failures=1)
        assert await leased(broker) == runs[0]
        await broker.lost(0, "killed", died=True)
        assert await leased(broker) == runs[0]
        await broker.lost(0, "killed\nagain", died=True)
        folder = ledger.run(runs[0].run_id)
        assert folder.status == "failed"
        assert folder.state["message"] == "its worker died 2 times: killed again"
        news = await broker.news(0, 0.0)
        assert [event.status for _, event in news.events] == ["failed"]
        assert await leased(broker) == runs[1]
        assert news.fatal is None

    run(scenario())


def test_an_error_on_a_rank_is_believed_the_second_time(ledger: Ledger) -> None:
    async def scenario() -> None:
        (only,) = runs = seeds(1)
        broker = broker_of(ledger, runs, max_failures=5)
        for _ in range(2):
            assert await leased(broker) == only
            with ledger.run(only.run_id).lock():
                ledger.run(only.run_id).begin(only, "rank 0")
                ledger.run(only.run_id).fail("RuntimeError: too long", "Traceback …")
            await broker.lost(0, "rank 0: RuntimeError", died=False)
        news = await broker.news(0, 0.0)
        assert news.over
        assert news.events[-1][1].message == "RuntimeError: too long"
        assert ledger.run(only.run_id).state["traceback"] == "Traceback …"

    run(scenario())


def test_what_a_given_up_lease_still_says_is_not_heard(ledger: Ledger) -> None:
    async def scenario() -> None:
        runs = seeds(1)
        broker = broker_of(ledger, runs)
        lease = await broker.lease(0, None, 0.0)
        assert isinstance(lease, Lease)
        await broker.hello(0, None)  # its workers were started anew
        broker._end_lease(0, Ended(lease.number, "finished", Event(runs[0].run_id, "finished")))
        await broker.tell(lease.number, Event(runs[0].run_id, "running"))
        assert not (await broker.news(0, 0.0)).events
        assert await leased(broker) == runs[0]

    run(scenario())


def test_workers_that_die_idle_end_the_sweep(ledger: Ledger) -> None:
    async def scenario() -> None:
        broker = broker_of(ledger, seeds(1))
        for _ in range(IDLE_LOSSES):
            assert (await broker.news(0, 0.0)).fatal is None
            await broker.lost(0, "ModuleNotFoundError: cope_sweep", died=False)
        assert "ModuleNotFoundError" in str((await broker.news(0, 0.0)).fatal)
        assert await broker.lease(0, None, 0.0) is None

    run(scenario())


def test_a_group_with_a_problem_ends_the_sweep(ledger: Ledger) -> None:
    async def scenario() -> None:
        broker = broker_of(ledger, seeds(1))
        await broker.hello(0, "node x cannot see the store")
        assert (await broker.news(0, 0.0)).fatal == "node x cannot see the store"

    run(scenario())


def test_stopping_a_trial_interrupts_its_run_only(ledger: Ledger) -> None:
    async def scenario() -> None:
        runs = seeds(3)
        broker = broker_of(ledger, runs)
        lease = await broker.lease(0, None, 0.0)
        assert isinstance(lease, Lease)
        watching = asyncio.create_task(broker.watch(0, 0))
        await asyncio.sleep(0.02)
        assert not watching.done()
        await broker.interrupt(runs[1].run_id)  # pending: never leased
        await broker.interrupt(runs[0].run_id)
        assert await watching == lease.number
        await ended(broker, runs[0], "interrupted")
        assert await leased(broker) == runs[2]
        assert not (await broker.news(0, 0.0)).over
        await ended(broker, runs[2])
        assert (await broker.news(0, 0.0)).over

    run(scenario())


def test_closing_interrupts_all_and_leases_no_more(ledger: Ledger) -> None:
    async def scenario() -> None:
        runs = seeds(2)
        broker = broker_of(ledger, runs)
        lease = await broker.lease(0, None, 0.0)
        assert isinstance(lease, Lease)
        watching = asyncio.create_task(broker.watch(0, 0))
        idle = asyncio.create_task(broker.lease(1, None, 5.0))
        await broker.close()
        assert await watching == lease.number
        assert isinstance(await idle, Lease | None)
        # A worker that dies on the way out leaves its run to be resumed.
        await broker.lost(0, "killed", died=True)
        assert (await broker.news(0, 0.0)).events[-1][1].status == "interrupted"

    run(scenario())


def test_progress_is_passed_on_newest_first(ledger: Ledger) -> None:
    async def scenario() -> None:
        (only,) = runs = seeds(1)
        broker = broker_of(ledger, runs)
        lease = await broker.lease(0, None, 0.0)
        assert isinstance(lease, Lease)
        for step in range(3):
            await broker.tell(lease.number, Event(only.run_id, "running", step, 6))
        news = await broker.news(0, 0.0)
        assert [event.step for _, event in news.events] == [2]
        assert await broker.progress(only.run_id, 0.0) == (news.events[0][1], False)
        # What was heard is not said again; what was not heard is.
        await ended(broker, only)
        first = await broker.news(news.events[-1][0], 0.0)
        assert await broker.news(news.events[-1][0], 0.0) == first
        assert not (await broker.progress(only.run_id, 0.01))[1]  # its trial is not up
        await broker.open(only.run_id, "trial 1")
        assert (await broker.progress(only.run_id, 5.0))[1]

    run(scenario())


def test_a_run_locked_elsewhere_comes_back_when_it_is_given_up(ledger: Ledger) -> None:
    async def scenario() -> None:
        busy, other = runs = seeds(2)
        broker = broker_of(ledger, runs)
        lease = await broker.lease(0, None, 0.0)
        assert isinstance(lease, Lease)
        with ledger.run(busy.run_id).lock():
            ledger.run(busy.run_id).begin(busy, "elsewhere")
            next_lease = await broker.lease(0, Ended(lease.number, "busy", None), 0.0)
            assert isinstance(next_lease, Lease)
            assert next_lease.run == other
            await asyncio.sleep(0.1)
        await ended(broker, other)
        again = await broker.lease(0, None, 5.0)
        assert isinstance(again, Lease)
        assert again.run == busy

    run(scenario())
