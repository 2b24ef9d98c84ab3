"""The leases of runs, and how they ended: what the broker reads from the store and writes to it, all in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from cope_sweep.store import Event, Lease, LeaseHolder, Refusal, Store
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep.broker_runs import RunTable
from cope_sweep.sweep.broker_state import BrokerRun
from cope_sweep.sweep.executor import final_event, record_failure, record_stop
from cope_sweep.sweep.messages import Failure

T = TypeVar("T")

INDEX_RETRY_S = 0.5
"""Before a call is repeated for which the index did not answer."""


class RunRecords:
    """Takes and ends the leases of runs, and writes their ends."""

    def __init__(
        self,
        store: Store,
        leases: LeaseHolder,
        table: RunTable,
        *,
        max_failures: int,
        on_problem: Callable[[], Awaitable[None]],
    ) -> None:
        """Create the records.

        Args:
            store: The store.
            leases: The leases of the sweep.
            table: Its runs.
            max_failures: How often the worker of a run may die before the run fails.
            on_problem: Called when the store cannot be used.
        """
        self.store, self.leases, self.table, self.max_failures = store, leases, table, max_failures
        self.on_problem = on_problem
        self.closed = False
        """Whether no more runs are trained."""
        self.problem: str | None = None
        """Why the store cannot be used."""
        self.tasks: set[asyncio.Task[None]] = set()
        """One for each run whose last entries are being written."""

    async def acquire(self, run: BrokerRun) -> Lease | None:
        """Take the lease of a run; None if another sweep has it or has finished it."""
        run.state = "leased"
        lease = await self.in_thread(self.leases.acquire, run.spec)
        if isinstance(lease, Refusal):
            if lease.reason == "leased":
                self.table.move_elsewhere(run)
            else:
                self.table.mark_ended(run, await self.in_thread(final_event, run.spec, self.store))
            return None
        return lease

    async def refuse(self, run: BrokerRun, reason: str) -> None:
        """Record that a run failed, because no group can train it."""
        if self.closed or self.table.draining:
            run.state = "pending"
        elif await self.acquire(run) is not None:
            await self.in_thread(record_failure, run.spec, self.store, reason, reason, False)
            await self.end(run, None)

    async def after_failure(self, run: BrokerRun, reason: str, failure: Failure) -> None:
        """Start a run again whose group failed, or record that it failed.

        The run has failed if its worker died too often, or if one of its ranks raised an error for the second time.
        The first error does not count, because an error on one rank and the death of another rank look alike.
        """
        run.deaths += failure == "died"
        run.errors += failure == "error"
        if run.deaths > self.max_failures or run.errors > 1:
            text = " ".join(reason.split())
            message = f"its worker died {run.deaths} times: {text}" if failure == "died" else text
            await self.in_thread(record_failure, run.spec, self.store, message, reason, failure == "error")
            await self.end(run, None)
        else:
            await self.start_again(run)

    async def start_again(self, run: BrokerRun) -> None:
        """Put a run back into the queue, to be trained from its last checkpoint as a new attempt."""
        if self.closed or self.table.draining or run.stop_reason is not None:
            await self.end(run, None)
            return
        await self.in_thread(self.leases.end, run.spec.run_id)
        self.table.queue(run)

    async def end(self, run: BrokerRun, event: Event | None) -> None:
        """Write a run's row, give its lease back and report its end."""
        if run.stop_reason is not None:
            await self.in_thread(record_stop, run.spec, self.store, run.stop_reason)
            event = None
        await self.in_thread(self.leases.end, run.spec.run_id)
        event = event or await self.in_thread(final_event, run.spec, self.store)
        self.table.mark_ended(run, event or run.latest)

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """The result of a call that uses the store; None if it failed, which ends the sweep.

        While the index does not answer, the call is repeated.
        """
        while True:
            try:
                return await asyncio.to_thread(call, *arguments)
            except Exception as error:
                if isinstance(error, IndexUnavailable) and not self.closed:
                    await asyncio.sleep(INDEX_RETRY_S)
                    continue
                self.problem = self.problem or f"{type(error).__name__}: {error}"
                await self.on_problem()
                return None

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start one of these operations; `tasks` holds it until it has ended."""
        # The event loop keeps only weak references to its tasks.
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
