"""The Ray twin: Tune schedules, long-lived Train groups train.

    Tune ─ trials (no CPU) ─▶ broker ◀─ leases ─ worker groups (Train), each in its processes until the sweep's end
                                │
    this process ◀── events ────┘      the ledger, in the store that all nodes share ◀─ every worker writes its runs

The broker stands between them: who trains what. The ledger is the truth: what dies is done again from there.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cope_sweep.record import Event, Ledger
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.sweep.broker import Broker, News
from cope_sweep.sweep.cluster import Capacity, capacity, connected
from cope_sweep.sweep.executor import INTERRUPT_S, ClusterError, unfinished

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler

AHEAD = 8
"""Runs that may be leased before Tune comes to their trials, which takes it 30 ms each, and now and then a second."""
NEWS_WAIT_S = 0.2
"""How long the driver waits for news before it looks at `stop` again."""
ANSWER_S = 30.0
"""For the broker, which answers in milliseconds, to be taken for lost."""
SETTLE_S = 60.0
"""For groups and trials to end by themselves once the sweep is over; they take 1 to 2 s, or as long as their start."""
FIRST_STEP_S = 20.0
"""The other groups, and Tune, wait for the first group's first step, but no longer: starting takes all the cores."""


def run_on_ray(
    runs: Sequence[RunSpec],
    ledger: Ledger,
    resources: Resources,
    *,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    address: str | None = None,
    cpus: int | None = None,
    scheduler: TrialScheduler | None = None,
) -> None:
    """An `Executor` on a Ray cluster.

    `address`: "auto", "host:port", or None: RAY_ADDRESS, and without that a cluster of our own here, of `cpus` CPUs
    (None: those that this process may use). `scheduler` may stop trials early; their runs are left as interrupted. The
    store has to be a folder that all nodes share.

    Raises ClusterError where the cluster cannot be had, holds no group, cannot see the store, or breaks in the middle
    (everything finished is kept), and whatever `on_event` raises.
    """
    todo = unfinished(runs, ledger)
    if not todo:
        return
    prefetch = threading.Thread(target=_import_ray_libraries, name="imports", daemon=True)
    prefetch.start()
    logs = ledger.root / "logs" / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    with _scratch(ledger) as (scratch, token), connected(address, logs / "ray.log", cpus):
        prefetch.join()
        sweep = _Sweep(todo, ledger, resources, capacity(resources), scratch, token, logs, scheduler)
        sweep.execute(on_event, stop)
    for path in logs.glob("*.log"):
        if not path.stat().st_size:
            path.unlink()


def _import_ray_libraries() -> None:
    """The slow imports, while Ray starts."""
    import ray.train.torch
    import ray.tune  # noqa: F401


@contextlib.contextmanager
def _scratch(ledger: Ledger) -> Iterator[tuple[str, str]]:
    """A folder here, for what Train and Tune want to write; a file in the store, for nodes to know that they see it."""
    tokens = ledger.root / "ray"
    tokens.mkdir(parents=True, exist_ok=True)
    token = tokens / f"seen-{secrets.token_hex(8)}"
    token.write_text("A sweep is running; its workers look for this file to know that they see the store.\n")
    scratch = tempfile.mkdtemp(prefix="cope-sweep-")
    try:
        yield scratch, str(token)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        token.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            tokens.rmdir()


