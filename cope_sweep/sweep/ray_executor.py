"""The Ray executor: Ray Tune schedules trials, each trains one run (`trial`), and this process follows them.

README.md lists which features of Tune it uses, and which not. What runs have done is in the index: leases, progress,
ends. Requests to stop go the same way.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cope_sweep.config import Resources, RunSpec
from cope_sweep.errors import ClusterError
from cope_sweep.store import Event, LeaseHolder, Refusal, RunRecord, Store, StoreError
from cope_sweep.store.index import IndexUnavailable, IndexUnusable
from cope_sweep.store.index.summaries import note_left_out
from cope_sweep.sweep.cluster import (
    IndexActor,
    Node,
    check_cluster,
    connected,
    needs_of,
    node_of_process,
    plugin_runtime_env,
)
from cope_sweep.sweep.executor import (
    ENDED,
    INTERRUPT_TIMEOUT_S,
    ClusterLost,
    Workload,
    final_event,
    record_failure,
    record_stop,
)

LOOK_INTERVAL_S = 1.0
"""Time between two looks at the progress of runs, and at the cluster."""
NEWS_WAIT_S = 0.1
"""The time for which this process waits for news of trials before it looks at `stop` again."""
MAX_IDLE_DEATHS = 2
"""A node is left out when this many processes in a row died there before they trained anything."""
PENDING_TRIALS = 16
"""On a small cluster that may grow, the trials that wait for a place."""
TUNE_TIMEOUT_S = 60.0
"""Time limit for Tune to end its trials after the sweep. It takes 1 s, or as long as the start of a process."""


def run_on_ray(work: Workload, *, address: str | None = None) -> None:
    """An `Executor` on a Ray cluster. The store has to be in a folder that all nodes share, or an object store.

    Files of plugins are copied to the nodes.

    Args:
        work: What is to be trained.
        address: "auto", "host:port", or None for RAY_ADDRESS; without that, a new cluster on this machine.
    """
    todo, store = work.unfinished(), work.store
    if not todo and not (work.suggestions and work.suggestions.has_run()):
        return
    # Importing Tune takes as long as starting Ray.
    prefetch = threading.Thread(target=importlib.import_module, args=["cope_sweep.sweep.tune_adapters"], daemon=True)
    prefetch.start()
    logs = store.root / "logs" / work.sweep_id
    cluster = connected(address, logs / "ray.log", runtime_env=plugin_runtime_env(work.plugins))
    with _scratch(store) as (scratch, token), cluster as is_own:
        prefetch.join()
        RaySweep(work, todo, scratch, may_grow=not is_own).execute(token, logs)
    for path in logs.glob("*.log"):
        if not path.stat().st_size:
            path.unlink()


@contextlib.contextmanager
def _scratch(store: Store) -> Iterator[tuple[str, str]]:
    """A folder for Tune's files, and the name of a file in the store by which its processes recognise it."""
    token = f"ray/{secrets.token_hex(8)}"
    store.write(token, b"A sweep is running. Its workers check for this file to know that they see the store.\n")
    scratch = tempfile.mkdtemp(prefix="cope-sweep-")
    try:
        yield scratch, token
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(StoreError, OSError):
            store.delete(token)
        with contextlib.suppress(OSError):
            (store.root / "ray").rmdir()


