"""The broker of a sweep alone, without Ray and without training: simulated groups, trials and a driver on one event loop.

python -m cope_benchmarks.sweep_broker LEASES GROUPS RUNS --store STORE

LEASES is `memory`, or `sqlite` for an index in the store. Prints the measurement as JSON.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Lease, LeaseHolder, Status, Store
from cope_sweep.store.index import RunRow
from cope_sweep.sweep.broker import Broker
from cope_sweep.sweep.messages import Assignment, AssignmentResult

SPEC: dict[str, Any] = {
    "task": {"kind": "selective_copy", "tokens": 4, "blanks": 12, "dense_blanks": 6, "sparse_blanks": 24},
    "model": {"layers": 1, "dim": 32, "heads": 2, "position": ["cope"]},
    "train": {"steps": 50, "batch": 16},
}
METRICS = {f"{split}/{name}": 1.0 for split in ("in_dist", "dense", "sparse") for name in ("token_error", "loss")}
REPORTS = 3
"""Reports of each run; the last one is an evaluation."""
LEASE_WAIT_S, EVENT_WAIT_S = 10.0, 0.2
QUEUED_TRIALS = 1
"""Trials beyond the number of groups, as in a sweep."""
LAG_INTERVAL_S = 0.05


class LeasesInMemory(LeaseHolder):
    """Leases that are in no database."""

    def acquire(self, run: RunSpec) -> Lease:
        return Lease(run.run_id, 1)

    def progress(self, run_id: str, step: int, worker_id: str) -> None:
        """Nothing is renewed."""

    def end(self, run_id: str) -> Status:
        return "finished"


class LeasesOfRunsWithoutFolders(LeaseHolder):
    """Leases in the index. A run ends there with a result of its own, because it has no folder."""

    def end(self, run_id: str) -> Status:
        with self._lock:
            self._held.discard(run_id)
            self._progress.pop(run_id, None)
        now_ms = int(time.time() * 1000)
        row = RunRow(run_id, "finished", SPEC, 1, 50, sweep_id=self.sweep_id, ended_ms=now_ms, metrics=METRICS)
        self.store.index.end(row, self.owner)
        return "finished"


class Simulation:
    """All that calls the broker of a sweep, in this process."""

    def __init__(self, broker: Broker, groups: int) -> None:
        self.broker, self.group_count = broker, groups
        self.calls: Counter[str] = Counter()
        """Operation of the broker → how often it was called."""
        self.first_assignments_s: list[float] = []
        """When each group had its first run, after the start."""
        self.lags_s: list[float] = []
        """By how much the event loop was late."""
        self.started_s = time.perf_counter()

    async def execute(self) -> None:
        """Start trials and groups, and return when all runs have ended."""
        lag = asyncio.create_task(self._measure_lag())
        self.started_s = time.perf_counter()
        todo = iter(self.broker.runs)
        callers = [self._trials(todo) for _ in range(self.group_count + QUEUED_TRIALS)]
        await asyncio.gather(self._driver(), *callers, *(self._group(number) for number in range(self.group_count)))
        lag.cancel()
        await self.broker.close()
        await self.broker.release()

    async def _trials(self, todo: Any) -> None:
        """One trial after another, as Tune runs them in one process."""
        for run_id in todo:
            await self.broker.start(run_id)
            self.calls["start"] += 1
            ended = False
            while not ended:
                report = await self.broker.progress(run_id)
                self.calls["progress"] += 1
                ended = report.ended

    async def _group(self, number: int) -> None:
        """Lease runs and report for each what a worker reports, without training it."""
        result: AssignmentResult | None = None
        first = True
        watch = asyncio.create_task(self.broker.watch(number))
        while (answer := await self.broker.lease(number, result, LEASE_WAIT_S)) is not None:
            self.calls["lease"] += 1
            result = None
            if isinstance(answer, Assignment):
                if first:
                    self.first_assignments_s.append(time.perf_counter() - self.started_s)
                    first = False
                result = await self._train(answer)
        watch.cancel()

    async def _train(self, assignment: Assignment) -> AssignmentResult:
        run_id, steps = assignment.run.run_id, assignment.run.train.steps
        for number in range(1, REPORTS + 1):
            step = steps * number // REPORTS
            event = Event(run_id, "running", step, steps, METRICS, worker_id="node:1", evaluated=number == REPORTS)
            await self.broker.report(assignment.number, event)
            self.calls["report"] += 1
            await asyncio.sleep(0)  # each call of a process is a task of its own
        final = Event(run_id, "finished", steps, steps, METRICS, worker_id="node:1")
        return AssignmentResult(assignment.number, "finished", final)

    async def _driver(self) -> None:
        number = 0
        while True:
            poll = await self.broker.poll(number, EVENT_WAIT_S)
            self.calls["poll"] += 1
            if poll.problem:
                raise RuntimeError(poll.problem)
            number = poll.events[-1][0] if poll.events else number
            if poll.ended:
                return
            await asyncio.sleep(0.1)

    async def _measure_lag(self) -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lags_s.append(time.perf_counter() - before_s - LAG_INTERVAL_S)


def simulate(leases: str, groups: int, runs: int, root: Path) -> dict[str, Any]:
    """Have a broker give `runs` runs to `groups` groups, and measure it."""
    store = Store(root, create=True)
    base = RunSpec.model_validate_json(json.dumps(SPEC))
    specs = [base.model_copy(update={"seed": seed}) for seed in range(runs)]
    holder = {"memory": LeasesInMemory, "sqlite": LeasesOfRunsWithoutFolders}[leases](store, "simulated")
    process = psutil.Process()
    rss_specs = process.memory_info().rss
    broker = Broker(store, "simulated", specs, max_failures=3, leases=holder)
    rss_broker = process.memory_info().rss
    simulation = Simulation(broker, groups)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(simulation.execute())
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    operations, lags_s = simulation.calls.total(), sorted(simulation.lags_s) or [0.0]
    return {
        "leases": leases,
        "groups": groups,
        "runs": runs,
        "ended": runs - broker.remaining,
        "runs_per_s": round(runs / wall_s, 1),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "operations": dict(simulation.calls),
        "ms_per_operation": round(1000 * wall_s / operations, 4),
        "cpu_ms_per_operation": round(1000 * cpu_s / operations, 4),
        "all_groups_train_after_s": round(max(simulation.first_assignments_s, default=0.0), 2),
        "loop_late_ms": {
            "median": round(1000 * lags_s[len(lags_s) // 2], 1),
            "p99": round(1000 * lags_s[int(0.99 * len(lags_s))], 1),
        },
        "rss_bytes": {"runs": rss_specs, "broker": rss_broker, "end": process.memory_info().rss},
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(simulate(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[5]))) + "\n")
