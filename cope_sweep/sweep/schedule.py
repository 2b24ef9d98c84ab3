"""The Ray executor: Tune schedules trials, Train's long-lived worker groups train their runs.

    Tune ─ trials (no CPUs) ─▶ broker ◀─ leases ─ worker groups (Train), which live until the sweep ends
                                 │
    this process ◀─── events ────┘      store, in the store that all nodes share ◀─ every worker writes its runs

The broker assigns runs to groups. What a process that died had not finished is continued from the store.
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

from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.broker import Broker, EventBatch
from cope_sweep.sweep.cluster import Capacity, capacity, connected
from cope_sweep.sweep.executor import INTERRUPT_TIMEOUT_S, ClusterError, unfinished
from cope_sweep.sweep.plugins import plugin_runtime_env

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler

LEASE_AHEAD_RUNS = 8
"""Runs that may be leased before their trials start. Tune takes 30 ms per trial, and a second now and then."""
EVENT_WAIT_S = 0.2
"""How long the driver waits for events before it checks `stop` again."""
BROKER_TIMEOUT_S = 30.0
"""The broker is taken for lost after this time. It normally answers within milliseconds."""
SHUTDOWN_TIMEOUT_S = 60.0
"""For groups and trials to end after the sweep. They take 1 to 2 s, or as long as their start."""
FIRST_STEP_TIMEOUT_S = 20.0
"""The other groups and Tune start after the first group's first step, or after this time: starting uses all cores."""
RESUME_HINT = "finished runs are kept; run the same command again to continue"


def run_on_ray(
    runs: Sequence[RunSpec],
    store: Store,
    resources: Resources,
    *,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    plugins: Sequence[str] = (),
    address: str | None = None,
    cpus: int | None = None,
    scheduler: TrialScheduler | None = None,
) -> None:
    """An `Executor` on a Ray cluster. The store has to be in a folder that all nodes share.

    Args:
        runs: The runs to train, in order.
        store: The store.
        resources: Groups, workers and devices.
        on_event: Called with every event.
        stop: Set to interrupt the sweep.
        plugins: Modules that every worker imports. Their files are copied to the nodes.
        address: "auto", "host:port", or None for RAY_ADDRESS; without that, a new cluster on this machine.
        cpus: CPUs of a new cluster; None: those that this process may use.
        scheduler: May stop trials early. Their runs stay interrupted.

    Raises:
        ClusterError: The cluster cannot be reached, has no room for a group, cannot see the store, or broke during
            the sweep. Finished runs are kept.
        PluginError: A plugin cannot be imported.
        Exception: Whatever `on_event` raises.
    """
    todo = unfinished(runs, store)
    if not todo:
        return
    prefetch = threading.Thread(target=_import_ray_libraries, name="imports", daemon=True)
    prefetch.start()
    logs = store.root / "logs" / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    cluster = connected(address, logs / "ray.log", cpus, runtime_env=plugin_runtime_env(plugins))
    with _scratch(store) as (scratch, token), cluster:
        prefetch.join()
        sweep = _RaySweep(todo, store, resources, capacity(resources), tuple(plugins), scratch, token, logs, scheduler)
        sweep.execute(on_event, stop)
    for path in logs.glob("*.log"):
        if not path.stat().st_size:
            path.unlink()


def _import_ray_libraries() -> None:
    """The slow imports, in a thread while Ray starts."""
    import ray.train.torch
    import ray.tune  # noqa: F401


@contextlib.contextmanager
def _scratch(store: Store) -> Iterator[tuple[str, str]]:
    """Yields a local folder for files of Train and Tune, and a file in the store by which nodes recognise the store."""
    tokens = store.root / "ray"
    tokens.mkdir(parents=True, exist_ok=True)
    token = tokens / f"seen-{secrets.token_hex(8)}"
    token.write_text("A sweep is running. Its workers check for this file to know that they see the store.\n")
    scratch = tempfile.mkdtemp(prefix="cope-sweep-")
    try:
        yield scratch, str(token)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        token.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            tokens.rmdir()