@contextlib.contextmanager
def _default_setting(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for the block, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


# -- the sweep ---------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    spec: RunSpec
    kind: Resources
    """Its resources: runs of one kind use the same processes."""
    deaths: int = 0
    """The number of times that its process died."""
    errors: int = 0
    """The number of times that one of its ranks, of several, ended with an error."""
    begun: bool = False
    """Whether the process of its trial was heard of."""
    node: str = ""
    """The node of that process."""
    stop_reason: str = ""
    """Why the scheduler has ended it."""
    step: int = 0
    """The step of the last evaluation that was passed on."""
    seen: Event | None = None
    """Its last progress."""
    first: tuple[float, int] | None = None
    """Time and step when this attempt was seen first, for its speed."""


@dataclass(frozen=True)
class _End:
    """The end of a trial, with its last result."""

    run: _Run
    result: Mapping[str, Any]
    error: Exception | None


class RaySweep:
    """One sweep on a connected cluster.

    Tune's thread asks for runs and tells results. Everything else is decided in the thread of the caller.
    """

    def __init__(self, work: Workload, runs: Sequence[RunSpec], scratch: str, *, may_grow: bool) -> None:
        """A sweep of those `runs` that are not finished. Tune's files go to `scratch`.

        `may_grow`: whether an autoscaler may add nodes to the cluster.
        """
        self.work, self.scratch, self.may_grow = work, scratch, may_grow
        self.store, self.sweep_id, self.suggestions = work.store, work.sweep_id, work.suggestions
        self.leases = LeaseHolder(self.store, self.sweep_id, stop=work.stop)
        """The leases of the runs whose end this process records."""
        self.waiting: dict[Resources, deque[_Run]] = {}
        """Kind → its runs without a trial, in order."""
        self.trials: dict[str, _Run] = {}
        """Trial → its run."""
        self.ending: dict[str, _Run] = {}
        """Runs whose trial has ended, until the caller's thread has noted how."""
        self.followed: dict[str, _Run] = {}
        """Runs that other sweeps train, and those that the scheduler has stopped: their end is in the index."""
        self.failed: set[str] = set()
        self.lock = threading.RLock()
        """Guards the attributes above, which Tune's thread uses, too."""
        self.any_ended = False
        self.nodes: dict[str, Node] = {}
        self.refused: dict[Resources, str] = {}
        """Kind for which there is no room → why."""
        self.node_of: dict[str, str] = {}
        """Process of trials (an actor's id) → its node."""
        self.excluded: dict[str, str] = {}
        """Node id → why the node cannot train."""
        self.idle_deaths: Counter[str] = Counter()
        """Node id, or "" where it is not known → deaths in a row of processes that had not begun a run."""
        self.news: queue.SimpleQueue[Event | _End | Exception] = queue.SimpleQueue()
        """Starts and ends of trials, and the error with which Tune gave up."""
        self.ended = threading.Event()
        """Set when the sweep has ended."""
        self.tune: threading.Thread | None = None
        self.index_actor: Any = None
        self.this_node: str = ray.get_runtime_context().get_node_id()
        self.cluster_lost = False
        """Whether calls of Ray would block."""
        for run in runs:
            self._add(run)

    def _add(self, spec: RunSpec) -> None:
        kind = self.work.resources_of(spec.run_id).model_copy(update={"groups": self.work.resources.groups})
        if kind not in self.waiting and self.nodes:
            self._note_kind(kind)
        self._wait(_Run(spec, kind))

    def _wait(self, run: _Run, *, first: bool = False) -> None:
        """Have a run wait for a trial."""
        with self.lock:
            waiting = self.waiting.setdefault(run.kind, deque())
            (waiting.appendleft if first else waiting.append)(run)
            self.ending.pop(run.spec.run_id, None)

    def _follow_in_index(self, run: _Run) -> None:
        with self.lock:
            self.followed[run.spec.run_id] = run
            self.ending.pop(run.spec.run_id, None)

    # -- in Tune's thread ------------------------------------------------------------------------------------------

    def next_trial(self, trial_id: str) -> dict[str, Any] | None:
        """The configuration of a trial of the next run; None: none now."""
        with self.lock:
            if self._is_draining():
                return None
            run = self._next_waiting() or self._next_suggested()
            if run is None:
                return None
            run.begun, run.seen, run.first = False, None, None
            self.trials[trial_id] = run
            needs = needs_of(run.kind, self.nodes)
            return {
                "run_id": run.spec.run_id,
                "run": run.spec.model_dump_json(),
                "resources": run.kind,
                "gpus": needs.gpus,
                "bundle": needs.bundle,
                "excluded": tuple(sorted(self.excluded)),
            }

    def gives_no_run(self) -> bool:
        """Whether `next_trial` has none, before a trial has ended."""
        if self.ended.is_set():
            return True
        with self.lock:
            if self.ending or not self.trials:
                return False
            may_suggest = self.suggestions is not None and self.suggestions.left > 0
            return self._is_draining() or not (may_suggest or self._kinds())

    def _is_draining(self) -> bool:
        """Whether no more runs are started."""
        return self.work.is_draining(len(self.failed))

    def _kinds(self) -> list[Resources]:
        """The kinds of the runs that wait and may be started.

        Runs of several workers are trained before all others, and no more of them have a trial than there is room for:
        Train asks for the place of their workers when the trial has started, and would wait while other runs take it.
        """
        kinds = [kind for kind, waiting in self.waiting.items() if waiting and kind not in self.refused]
        several = [kind for kind in kinds if kind.workers > 1]
        alive = self._alive()
        if several or any(kind.workers > 1 for kind in alive):
            return [kind for kind in several if alive[kind] < self._room(kind)]
        return kinds

    def _alive(self) -> Counter[Resources]:
        """Kind → number of its trials."""
        return Counter(run.kind for run in self.trials.values())

    def _next_waiting(self) -> _Run | None:
        """The next run that waits: of the kind with the fewest trials, of several the larger one."""
        alive = self._alive()
        kinds = sorted(self._kinds(), key=lambda kind: (alive[kind], [-x for x in needs_of(kind, self.nodes).size]))
        return self.waiting[kinds[0]].popleft() if kinds else None

    def _room(self, kind: Resources) -> int:
        """The number of runs of a kind that the cluster holds, if nothing else uses it; at least one."""
        needs = needs_of(kind, self.nodes)
        return max(1, sum(needs.workers_on(node.resources) for node in self._usable()) // needs.workers)

    def _next_suggested(self) -> _Run | None:
        """The next run that the search suggests."""
        if self.suggestions is None or any(self.waiting.values()):
            return None
        if (spec := self.suggestions.next_run()) is None:
            return None
        self._add(spec)
        return self._next_waiting()

    def note_start(self, trial_id: str) -> None:
        """The process of a trial has started, or is used again."""
        run = self.trials[trial_id]
        if run.kind.workers == 1:  # else its workers have still to start
            self.news.put(Event(run.spec.run_id, "running", steps=run.spec.train.steps))

    def note_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """A trial has reported something."""
        event: Event | None = result["event"]
        with self.lock:
            run = self.trials[trial_id]
            run.begun = run.begun or "problem" not in result
            self.node_of[result["actor"]] = run.node = result["node"]
            for node in (run.node, ""):
                self.idle_deaths.pop(node, None)
            if event is None or result["outcome"] != "evaluated" or event.step <= run.step:
                return
            run.step = event.step
        if self.suggestions is not None and self.suggestions.metric in event.metrics:
            self.suggestions.report(event.run_id, event.step, event.metrics[self.suggestions.metric])

    def note_end(self, trial_id: str, result: Mapping[str, Any], error: Exception | None) -> None:
        """A trial has ended, with this last result."""
        with self.lock:
            run = self.trials.pop(trial_id)
            self.ending[run.spec.run_id] = run
        event: Event | None = result.get("event")
        if event is not None and event.status == "failed":
            self.failed.add(run.spec.run_id)  # at once, so that no other run is started
        is_stopped = error is None and result.get("outcome") in ("begun", "evaluated")
        if self.suggestions is not None and event is not None and not self.ended.is_set():
            value = event.metrics.get(self.suggestions.metric)
            if is_stopped:
                self.suggestions.end(event.run_id, "stopped", value)
            elif result["outcome"] == "ended":
                self.suggestions.end(event.run_id, event.status, value)
        self.news.put(_End(run, result, error))

    # -- in the caller's thread ------------------------------------------------------------------------------------

    def execute(self, token: str, logs: Path) -> None:
        """Train the runs. `token` is the name of a file in the store, `logs` the folder of logs."""
        try:
            self._look_at_cluster()
            with _default_setting("TUNE_MAX_PENDING_TRIALS_PG", str(self._pending_limit())):
                self._start(token)
                self._follow(logs)
        except BaseException:
            # Ctrl-C, an error in `on_event`, or a cluster that is lost. Runs in training can still write their states,
            # unless they were given that time before.
            if not self.work.stop.is_set():
                self.work.stop.set()
                self._stop_runs()
                until = time.monotonic() + INTERRUPT_TIMEOUT_S
                while self._any_training() and time.monotonic() < until:
                    time.sleep(NEWS_WAIT_S)
            raise
        finally:
            self.ended.set()
            # A thread that is inside of Ray while Ray shuts down would end this process.
            if self.tune is not None and not self.cluster_lost:
                self.tune.join(TUNE_TIMEOUT_S)
            if self.index_actor is not None and not self.cluster_lost:
                ray.kill(self.index_actor)
            self.leases.close()

    def _start(self, token: str) -> None:
        from cope_sweep.sweep import tune_adapters
        from cope_sweep.sweep.trial import SweepContext

        actor = None
        if self.store.index.database.is_sqlite:
            # On this node, where the file is. Ray restarts it; its callers try again.
            actor = f"cope-sweep-index-{secrets.token_hex(8)}"
            strategy = NodeAffinitySchedulingStrategy(self.this_node, soft=False)
            self.index_actor = (
                ray.remote(IndexActor)
                .options(name=actor, num_cpus=0, max_restarts=-1, max_concurrency=8, scheduling_strategy=strategy)
                .remote(self.store.location, self.store.index_url)
            )
        context = SweepContext(
            self.sweep_id, self.store.location, token, self.store.index_url, actor, self.this_node,
            tuple(self.work.plugins),
        )  # fmt: skip
        tuner = tune_adapters.tuner_of(self, context)

        def fit() -> None:
            try:
                tuner.fit()
            except Exception as error:
                self.news.put(error)

        self.tune = threading.Thread(target=fit, name="tune", daemon=True)
        self.tune.start()

    def _pending_limit(self) -> int:
        """The number of trials that may wait for a place or start at the same time.

        An autoscaler sees them. Each makes a placement group, and removes it where the process of another trial comes
        free first; and a search should suggest no run long before it starts.
        """
        cpus = int(sum(node.resources.get("CPU", 0) for node in self.nodes.values()))
        return max(PENDING_TRIALS if self.may_grow and self.suggestions is None else 1, cpus)

    def _follow(self, logs: Path) -> None:
        """Pass on events until the sweep has ended, or was stopped and its runs are interrupted."""
        looked_s = time.monotonic()
        deadline_s: float | None = None
        drains = is_waiting = False
        while not self._is_over():
            with contextlib.suppress(queue.Empty):
                news = self.news.get(timeout=NEWS_WAIT_S)
                if isinstance(news, Exception):
                    raise ClusterError(f"Ray Tune gave up: {news}; its log: {logs / 'ray.log'}") from news
                if isinstance(news, Event):
                    self.work.on_event(news)
                else:
                    self._handle_end(news)
            if self._is_draining() and not drains:
                drains = True
                with contextlib.suppress(StoreError):  # trials that wait for a place begin no run
                    self.store.index.request_stop(self.sweep_id, "*")
                if self.suggestions is not None:
                    self.suggestions.stop()
            if self.suggestions is not None:
                self.suggestions.publish()
            now_s = time.monotonic()
            if self.work.stop.is_set() and deadline_s is None:
                deadline_s = now_s + INTERRUPT_TIMEOUT_S
                self._stop_runs()
            if now_s - looked_s >= LOOK_INTERVAL_S:
                looked_s = now_s
                self._look_at_cluster()
                try:
                    self._look_at_runs()
                    is_waiting = False
                except IndexUnusable:
                    raise
                except IndexUnavailable:
                    if not is_waiting:
                        is_waiting = True
                        self.work.on_note("the index does not answer: waiting for it")
                if deadline_s is not None and (now_s > deadline_s or not self._any_training()) and self.news.empty():
                    break
        for run in self._own():  # those that did not answer in time
            if run.begun:
                self._end(run, final_event(run.spec, self.store))

    def _own(self) -> list[_Run]:
        """The runs that processes of this sweep train, or have trained."""
        with self.lock:
            stopped = [run for run in self.followed.values() if run.stop_reason]
            return [*self.trials.values(), *self.ending.values(), *stopped]

    def _is_over(self) -> bool:
        with self.lock:
            if self._own():
                return False
            more = self.followed or any(self.waiting.values()) or (self.suggestions and self.suggestions.left)
            return self._is_draining() or not more

    # -- ends of trials --------------------------------------------------------------------------------------------

    def _handle_end(self, end: _End) -> None:
        run, event = end.run, end.result.get("event")
        match end.result.get("outcome"):
            case "elsewhere":
                self._follow_in_index(run)
            case "ended" if event is not None:
                left_node = event.status == "interrupted" and not self.work.stop.is_set()
                if left_node or event.status == "pending":  # or it was not begun, because no more runs are started
                    self._wait(run, first=True)
                else:
                    self._end(run, event)
            case _ if end.error is not None:
                self._handle_error(run, end.result, end.error)
            case _:  # the scheduler has ended it. Tune may keep its process as it is, for a next run.
                rule = self.work.schedule.rule if self.work.schedule else ""
                run.stop_reason = f"stopped by {rule} at step {run.step}"
                self.leases.waiting(
                    lambda: self.store.index.request_stop(self.sweep_id, run.spec.run_id, run.stop_reason)
                )
                self._follow_in_index(run)

    def _end(self, run: _Run, event: Event) -> None:
        self.any_ended = True
        with self.lock:
            self.ending.pop(run.spec.run_id, None)
        if event.status == "failed":
            self.failed.add(run.spec.run_id)
        if self.suggestions is not None:  # of most runs it knows since their trial has ended
            self.suggestions.end(event.run_id, event.status, event.metrics.get(self.suggestions.metric))
        self.work.on_event(event)

    def _handle_error(self, run: _Run, result: Mapping[str, Any], error: Exception) -> None:
        """Start a run again whose process ended with an error, or record that it failed.

        Tune's `FailureConfig` cannot do this: it starts a trial again with the resources that it was created with, so
        also on a node that cannot train, and it counts a process that was asked to leave its node.

        The first error that a rank of several raises does not count: it may be the effect of another rank's death.
        """
        from ray.train import PreemptionError, WorkerGroupError

        cause = getattr(error, "cause", None) or error
        reason = str(cause).strip() or type(cause).__name__
        process = str(getattr(error, "actor_id", None))
        node = self.node_of.get(process, run.node if run.begun else "")
        self._look_at_nodes()
        is_gone = bool(node) and node not in self.nodes
        if "problem" in result:
            self._exclude(str(result["node"]), str(result["problem"]))
        elif is_gone or getattr(cause, "preempted", False) or isinstance(cause, PreemptionError):
            pass  # the process was to leave its node, or the node has gone
        elif not node:  # nothing was heard of that process
            node = node_of_process(process)
            self.idle_deaths[node] += 1
            if self.idle_deaths[node] >= MAX_IDLE_DEATHS:
                self._exclude(node, f"its processes end before they train anything: {' '.join(reason.split())}")
        else:
            failures = cause.worker_failures.values() if isinstance(cause, WorkerGroupError) else [cause]
            is_death = any(isinstance(each, ray.exceptions.RayError) for each in failures)
            run.deaths += is_death
            run.errors += not is_death
            if run.deaths > self.work.resources.max_failures or run.errors > 1:
                text = " ".join(reason.split())
                self._fail(
                    run, f"its process died {run.deaths} times: {text}" if is_death else text, reason, not is_death
                )
                return
        self._wait(run, first=True)

    def _fail(self, run: _Run, message: str, details: str, keep_recorded: bool = False) -> None:
        self._record(run, lambda: record_failure(run.spec, self.store, message, details, keep_recorded))

    def _record(self, run: _Run, write: Callable[[], None]) -> None:
        """Write the end of a run, in place of its process, under a lease of its own."""
        lease = self.leases.acquire(run.spec)
        if isinstance(lease, Refusal) and lease.reason == "leased":
            self._follow_in_index(run)  # what became of it is seen there
        elif isinstance(lease, Refusal) and lease.reason == "stopped":
            self._wait(run)  # for a later sweep
        else:
            try:
                write()
            except OSError as error:
                folder = self.store.run(run.spec.run_id).path
                raise StoreError(f"{folder}: cannot be written ({error.strerror or error})") from error
            self.leases.end(run.spec.run_id)
            self._end(run, final_event(run.spec, self.store))

    # -- the cluster -----------------------------------------------------------------------------------------------

    def _look_at_cluster(self) -> None:
        """Notice nodes that come and go, and refuse kinds of runs that no node has room for.

        Raises:
            ClusterError: No node is left that can train, or none has room for any run.
            ClusterLost: The cluster's head is gone, or the node of this process.
        """
        self._look_at_nodes()
        with self.lock:
            for kind in self.waiting:
                self._note_kind(kind)
        self._refuse_misfits()

    def _look_at_nodes(self) -> None:
        try:
            self.nodes = check_cluster(self.this_node)
        except ClusterLost:
            self.cluster_lost = True
            raise

    def _note_kind(self, kind: Resources) -> None:
        """Find out whether there can be room for a run of a kind."""
        reason = needs_of(kind, self.nodes).misfit([node.resources for node in self._usable()])
        if reason is None or (self.work.resources.groups != "auto" and not self.excluded):
            self.refused.pop(kind, None)  # with a fixed number, runs wait for nodes that an autoscaler adds
        elif self.excluded:
            self.refused[kind] = f"no node is left that can train: {'; '.join(dict.fromkeys(self.excluded.values()))}"
        else:
            self.refused[kind] = (
                f"a run {reason}: lower resources.cpus, .gpus or .workers, use a larger cluster, or set "
                "resources.groups to wait for nodes that an autoscaler adds"
            )

    def _usable(self) -> list[Node]:
        """The nodes that can train."""
        if "" in self.excluded:  # processes die, and it is not known where
            return []
        return [node for node_id, node in self.nodes.items() if node_id not in self.excluded]

    def _refuse_misfits(self) -> None:
        with self.lock:
            wanted = [kind for kind, waiting in self.waiting.items() if waiting]
            misfits = [kind for kind in wanted if kind in self.refused]
            none_trains = len(misfits) == len(wanted) and not any(run.begun for run in self.trials.values())
        if misfits and none_trains and (self.excluded or not self.any_ended):
            raise ClusterError(self.refused[misfits[0]])
        for kind in misfits:
            with self.lock:
                waiting, self.waiting[kind] = self.waiting[kind], deque()
            self.work.on_note(f"runs that take {kind.shape} fail: {self.refused[kind]}")
            for run in waiting:
                self._fail(run, self.refused[kind], self.refused[kind])

    def _exclude(self, node_id: str, reason: str) -> None:
        """Have later trials avoid a node."""
        if node_id in self.excluded:
            return
        with self.lock:
            self.excluded[node_id] = reason
        address = self.nodes[node_id].address if node_id in self.nodes else node_id[:8] or "unknown"
        self.work.on_note(f"node {address} is left out: {reason}")
        with contextlib.suppress(StoreError):  # a number for the monitoring: the sweep goes on without it
            note_left_out(self.store.index, self.sweep_id, len(self.excluded))

    # -- the index -------------------------------------------------------------------------------------------------

    def _stop_runs(self) -> None:
        """Ask the runs in training to write their states and end."""
        with contextlib.suppress(StoreError):
            self.store.index.request_stop(self.sweep_id)

    def _any_training(self) -> bool:
        """Whether a process of this sweep still trains a run."""
        run_ids = [run.spec.run_id for run in self._own()]
        try:
            return "running" in self.store.index.statuses(run_ids).values()
        except StoreError:
            return True

    def _look_at_runs(self) -> None:
        """Pass on the progress of runs in training, and the ends of those that were stopped or trained elsewhere."""
        with self.lock:
            alive, followed = {run.spec.run_id: run for run in self.trials.values()}, dict(self.followed)
        for run_id, record in self.store.index.records(alive).items():
            if record.status == "running":
                self._pass_progress(alive[run_id], record)
        statuses = self.store.index.statuses(followed) if followed else {}
        for run_id, run in followed.items():
            if (status := statuses.get(run_id, "pending")) == "running":
                continue
            with self.lock:
                del self.followed[run_id]
            if status in ENDED:
                self._end(run, final_event(run.spec, self.store))
            elif run.stop_reason:  # its process died meanwhile
                self._record(run, partial(record_stop, run.spec, self.store, run.stop_reason))
            else:
                self._wait(run, first=True)  # the other sweep gave it up

    def _pass_progress(self, run: _Run, record: RunRecord) -> None:
        now_s = time.monotonic()
        if run.first is None or record.step < run.first[1]:
            run.first = (now_s, record.step)
        elapsed_s, steps = now_s - run.first[0], record.step - run.first[1]
        event = Event(
            record.run_id, "running", record.step, run.spec.train.steps, record.metrics,
            steps_per_s=steps / elapsed_s if steps and elapsed_s else None, worker_id=record.worker_id or "",
        )  # fmt: skip
        if run.seen is None or (event.step, event.worker_id) != (run.seen.step, run.seen.worker_id):
            run.seen = event
            self.work.on_event(event)
