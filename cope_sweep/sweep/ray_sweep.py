"""A sweep on a connected cluster: Ray Tune schedules trials, each trains one run (`trial`); this process follows them.

README.md lists which features of Tune it uses, and which not. What runs have done comes from Tune's results. Requests
to end runs go the other way, through the actor `StopRequests`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cope_sweep.errors import ClusterError
from cope_sweep.signals import user_code
from cope_sweep.store import Event, StoreError
from cope_sweep.store.errors import StoreUnreachable
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep.cluster import Needs, Node, living_nodes, may_wait, needs_of
from cope_sweep.sweep.driver import DrivenRun, Driver, RunState
from cope_sweep.sweep.executor import INTERRUPT_TIMEOUT_S, LOOK_INTERVAL_S, ClusterLost
from cope_sweep.sweep.stop_requests import StopRequests
from cope_sweep.sweep.trial import SweepContext
from cope_sweep.sweep.tune_adapters import tuner_of

WAIT_S = 0.1
"""The time for which this process waits for the end of a trial before it reports events and looks at `stop`."""
PENDING_TRIALS = 16
"""On a small cluster that may grow, the trials that wait for a place."""
TUNE_TIMEOUT_S = 60.0
"""Time limit for Tune to end its trials after the sweep. It takes 1 s, or as long as the start of a process."""
STOP_TIMEOUT_S = 5.0
"""Time limit for the actor to take a request to stop. It takes a millisecond."""


@dataclass
class _Trial:
    """A trial of Tune, and what is known of the process that trains its run."""

    run: DrivenRun
    has_started: bool = False
    """Its process has reported."""
    node: str = ""
    """The node of that process."""


@dataclass(frozen=True)
class _End:
    """The end of a trial, with its last result."""

    trial: _Trial
    result: Mapping[str, Any]
    error: Exception | None
    """Why its process ended; None: it has not."""


class RaySweep:
    """One sweep on a connected cluster; the `Trials` of Tune.

    Tune's thread asks for runs and reports results. Everything else is decided in the thread of the caller.
    """

    def __init__(self, driver: Driver, scratch: str, *, may_grow: bool) -> None:
        """A sweep of the driver's runs. Tune's files go to `scratch`.

        `may_grow`: an autoscaler may add nodes to the cluster.
        """
        self.driver, self.work, self.store = driver, driver.work, driver.store
        self.scratch, self.may_grow = scratch, may_grow
        self.lock = driver.lock
        """Guards the attributes below, which Tune's thread uses, too."""
        self.trials: dict[str, _Trial] = {}
        """Trial id → trial, until Tune has ended it."""
        self.deaths: Counter[str] = Counter()
        """Run id → the number of times that its process died."""
        self.errors: Counter[str] = Counter()
        """Run id → the number of times that one of its ranks, of several, ended with an error."""
        self.nodes: dict[str, Node] = {}
        self.excluded: dict[str, str] = {}
        """Node id → why the node cannot train."""
        self.waits_for_nodes = False
        """A note has said that no node has room for a run."""
        self.node_of: dict[str, str] = {}
        """Process of trials (an actor's id) → its node."""
        self.ends: queue.SimpleQueue[_End | Exception] = queue.SimpleQueue()
        """Ends of trials, and the error with which Tune gave up. This process waits for the index where it handles one,
        and Tune's thread must not."""
        self.ended = threading.Event()
        """Set when the sweep has ended."""
        self.tune: threading.Thread | None = None
        self.stop_requests: Any = None
        self.this_node: str = ray.get_runtime_context().get_node_id()
        self.cluster_lost = False
        """Calls of Ray would block."""

    # -- in Tune's thread ------------------------------------------------------------------------------------------

    def next_trial(self, trial_id: str) -> dict[str, Any] | None:
        """The configuration of a trial of the next run, which is leased; None while no run can be."""
        with self.lock:
            if self.ended.is_set() or self._is_full():
                return None
            run = self.driver.take()
            if run is None:
                return None
            self.trials[trial_id] = _Trial(run)
            needs = self._needs()
            return {
                "run_id": run.run_id,
                "run": run.spec.model_dump_json(),
                "attempt": run.attempt,
                "resources": self.work.resources,
                "gpus": needs.gpus,
                "bundle": needs.bundle,
                "excluded": tuple(sorted(self.excluded)),
            }

    def is_exhausted(self) -> bool:
        """`next_trial` returns None until a trial has ended."""
        if self.ended.is_set():
            return True
        with self.lock:
            # Tune has ended a trial whose run `_follow` has still to record, which may have the run wait again. And
            # with no trial left, nothing would ask again: Tune would end the sweep while runs are trained elsewhere.
            is_ending = self.driver.counts[RunState.TRAINING] > len(self.trials)
            if is_ending or not self.trials:
                return False
            return self.driver.is_draining or self._is_full() or not (self.driver.may_suggest or self.driver.waiting)

    def _needs(self) -> Needs:
        return needs_of(self.work.resources, self.nodes)

    def _is_full(self) -> bool:
        """Runs of several workers take all the room of the cluster.

        Their trials ask Tune for no CPU: Train asks for the place of the workers when the trial has started. Without
        this limit all trials would start, and each would keep a process that waits for its workers.
        """
        needs = self._needs()
        if needs.workers == 1:
            return False
        room = sum(needs.workers_on(node.resources) for node in self._usable()) // needs.workers
        return len(self.trials) >= max(1, room)

    def on_start(self, trial_id: str) -> None:
        """The process of a trial has started, or is used again."""
        run = self.trials[trial_id].run
        if self.work.resources.workers == 1:  # else its workers have still to start
            # Only shown: the index keeps the step up to which an earlier attempt trained.
            self.driver.events.put(Event(run_id=run.run_id, status="running", steps=run.spec.train.steps))

    def on_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """A trial has reported something."""
        event: Event | None = result["event"]
        with self.lock:
            trial = self.trials[trial_id]
            trial.has_started = trial.has_started or "problem" not in result
            self.node_of[result["actor"]] = trial.node = result["node"]
        if event is not None and event.status == "running" and result["outcome"] == "progress":
            self.driver.report(event)

    def on_end(self, trial_id: str, result: Mapping[str, Any], error: Exception | None) -> None:
        """A trial has ended. `result` is its last one; `error`: why its process died."""
        with self.lock:
            trial = self.trials.pop(trial_id)
            event: Event | None = result.get("event")
            if event is not None and event.status == "failed":
                self.driver.failed.add(event.run_id)
        self.ends.put(_End(trial, result, error))

    def stop_run(self, trial_id: str) -> None:
        """Ask the run of a trial to end, because the scheduler wants it."""
        run, schedule = self.trials[trial_id].run, self.work.schedule
        reason = f"stopped by {schedule.rule}" if schedule else ""
        ray.get(self.stop_requests.stop_run.remote(run.run_id, reason), timeout=STOP_TIMEOUT_S)

    def past_points(self, trial_id: str) -> list[dict[str, float]]:
        """The curve that earlier attempts of a trial's run have logged; empty where it cannot be read."""
        run = self.trials[trial_id].run
        with contextlib.suppress(StoreError):
            return self.store.run(run.run_id).curve() if run.attempt > 1 else []
        return []

    # -- in the caller's thread ------------------------------------------------------------------------------------

    def execute(self, token: str, logs: Path) -> None:
        """Train the runs. `token` is the name of a file in the store, `logs` the folder of logs."""
        try:
            self._look_at_cluster()
            with _default_setting("TUNE_MAX_PENDING_TRIALS_PG", str(self._pending_limit())):
                self._start(token)
                self._follow(logs)
        except BaseException as error:
            # An error in `on_event`, such as a closed pipe, or a cluster that is lost: runs in training can still write
            # their states. Not at a second Ctrl-C: they were given that time before.
            if not (self.work.stop.is_set() and isinstance(error, KeyboardInterrupt)):
                self.work.stop.set()
                self._stop_runs()
                until = time.monotonic() + INTERRUPT_TIMEOUT_S
                while self._any_training() and time.monotonic() < until:
                    time.sleep(WAIT_S)
            raise
        finally:
            self._end_rest()
            self.ended.set()
            if not self.cluster_lost:  # else the calls below would block, until Ray ends this process without a word
                self._look_at_nodes()
            # A thread that is inside of Ray while Ray shuts down would end this process.
            if self.tune is not None and not self.cluster_lost:
                self.tune.join(TUNE_TIMEOUT_S)
            if self.stop_requests is not None and not self.cluster_lost:
                ray.kill(self.stop_requests)
        self.driver.flush_events()

    def _start(self, token: str) -> None:
        # The actor runs on this node, so that it ends with this process.
        name = f"cope-sweep-{self.work.sweep_id}-{secrets.token_hex(4)}"
        strategy = NodeAffinitySchedulingStrategy(self.this_node, soft=False)
        # Ray starts it again if it dies, and then repeats the calls that it has not answered.
        lasting = {"max_restarts": -1, "max_task_retries": -1}
        options = {"name": name, "num_cpus": 0, "scheduling_strategy": strategy, **lasting}
        self.stop_requests = ray.remote(StopRequests).options(**options).remote()
        context = SweepContext(self.work.sweep_id, self.store.location, token, name, tuple(self.work.plugins))
        groups, search = self.work.resources.groups, self.driver.search
        tuner = tuner_of(
            self,
            context,
            groups=None if groups == "auto" else groups,
            schedule=self.work.schedule,
            metrics=[str(rule.metric) for rule in (self.work.schedule, search) if rule is not None],
            ended=self.ended,
            scratch=self.scratch,
        )

        def fit() -> None:
            try:
                with user_code():  # a row that the search suggests is validated
                    tuner.fit()
            except Exception as error:
                self.ends.put(error)

        self.tune = threading.Thread(target=fit, name="tune", daemon=True)
        self.tune.start()

    def _pending_limit(self) -> int:
        """The number of trials that may wait for a place or start at the same time.

        An autoscaler sees them. Each makes a placement group, and removes it where the process of another trial comes
        free first; and a search should suggest no run long before it starts.
        """
        cpus = int(sum(node.resources.get("CPU", 0) for node in self.nodes.values()))
        return max(PENDING_TRIALS if self.may_grow and self.driver.search is None else 1, cpus)

    def _follow(self, logs: Path) -> None:
        """Report events until the sweep has ended, or was stopped and its runs are interrupted."""
        looked_s = time.monotonic()
        deadline_s: float | None = None
        while not self.driver.is_over:
            with contextlib.suppress(queue.Empty):
                end = self.ends.get(timeout=WAIT_S)
                if isinstance(end, StoreError):  # the index cannot be used: a full disk
                    raise end
                if isinstance(end, Exception):
                    raise ClusterError(
                        f"Ray Tune failed: {end}; see its log: {logs / 'ray.log'}",
                        code="tune_failed",
                        log=str(logs / "ray.log"),
                    ) from end
                self._handle_end(end)
            self.driver.flush_events()
            now_s = time.monotonic()
            if self.work.stop.is_set() and deadline_s is None:
                deadline_s = now_s + INTERRUPT_TIMEOUT_S
                self._stop_runs()
            if deadline_s is not None and self.ends.empty() and (now_s > deadline_s or not self._any_training()):
                break
            if now_s - looked_s >= LOOK_INTERVAL_S:
                looked_s = now_s
                self._look_at_cluster()
                self.driver.look_elsewhere()
                if deadline_s is not None:
                    self._stop_runs()  # again: an actor that Ray has restarted has forgotten the request

    # -- ends of trials --------------------------------------------------------------------------------------------

    def _handle_end(self, end: _End) -> None:
        run, outcome = end.trial.run, end.result.get("outcome")
        if outcome == "ended":
            self.driver.end(run, end.result["event"])
        elif outcome == "failed":
            self._handle_failure(end.trial, str(end.result["cause"]), str(end.result["error"]))
        elif end.error is not None:
            self._handle_death(end.trial, end.result, end.error)
        else:  # Tune has ended it because the sweep is over
            self.driver.give_up(run)

    def _handle_death(self, trial: _Trial, result: Mapping[str, Any], error: Exception) -> None:
        """Start a run again whose process has ended, or record that it failed.

        Tune's `FailureConfig` cannot do this: it starts a trial again with the resources that it was created with, so
        also on a node that cannot train, and it counts a process that was asked to leave its node.
        """
        text = str(error).strip() or type(error).__name__
        process = str(getattr(error, "actor_id", None))
        node = self.node_of.get(process, trial.node)  # "": nothing was heard of it
        self._look_at_nodes()
        if "problem" in result:
            self._exclude(str(result["node"]), str(result["problem"]))
        elif result.get("leaves") or getattr(error, "preempted", False) or (node and node not in self.nodes):
            pass  # the process was to leave its node, or the node has gone
        else:
            self._handle_failure(trial, "death", text)
            return
        self._train_again(trial.run)

    def _handle_failure(self, trial: _Trial, cause: str, text: str) -> None:
        """Count what happened to the processes of a run, and start it again, or record that it failed.

        Raises StoreUnreachable, where the run has lost the object store.

        The first error that a rank of several raises does not count: it may be the effect of another rank's death.
        """
        run = trial.run
        if cause == "store":  # this process, too, would soon fail to read how a run has ended
            raise StoreUnreachable(text, store=self.store.location)
        if cause == "preempted":
            self._train_again(run)
            return
        self.deaths[run.run_id] += cause == "death"
        self.errors[run.run_id] += cause == "error"
        deaths = self.deaths[run.run_id]
        if deaths > self.work.resources.max_failures or self.errors[run.run_id] > 1:
            line = " ".join(text.split())
            message = f"its process died {deaths} times: {line}" if cause == "death" else line
            self.driver.fail(run, message, text, keep_recorded=cause == "error")
        else:
            self._train_again(run)

    def _train_again(self, run: DrivenRun) -> None:
        """Have a run wait, whose lease stays with this sweep; unless the sweep ends."""
        if self.work.stop.is_set():
            self.driver.give_up(run)
        else:
            self.driver.wait_again(run)

    # -- the cluster -----------------------------------------------------------------------------------------------

    def _look_at_cluster(self) -> None:
        """Notice nodes that come and go.

        Raises:
            ClusterError: No node is left that can train, or none has room for a run, and no larger ones are to come.
            ClusterLost: The cluster's head is gone, or the node of this process.
        """
        self._look_at_nodes()
        with self.lock:
            is_training = any(trial.has_started for trial in self.trials.values())
            if is_training or not (self.driver.waiting or self.trials):
                return
        needs, usable = self._needs(), self._usable()
        reason = needs.misfit([node.resources for node in usable])
        if reason is None:
            return
        data = {"cpus": needs.cpus, "gpus": self.work.resources.gpus}
        if self.excluded:
            reasons = "; ".join(dict.fromkeys(self.excluded.values()))
            raise ClusterError(f"no node is left that can train: {reasons}", code="no_node_left", **data)
        if not self.may_grow or not may_wait(self.work.resources, usable):
            waits = "; with a number of resources.groups, it waits for larger nodes" if self.may_grow else ""
            raise ClusterError(
                f"a run {reason}: lower resources.cpus, .gpus or .workers, or use a larger cluster{waits}",
                code="no_room",
                **data,
            )
        if not self.waits_for_nodes:
            self.waits_for_nodes = True
            self.work.callbacks.on_note(f"waiting for nodes: a run {reason}")

    def _look_at_nodes(self) -> None:
        try:
            self.nodes = living_nodes(self.this_node, is_own=not self.may_grow)
        except ClusterLost:
            self.cluster_lost = True
            raise

    def _usable(self) -> list[Node]:
        return [node for node_id, node in self.nodes.items() if node_id not in self.excluded]

    def _exclude(self, node_id: str, reason: str) -> None:
        if node_id in self.excluded:
            return
        with self.lock:
            self.excluded[node_id] = reason
        address = self.nodes[node_id].address if node_id in self.nodes else node_id[:8]
        self.work.callbacks.on_note(f"node {address} is left out: {reason}")
        with contextlib.suppress(StoreError):  # a number for the monitoring: the sweep goes on without it
            self.store.index.note_left_out(self.work.sweep_id, len(self.excluded))

    # -- the end of the sweep --------------------------------------------------------------------------------------

    def _stop_runs(self) -> None:
        """Ask the runs in training to write their states and end."""
        if self.stop_requests is not None:
            self.stop_requests.stop_all.remote()

    def _any_training(self) -> bool:
        """A process of this sweep still trains a run."""
        with self.lock:
            return any(trial.has_started for trial in self.trials.values())

    def _end_rest(self) -> None:
        """End the leases of the runs that have not started, or whose processes did not answer in time."""
        with self.lock:
            rest = [run for run in self.driver.runs.values() if run.state is RunState.TRAINING]
        with contextlib.suppress(IndexUnavailable):  # the leases expire
            for run in rest:
                self.driver.give_up(run)


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
