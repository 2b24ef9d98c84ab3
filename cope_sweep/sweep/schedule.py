"""The Ray executor: Tune schedules trials, Train's long-lived worker groups train their runs.

    Tune ─ trials (no CPUs) ─▶ broker ◀─ leases ─ worker groups (Train), which come and go with the nodes
                                 │
    this process ◀─── events ────┘      store, which all nodes share ◀─ every worker writes its runs

The broker takes the leases and assigns runs to groups. What a process that died had not finished is continued from the
store.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event, Store, StoreError
from cope_sweep.store.index.activity import note_left_out
from cope_sweep.sweep.broker import Broker
from cope_sweep.sweep.cluster import connected
from cope_sweep.sweep.executor import INTERRUPT_TIMEOUT_S, ClusterError, unfinished
from cope_sweep.sweep.messages import Failure, Poll
from cope_sweep.sweep.plugins import plugin_runtime_env
from cope_sweep.sweep.schedulers import StoppingRule, scheduler_of
from cope_sweep.sweep.shapes import Shapes

if TYPE_CHECKING:
    from cope_sweep.sweep.groups import Groups
    from cope_sweep.sweep.suggestions import Suggestions
    from cope_sweep.sweep.trials import RunSearch

EVENT_WAIT_S = 0.2
"""How long the driver waits for events before it checks `stop` again."""
POLL_INTERVAL_S = 0.1
"""Shortest time between two polls of the broker."""
BROKER_TIMEOUT_S = 30.0
"""The broker is taken for lost after this time. It normally answers within milliseconds."""
BROKER_START_TIMEOUT_S = 180.0
"""For the broker's process to start. It takes 2 s, and much longer on a machine whose cores are all in use."""
RELEASE_TIMEOUT_S = 60.0
"""For the broker to write the rows of the runs that were interrupted."""
TUNE_TIMEOUT_S = 60.0
"""For Tune to end its trials after the sweep. It takes 1 s, or as long as the start of a process."""
QUEUED_TRIALS = 1
"""Trials of a shape beyond the number of its groups: while Tune handles the end of one run, the group finds the next in
the queue."""
RESUME_HINT = "finished runs are kept; run the same command again to continue"


def run_on_ray(
    runs: Sequence[RunSpec],
    store: Store,
    resources: Resources,
    *,
    sweep_id: str,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    plugins: Sequence[str] = (),
    schedule: StoppingRule | None = None,
    max_failed_runs: int | None = None,
    suggestions: Suggestions | None = None,
    on_note: Callable[[str], None] = lambda text: None,
    own_resources: Mapping[str, Resources] | None = None,
    address: str | None = None,
    cpus: int | None = None,
) -> None:
    """An `Executor` on a Ray cluster. The store has to be in a folder that all nodes share.

    Args:
        runs: The runs to train, in order.
        store: The store.
        resources: Groups, workers and devices of the runs that have no `own_resources`.
        sweep_id: The owner of the leases.
        on_event: Called with every event.
        stop: Set to interrupt the sweep.
        plugins: Modules that every worker imports. Their files are copied to the nodes.
        schedule: Which runs are ended early.
        max_failed_runs: After this number of failed runs, no more are started.
        suggestions: Suggests further runs.
        on_note: Called with what the user should know: nodes that are left out.
        own_resources: Run id → resources, of the runs that have their own.
        address: "auto", "host:port", or None for RAY_ADDRESS; without that, a new cluster on this machine.
        cpus: CPUs of a new cluster; None: those that this process may use.

    Raises:
        ClusterError: The cluster cannot be reached, has no room for a group, no node that can train, or broke during
            the sweep. Finished runs are kept.
        PluginError: A plugin cannot be imported.
        Exception: Whatever `on_event` raises.
    """
    todo = unfinished(runs, store)
    if not todo and not (suggestions and suggestions.has_run()):
        return
    prefetch = threading.Thread(target=_import_ray_libraries, name="imports", daemon=True)
    prefetch.start()
    logs = store.root / "logs" / sweep_id
    cluster = connected(address, logs / "ray.log", cpus, runtime_env=plugin_runtime_env(plugins))
    with _scratch(store) as (scratch, token), cluster:
        prefetch.join()
        sweep = _RaySweep(
            todo, store, Shapes(resources, own_resources), sweep_id, tuple(plugins), schedule, max_failed_runs,
            suggestions, on_note, scratch, token, logs,
        )  # fmt: skip
        sweep.execute(on_event, stop)
    for path in logs.glob("*.log"):
        if not path.stat().st_size:
            path.unlink()