@dataclass
class _Sweep:
    """One sweep on a connected cluster."""

    runs: list[RunSpec]
    ledger: Ledger
    resources: Resources
    capacity: Capacity
    scratch: str
    token: str
    logs: Path
    scheduler: TrialScheduler | None
    broker: Any = None
    broker_name: str = field(default_factory=lambda: f"cope-sweep-broker-{secrets.token_hex(8)}")
    threads: list[threading.Thread] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    """The sweep is over: what its threads still raise means nothing."""
    group_errors: list[Exception] = field(default_factory=list)
    """What ended groups before the sweep was over."""
    tune_error: Exception | None = None

    @property
    def groups(self) -> int:
        return min(self.capacity.groups, len(self.runs))

    def execute(self, on_event: Callable[[Event], None], stop: threading.Event) -> None:
        try:
            self._start_broker()
            self._start_group(0)
            self._listen(on_event, stop)
        except ray.exceptions.RayActorError as error:
            raise ClusterError(
                f"the sweep's broker on the cluster died ({error}); what is finished is kept, and the same command "
                "goes on from there"
            ) from error
        except BaseException:
            # Ctrl-C, or a display that broke: runs in training are still worth their checkpoints, unless they were
            # given their time already.
            if not stop.is_set():
                stop.set()
                with contextlib.suppress(ray.exceptions.RayError, ClusterError):
                    self._listen(lambda event: None, stop)
            raise
        finally:
            self._end()

    # -- starting --------------------------------------------------------------------------------------------------

    def _start_broker(self) -> None:
        # On this node: the broker looks at the store, and lives as long as this process does.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(Broker).options(
            name=self.broker_name, num_cpus=0, max_concurrency=10_000, scheduling_strategy=here
        )
        self.broker = actor.remote(
            str(self.ledger.root),
            self.runs,
            max_failures=self.resources.max_failures,
            trials=self.groups,
            ahead=AHEAD,
        )

    def _start_group(self, group: int) -> None:
        from cope_sweep.sweep.workers import GroupPlan, train_group

        plan = GroupPlan(
            group=group,
            broker=self.broker,
            root=str(self.ledger.root),
            token=self.token,
            logs=str(self.logs),
            resources=self.resources,
            gpus=self.capacity.gpus,
            scratch=self.scratch,
        )

        def run() -> None:
            try:
                train_group(plan)
            except Exception as error:
                if not self.ended.is_set():
                    self.group_errors.append(error)

        self._spawn(f"group-{group}", run)

    def _start_the_rest(self) -> None:
        from cope_sweep.sweep.trials import run_trials

        for group in range(1, self.groups):
            self._start_group(group)

        def run() -> None:
            try:
                run_trials(
                    self.runs,
                    broker=self.broker_name,
                    trials=self.groups,
                    scratch=self.scratch,
                    ended=self.ended,
                    scheduler=self.scheduler,
                )
            except Exception as error:
                if not self.ended.is_set():
                    self.tune_error = error

        self._spawn("tune", run)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    # -- running ---------------------------------------------------------------------------------------------------

    def _listen(self, on_event: Callable[[Event], None], stop: threading.Event) -> None:
        """Pass events on until the sweep is over, or is stopped and its runs are interrupted."""
        heard = 0
        started = time.monotonic()
        alone = len(self.threads) == 1
        give_up: float | None = None
        while True:
            if stop.is_set() and give_up is None:
                give_up = time.monotonic() + INTERRUPT_S
                self.broker.close.remote()
            news: News = self._get(self.broker.news.remote(heard, NEWS_WAIT_S))
            for number, event in news.events:
                heard = number
                on_event(event)
            if news.fatal:
                raise ClusterError(news.fatal)
            if news.over or (give_up is not None and (not news.leased or time.monotonic() > give_up)):
                return
            trains = any(event.step for _, event in news.events)
            if alone and give_up is None and (trains or time.monotonic() - started > FIRST_STEP_S):
                self._start_the_rest()
                alone = False
            if give_up is None:
                self._check_threads()

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(
                f"the cluster has not answered for {ANSWER_S:.0f} s; what is finished is kept, and the same command "
                "goes on from there"
            ) from error

    def _check_threads(self) -> None:
        """Raises ClusterError where Tune broke, or no group is left to train."""
        error = self.tune_error
        if error is None and len(self.group_errors) == len([t for t in self.threads if t.name != "tune"]):
            error = self.group_errors[0]
        if error is not None:
            raise ClusterError(f"Ray gave up: {error}; its log: {self.logs}") from error

    # -- ending ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Let groups and Tune end by themselves.

        They leave nothing on a cluster that goes on, and a thread inside of Ray when Ray shuts down ends the process.
        """
        self.ended.set()
        if self.broker is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self.broker.close.remote()
        until = time.monotonic() + SETTLE_S
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.broker)