@dataclass
class _RaySweep:
    """One sweep on a connected cluster."""

    runs: list[RunSpec]
    store: Store
    resources: Resources
    capacity: Capacity
    plugins: tuple[str, ...]
    scratch: str
    token: str
    logs: Path
    scheduler: TrialScheduler | None
    broker: Any = None
    broker_name: str = field(default_factory=lambda: f"cope-sweep-broker-{secrets.token_hex(8)}")
    threads: list[threading.Thread] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the sweep has ended. Later errors of its threads are ignored."""
    group_errors: list[Exception] = field(default_factory=list)
    """Errors that ended groups before the sweep had ended."""
    tune_error: Exception | None = None

    @property
    def groups(self) -> int:
        return min(self.capacity.groups, len(self.runs))

    def execute(self, on_event: Callable[[Event], None], stop: threading.Event) -> None:
        try:
            self._start_broker()
            self._start_group(0)
            self._handle_events(on_event, stop)
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"the sweep's broker on the cluster died ({error}); {RESUME_HINT}") from error
        except BaseException:
            # Ctrl-C, or an error in `on_event`. Runs in training can still write their checkpoints, unless they were
            # given that time before.
            if not stop.is_set():
                stop.set()
                with contextlib.suppress(ray.exceptions.RayError, ClusterError):
                    self._handle_events(lambda event: None, stop)
            raise
        finally:
            self._end()

    # -- starting --------------------------------------------------------------------------------------------------

    def _start_broker(self) -> None:
        # On this node, because the broker reads the store and must not outlive this process.
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(Broker).options(
            name=self.broker_name, num_cpus=0, max_concurrency=10_000, scheduling_strategy=this_node
        )
        self.broker = actor.remote(
            str(self.store.root),
            self.runs,
            max_failures=self.resources.max_failures,
            trials=self.groups,
            ahead=LEASE_AHEAD_RUNS,
        )

    def _start_group(self, group: int) -> None:
        from cope_sweep.sweep.workers import GroupPlan, train_group

        plan = GroupPlan(
            group=group,
            broker=self.broker,
            root=str(self.store.root),
            token=self.token,
            logs=str(self.logs),
            resources=self.resources,
            gpus=self.capacity.gpus,
            scratch=self.scratch,
            plugins=self.plugins,
        )

        def run() -> None:
            try:
                train_group(plan)
            except Exception as error:
                if not self.ended.is_set():
                    self.group_errors.append(error)

        self._start_thread(f"group-{group}", run)

    def _start_others(self) -> None:
        """Start the other groups, and Tune."""
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
                    sweep_ended=self.ended,
                    scheduler=self.scheduler,
                )
            except Exception as error:
                if not self.ended.is_set():
                    self.tune_error = error

        self._start_thread("tune", run)

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    # -- running ---------------------------------------------------------------------------------------------------

    def _handle_events(self, on_event: Callable[[Event], None], stop: threading.Event) -> None:
        """Pass events to `on_event` until the sweep has ended, or was stopped and its runs are interrupted."""
        last_number = 0
        started_s = time.monotonic()
        only_first_group = len(self.threads) == 1
        interrupt_deadline_s: float | None = None
        while True:
            if stop.is_set() and interrupt_deadline_s is None:
                interrupt_deadline_s = time.monotonic() + INTERRUPT_TIMEOUT_S
                self.broker.close.remote()
            batch: EventBatch = self._get(self.broker.poll_events.remote(last_number, EVENT_WAIT_S))
            for number, event in batch.events:
                last_number = number
                on_event(event)
            if batch.fatal:
                raise ClusterError(batch.fatal)
            if batch.ended:
                return
            if interrupt_deadline_s is not None:
                if not batch.leased or time.monotonic() > interrupt_deadline_s:
                    return
                continue
            trains = any(event.step for _, event in batch.events)
            if only_first_group and (trains or time.monotonic() - started_s > FIRST_STEP_TIMEOUT_S):
                self._start_others()
                only_first_group = False
            self._check_threads()

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=BROKER_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(f"the cluster has not answered for {BROKER_TIMEOUT_S:.0f} s; {RESUME_HINT}") from error

    def _check_threads(self) -> None:
        """Raise ClusterError if Tune failed or no group is left."""
        error = self.tune_error
        if error is None and len(self.group_errors) == len([t for t in self.threads if t.name != "tune"]):
            error = self.group_errors[0]
        if error is not None:
            raise ClusterError(f"Ray gave up: {error}; its log: {self.logs}") from error

    # -- ending ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Let groups and Tune end by themselves.

        Then they leave nothing behind on a cluster that keeps running. Also, a thread that is inside of Ray while Ray
        shuts down would end this process.
        """
        self.ended.set()
        if self.broker is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self.broker.close.remote()
        until = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.broker)