def _import_ray_libraries() -> None:
    """The slow imports, in a thread while Ray starts."""
    import ray.tune
    import ray.tune.schedulers
    import ray.tune.search  # noqa: F401


@contextlib.contextmanager
def _scratch(store: Store) -> Iterator[tuple[str, str]]:
    """Yields a local folder for Tune's files, and a file in the store by which nodes recognise the store."""
    token = f"ray/seen-{secrets.token_hex(8)}"
    store.files.write(token, b"A sweep is running. Its workers check for this file to know that they see the store.\n")
    scratch = tempfile.mkdtemp(prefix="cope-sweep-")
    try:
        yield scratch, token
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(StoreError, OSError):
            store.files.delete(token)
        with contextlib.suppress(OSError):
            (store.root / "ray").rmdir()


class BrokerActor(Broker):
    """The broker as a Ray actor, which opens the store itself."""

    def __init__(self, location: str, index_url: str, *arguments: Any, **settings: Any) -> None:
        super().__init__(Store(location, index=index_url), *arguments, **settings)


@dataclass
class _RaySweep:
    """One sweep on a connected cluster."""

    runs: list[RunSpec]
    store: Store
    shapes: Shapes
    sweep_id: str
    plugins: tuple[str, ...]
    schedule: StoppingRule | None
    max_failed_runs: int | None
    suggestions: Suggestions | None
    on_note: Callable[[str], None]
    scratch: str
    token: str
    logs: Path
    broker: Any = None
    broker_name: str = field(default_factory=lambda: f"cope-sweep-broker-{secrets.token_hex(8)}")
    groups: Groups | None = None
    search: RunSearch | None = None
    tune: threading.Thread | None = None
    tune_error: Exception | None = None
    answered: bool = False
    """Whether the broker has answered yet."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the sweep has ended."""

    def execute(self, on_event: Callable[[Event], None], stop: threading.Event) -> None:
        try:
            self._start()
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

    def _start(self) -> None:
        from cope_sweep.sweep.groups import Groups
        from cope_sweep.sweep.workers import GroupPlan

        resources = self.resources
        self._start_broker()
        plan = GroupPlan(
            broker=self.broker,
            location=self.store.location,
            token=self.token,
            sweep_id=self.sweep_id,
            resources=resources,
            gpus=0.0,
            plugins=self.plugins,
        )
        self.groups = Groups(
            plan,
            self.shapes,
            None if resources.groups == "auto" else resources.groups,
            on_failed=self._group_failed,
            on_leave=self.broker.ask_to_leave.remote,
            on_refused=self.broker.refuse.remote,
            on_note=self.on_note,
            on_left_out=self._note_left_out,
        )
        to_train = Counter(self.shapes.of(run.run_id) for run in self.runs)
        to_train[0] += self.more_runs
        self.groups.update(to_train)
        self._start_tune()

    @property
    def resources(self) -> Resources:
        """The resources of most runs, and of the whole sweep."""
        return self.shapes.resources[0]

    def _start_broker(self) -> None:
        # On this node, because the broker reads the store and must not outlive this process.
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(BrokerActor).options(
            name=self.broker_name, num_cpus=0, max_concurrency=100_000, scheduling_strategy=this_node
        )
        self.broker = actor.remote(
            self.store.location,
            self.store.index_url,
            self.sweep_id,
            self.runs,
            shapes={run.run_id: shape for run in self.runs if (shape := self.shapes.of(run.run_id))},
            max_failures=self.resources.max_failures,
            max_failed_runs=self.max_failed_runs,
            step_timeout_s=self.resources.step_timeout_s,
            replay=self.schedule is not None,
            more_runs=self.more_runs,
        )

    @property
    def more_runs(self) -> int:
        """How many runs the search has still to suggest in this sweep."""
        return self.suggestions.left if self.suggestions else 0

    def _start_run(self, run_id: str) -> None:
        """Have the broker start a run. Called in Tune's thread."""
        added = self.suggestions.run(run_id) if self.suggestions else None
        self.broker.start.remote(run_id, added, self.shapes.of(run_id))

    def _wanted_trials(self) -> dict[int, int]:
        """Shape → how many trials are wanted. Called in Tune's thread."""
        placed = self.groups.placed if self.groups else {}
        return {shape: max(1, number) + QUEUED_TRIALS for shape, number in (placed or {0: 0}).items()}

    def _start_tune(self) -> None:
        from cope_sweep.sweep.trials import RunSearch, run_trials

        rule = self.schedule
        self.search = search = RunSearch(
            [run.run_id for run in self.runs],
            wanted=self._wanted_trials,
            shape_of=self.shapes.of,
            start=self._start_run,
            stop=self.broker.stop.remote,
            rule=str(rule),
            ended=self.ended,
            source=self.suggestions,
            more=self.more_runs,
            on_exhausted=self.broker.add_no_more.remote,
        )
        metrics = [each.metric for each in (rule, self.suggestions) if each is not None]

        def run() -> None:
            try:
                run_trials(
                    search,
                    broker=self.broker_name,
                    metrics=metrics,
                    scratch=self.scratch,
                    scheduler=None if rule is None else scheduler_of(rule),
                )
            except Exception as error:
                if not self.ended.is_set():
                    self.tune_error = error

        self.tune = threading.Thread(target=run, name="tune", daemon=True)
        self.tune.start()

    def _group_failed(self, group: int, reason: str, failure: Failure) -> bool:
        return bool(self._get(self.broker.group_failed.remote(group, reason, failure)))

    def _note_left_out(self, nodes: int) -> None:
        with contextlib.suppress(StoreError):  # a number for the monitoring: the sweep goes on without it
            note_left_out(self.store.index, self.sweep_id, nodes)

    # -- running ---------------------------------------------------------------------------------------------------

    def _handle_events(self, on_event: Callable[[Event], None], stop: threading.Event) -> None:
        """Pass events to `on_event` until the sweep has ended, or was stopped and its runs are interrupted."""
        last_number = 0
        deadline_s: float | None = None
        while self.groups is not None and self.search is not None:
            polled_s = time.monotonic()
            if stop.is_set() and deadline_s is None:
                deadline_s = polled_s + INTERRUPT_TIMEOUT_S
                self.broker.close.remote()
            poll: Poll = self._get(self.broker.poll.remote(last_number, EVENT_WAIT_S))
            if self.suggestions is not None:
                if deadline_s is not None or poll.draining:
                    self.suggestions.stop()
                self.suggestions.publish()
            for number, event in poll.events:
                last_number = number
                if event.status != "running":
                    self.search.ends.append(event)
                on_event(event)
            if poll.problem:
                raise ClusterError(f"{poll.problem}; {RESUME_HINT}")
            if poll.ended or (deadline_s is not None and (not poll.leased or time.monotonic() > deadline_s)):
                return
            if self.tune_error is not None:
                raise ClusterError(f"Ray Tune gave up: {self.tune_error}; its log: {self.logs}") from self.tune_error
            self.search.add(poll.returned)
            self.groups.update({} if deadline_s is not None else poll.to_train, poll.idle, poll.hanging)
            time.sleep(max(0.0, polled_s + POLL_INTERVAL_S - time.monotonic()))

    def _get(self, ref: Any) -> Any:
        timeout_s = BROKER_TIMEOUT_S if self.answered else BROKER_START_TIMEOUT_S
        try:
            answer = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(f"the cluster has not answered for {timeout_s:.0f} s; {RESUME_HINT}") from error
        self.answered = True
        return answer

    # -- ending ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """End groups, trials and broker, so that nothing is left on a cluster that keeps running."""
        self.ended.set()
        if self.broker is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self.broker.close.remote()
        if self.groups is not None:
            self.groups.close()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.broker.release.remote(), timeout=RELEASE_TIMEOUT_S)
        if self.groups is not None and self.groups.head_lost:
            return  # what follows would block
        if self.tune is not None:
            # A thread that is inside of Ray while Ray shuts down would end this process.
            self.tune.join(TUNE_TIMEOUT_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.broker)
