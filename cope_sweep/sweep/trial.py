"""A trial, which Ray Tune schedules: it trains one run. Its process trains the next run of equal resources, too.

A trial gets a run, the number of an attempt, and the store's location. It writes the run's folder and reports how far
the run is: each evaluation, and at least every two seconds the step. It opens no index.

`RunTrial` is a class trainable: `step` returns the next message of a thread that trains. (In a function trainable that
Tune stops, the function stays blocked in `tune.report` while the process is used for the next trial.)

Every run is one `TorchTrainer(train_loop).fit()`. With one worker this is Train's local mode, in the trial's process.
With several, Train starts a worker group in a separate placement group; the trial itself then asks for no CPU.

A run is asked to end through one small actor of the driver, `StopRequests`. The run then writes its state, and its
trial reports that it is done.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import platform
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import ray
from ray import tune
from ray._private.state import state as ray_state
from ray.train import PreemptionError, UserCallback, WorkerGroupError
from ray.util.queue import Queue

from cope_sweep.config import Resources, RunSpec
from cope_sweep.registry import PluginError, load_plugins
from cope_sweep.signals import TERMINATION, handle, user_code
from cope_sweep.store import AttemptWriter, Event, Store, StoreError
from cope_sweep.store.errors import StoreUnreachable
from cope_sweep.sweep.executor import worker_id
from cope_sweep.sweep.leases import RENEWAL_S
from cope_sweep.sweep.stop_requests import StopLine, StopOrder

if TYPE_CHECKING:
    from cope_sweep.train import StopRequest

NODE_LABEL = "ray.io/node-id"
TRIAL_BYTES = 200_000_000
"""Memory of the process of a trial whose workers Train starts. Asking for it spreads such trials over the nodes."""
STORE_VISIBLE_TIMEOUT_S = 5.0
"""The time that a shared disk may take to show a file to another node."""
WATCHDOG_INTERVAL_S = 1.0
"""Time between two starts of the watchdog's timer. Each ends a thread of `faulthandler` and starts another, and a small
model makes hundreds of steps in this time."""


# -- a process that trains ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepContext:
    """What a process that trains needs to know about its sweep. Picklable."""

    sweep_id: str
    location: str
    """The store: its folder, or its URL."""
    token: str
    """The name of a file that the driver wrote to the store. A process that sees it uses the same store."""
    stop_requests: str
    """The name of the driver's actor `StopRequests`."""
    plugins: tuple[str, ...] = ()
    """Modules to import before a run is received."""


class NodeProblem(Exception):
    """The node cannot train: it does not see the store, has no working GPU, lacks a plugin, …"""

    def __init__(self, node_id: str, reason: str) -> None:
        super().__init__(node_id, reason)
        self.node_id, self.reason = node_id, reason


class Process:
    """A process that trains: its store and log, used for one run after another."""

    def __init__(self, sweep: SweepContext, *, gpus: float) -> None:
        """Open the store, import the plugins and try the GPU.

        Raises:
            NodeProblem: This node cannot train.
        """
        try:
            self.store = _visible_store(sweep)
            self.log = _redirect_output(self.store.root / "logs" / sweep.sweep_id)
            load_plugins(sweep.plugins)
            _check_device(gpus)
            logging.getLogger("ray.train").setLevel(logging.WARNING)  # else it logs every evaluation
        except (StoreError, PluginError, OSError, RuntimeError) as error:
            raise NodeProblem(node_id(), f"node {platform.node()}: {error}") from error
        self.stop_requests = ray.get_actor(sweep.stop_requests)
        self.preempted = threading.Event()
        """Set when the process was asked to leave its node."""
        self.training = ThreadPoolExecutor(1, "training")
        """One thread for all runs: torch keeps a pool of threads for each thread that it computes in."""


def node_id() -> str:
    """The id of this node."""
    return str(ray.get_runtime_context().get_node_id())


def _watch_node(node: str, preempted: threading.Event) -> None:
    """Set `preempted` when Ray drains the node: it tells no trial of one worker, and kills its process with the node.

    In a thread of its own, because the call waits while the cluster's head is away.
    """
    while not preempted.wait(RENEWAL_S):
        with contextlib.suppress(Exception):  # asked again
            # Ray 2.60 has no public call that says this; Ray Train uses the same one.
            if node in ray_state.get_draining_nodes():
                preempted.set()


def _visible_store(sweep: SweepContext) -> Store:
    """The store of the sweep. Raises StoreError if this node does not see it."""
    store = Store(sweep.location)
    # The driver has just written the file: a network file system may remember for seconds that it is missing.
    until = time.monotonic() + STORE_VISIBLE_TIMEOUT_S
    while True:
        reason = ""
        try:
            if store.read(sweep.token) is not None:
                store.wait_out_outages()
                return store
        except StoreError as error:
            reason = f" ({error})"
        if time.monotonic() > until:
            raise StoreError(
                f"cannot see the store {sweep.location}{reason}: use a folder that all nodes share or an object "
                "store, with --store or COPE_SWEEP_STORE",
                code="no_store",
                store=str(sweep.location),
            )
        time.sleep(0.2)


def _check_device(gpus: float) -> None:
    """Raise RuntimeError if Ray gave this process a GPU that does not work."""
    if gpus:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("Ray gave this process a GPU, but torch sees no CUDA device; look at nvidia-smi there")
        torch.ones(8, device="cuda").sum().item()  # a device may be listed, and yet refuse to compute


def _broken_device() -> str:
    """Why CUDA is in an error state, in which every later run of this process would fail; "" if it is not."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the CUDA device is in an error state: {error}"
    return ""


def _redirect_output(folder: Path) -> TextIO:
    """Append what this process prints, including crashes of native code, to a file in the store's folder on this node.

    A shared folder keeps it when the cluster has gone; to an object store it is not copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{worker_id().replace(':', '-')}.log").open("a")
    sys.stdout.flush()
    sys.stderr.flush()
    # Of the file descriptors, not of `sys.stdout`: native code prints, too.
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable(file=file, all_threads=False)
    return file


class Watchdog:
    """Ends this process where a run makes no step for too long, after it has written all stacks to the log.

    The timer is one of the C library: it also ends a process in which no Python code gets to run.
    """

    def __init__(self, timeout_s: float | None, log: TextIO) -> None:
        self.timeout_s, self.log = timeout_s, log
        self._step, self._started_s = -1, float("-inf")
        self.restart(0)

    def restart(self, step: int) -> None:
        """Start the timer again if the run, which is at `step`, has made a step."""
        now_s = time.monotonic()
        if self.timeout_s is None or step == self._step or now_s - self._started_s < WATCHDOG_INTERVAL_S:
            return
        self._step, self._started_s = step, now_s
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self.log)

    def close(self) -> None:
        """The run has ended."""
        if self.timeout_s is not None:
            faulthandler.cancel_dump_traceback_later()


# -- the function that Train calls -------------------------------------------------------------------------------------


def train_loop(config: dict[str, Any]) -> Event:
    """Train a run as one of the workers of a `TorchTrainer`. Returns its last event.

    `config` is the trial's. With one worker, which is the trial's own process, it has also:

        process   the Process
        line      the StopLine, which the trial asks
        report    called with every event; several workers report their evaluations by `ray.train.report`

    The model is not wrapped by `prepare_model`, and gradients are summed by the trainer over *sequences*, so that a run
    has the same result with any number of workers (up to rounding), which is part of its definition.

    Raises:
        NodeProblem: This node cannot train.
    """
    from cope_sweep.train import Runtime, train_run

    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    process: Process = config.get("process") or Process(config["sweep"], gpus=config["gpus"])
    run = RunSpec.model_validate_json(config["run"])
    resources: Resources = config["resources"]
    runtime = Runtime.of(resources, worker_id=worker_id(), rank=rank, world_size=workers)
    line: StopLine = config.get("line") or StopLine(process.stop_requests, run.run_id)
    report: Callable[[Event], None] | None = config.get("report")
    watchdog = Watchdog(resources.step_timeout_s, process.log)
    last = Event(run_id=run.run_id, steps=run.train.steps)

    def on_event(event: Event) -> None:
        nonlocal last
        last = event
        watchdog.restart(event.step)
        if report is not None:
            report(event)
        elif event.evaluated and event.status == "running":
            # Every rank has to call it, and waits up to 2 s in it: so evaluations only, and not each progress.
            ray.train.report({"event": event})

    def should_stop() -> StopRequest | None:
        if report is None:
            line.ask(every_s=RENEWAL_S)
        if line.order is not None:
            return line.order.request
        return "interrupted" if process.preempted.is_set() else None

    try:
        outcome = train_run(
            run, process.store.run(run.run_id).of_sweep(config["sweep"].sweep_id), runtime,
            attempt=config["attempt"], on_event=on_event, should_stop=should_stop,
        )  # fmt: skip
        if outcome == "stopped" and rank == 0 and line.order is not None:
            # The scheduler's reason is known here only; the loop has written the status and the resume file.
            attempt = AttemptWriter(process.store.run(run.run_id), config["attempt"])
            attempt.set_state("stopped", message=f"{line.order.reason} at step {last.step}")
        return last
    finally:
        watchdog.close()


class _ToTrial(UserCallback):
    """Reports to the trial, from the process of Train's controller, what the workers that it started have reported."""

    def __init__(self, evaluations: Queue) -> None:
        self.evaluations = evaluations

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.evaluations.put(metrics[0]["event"])


# -- the trial ---------------------------------------------------------------------------------------------------------

TrialOutcome = Literal["started", "progress", "ended", "failed"]
"""Kind of a trial's result. `failed`: Train raised an error, which is not a result of the run's folder."""


def _usable_nodes(config: Mapping[str, Any]) -> dict[str, str] | None:
    """The label selector of the nodes that can train; None: all can."""
    return {NODE_LABEL: f"!in({','.join(config['excluded'])})"} if config["excluded"] else None


class RunTrial(tune.Trainable):
    """A trial: one run.

    The keys of its configuration are `sweep` (a SweepContext), `run_id`, `run` (as JSON: it is read after the plugins
    were imported, which may define its types), `attempt`, `resources`, `gpus` and `bundle` (what a worker takes),
    `excluded` (ids of nodes that cannot train), and `metrics` (of an evaluation, those that the sweep needs).

    A result has `step`, `outcome`, `event`, `actor`, `node`, the metrics of an evaluation that the sweep needs, and
    `leaves`. That says why this process has to end; the next call of `step` ends it. `problem`: its node cannot train.
    `error`: what Train raised, and `cause`, a FailureCause.
    """

    process: Process | None = None
    current: _Attempt | None = None
    leaves = ""
    shown = False
    """The driver knows where this process is."""

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        several = config["resources"].workers > 1
        where = _usable_nodes(config)
        options: dict[str, Any] = {"bundle_label_selector": [where]} if where else {}
        return tune.PlacementGroupFactory([{"memory": TRIAL_BYTES} if several else config["bundle"]], **options)

    def setup(self, config: dict[str, Any]) -> None:
        # Nothing is opened before the first step: Tune also starts processes that it ends unused.
        self.trial = config

    def reset_config(self, config: dict[str, Any]) -> bool:
        self._end_current()
        self.trial = config
        return True

    def cleanup(self) -> None:
        self._end_current()

    def step(self) -> dict[str, Any]:
        if self.leaves:
            # Only now: an error in the call before would have lost the result with the reason.
            raise SystemExit(self.leaves)
        try:
            if self.current is None:
                if self.process is None:
                    # Where Train starts the workers, this process has no GPU.
                    alone = self.trial["resources"].workers == 1
                    process = self.process = Process(self.trial["sweep"], gpus=self.trial["gpus"] if alone else 0)
                    handle(TERMINATION, lambda signum, frame: process.preempted.set())
                    threading.Thread(target=_watch_node, args=(node_id(), process.preempted), daemon=True).start()
                self.current = _Attempt(self.process, self.trial)
            if not self.shown:
                # At once, so that the driver knows the node if this process dies before its first report.
                return self._result("started", self.current.latest)
            self.current.line.ask()
            return self._next_result(self.current)
        except NodeProblem as problem:
            self.leaves = problem.reason
            return self._result("started", None, problem=problem.reason, node=problem.node_id)

    def _next_result(self, attempt: _Attempt) -> dict[str, Any]:
        message = attempt.next_message()
        if isinstance(message, Event):
            return self._result("progress", message)
        self.current = None
        self.leaves = attempt.broken
        if self.process is not None and self.process.preempted.is_set():
            self.leaves = "it was asked to leave its node"
        if isinstance(message, NodeProblem):
            raise message
        if isinstance(message, _Failure):
            return self._result("failed", attempt.latest, error=message.text, cause=message.cause)
        return self._result("ended", message.event)

    def _result(self, outcome: TrialOutcome, event: Event | None, **extra: Any) -> dict[str, Any]:
        self.shown = True
        # Tune keeps statistics of every number for every trial, so it gets only what it needs.
        wanted = self.trial["metrics"] if event and event.evaluated else ()  # else they are of an earlier step
        event_fields = {name: value for name, value in (event.metrics if event else {}).items() if name in wanted}
        return {
            "step": event.step if event else 0,
            "outcome": outcome,
            "event": event,
            "leaves": self.leaves,
            "actor": ray.get_runtime_context().get_actor_id(),
            "node": node_id(),
            "done": outcome in ("ended", "failed") and not self.leaves,
            **event_fields,
            **extra,
        }

    def _end_current(self) -> None:
        """Have a run whose trial Tune has ended write its state, and wait for it. Tune cuts that after 10 s."""
        attempt, self.current = self.current, None
        if attempt is not None:
            attempt.line.order = attempt.line.order or StopOrder("interrupted")
            wait([attempt.training])


@dataclass(frozen=True)
class _AttemptEnd:
    """The end of a run, with its last event."""

    event: Event


FailureCause = Literal["error", "death", "preempted", "store"]
"""Why Train gave up: an error of a worker, the death of its process, its node, which it was to leave, or the loss of
the object store."""


@dataclass(frozen=True)
class _Failure:
    """Train raised an error. As text: not every error can be pickled."""

    text: str
    cause: FailureCause

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        """What an error of Train means."""
        parts = _parts(error)
        text = str(error).strip() or type(error).__name__
        if any(isinstance(_cause(part), StoreUnreachable) for part in parts):
            return cls(text, "store")
        if isinstance(error, PreemptionError) or any(getattr(part, "preempted", False) for part in parts):
            return cls(text, "preempted")
        return cls(text, "death" if any(isinstance(part, ray.exceptions.RayError) for part in parts) else "error")


def _parts(error: Exception) -> list[Exception]:
    """The errors of the workers that Train started, or the error itself."""
    return list(error.worker_failures.values()) if isinstance(error, WorkerGroupError) else [error]


def _cause(part: Exception) -> BaseException:
    """What a worker raised, without what Train or Ray put around it."""
    return getattr(part, "cause", None) or part


class _Attempt:
    """A run in training, in a thread, so that Tune can ask how far it is."""

    def __init__(self, process: Process, trial: Mapping[str, Any]) -> None:
        self.process, self.trial = process, trial
        self.workers: int = trial["resources"].workers
        self.run_id: str = trial["run_id"]
        self.line = StopLine(process.stop_requests, self.run_id)
        self.latest = Event(run_id=self.run_id)
        """The last event of the run."""
        self.broken = ""
        """Why the process cannot train another run."""
        self._messages: queue.SimpleQueue[Event | _AttemptEnd | _Failure | NodeProblem] = queue.SimpleQueue()
        """Evaluations, then the end."""
        self.training = process.training.submit(self._train)

    def next_message(self) -> Event | _AttemptEnd | _Failure | NodeProblem:
        """The next evaluation or the end; after a while without, how far the run is."""
        try:
            return self._messages.get(timeout=RENEWAL_S)
        except queue.Empty:
            return self.latest.model_copy(update={"evaluated": False})  # an evaluation is reported once

    def _train(self) -> None:
        try:
            with user_code():
                event = self._fit()
            if event.status == "failed" and self.trial["gpus"] and self.workers == 1:
                self.broken = _broken_device()
            self._messages.put(_AttemptEnd(event))
        except Exception as error:
            causes = map(_cause, _parts(error))
            problem = next((cause for cause in causes if isinstance(cause, NodeProblem)), None)
            self._messages.put(problem or _Failure.of(error))

    def _fit(self) -> Event:
        # Type checkers see the former version of Ray Train, which has the same names.
        import ray.train as ray_train
        import ray.train.torch as ray_train_torch

        RunConfig: Any = ray_train.RunConfig
        ScalingConfig: Any = ray_train.ScalingConfig
        TorchTrainer: Any = ray_train_torch.TorchTrainer
        trial = self.trial
        config = dict(trial)
        if self.workers == 1:
            config |= {"process": self.process, "line": self.line, "report": self._report}
            scaling = ScalingConfig(num_workers=0, use_gpu=trial["gpus"] > 0)
            trainer = TorchTrainer(train_loop, train_loop_config=config, scaling_config=scaling)
            return cast(Event, trainer.fit().return_value)
        evaluations = Queue(actor_options={"num_cpus": 0})
        threading.Thread(target=self._report_all, args=(evaluations,), name="evaluations", daemon=True).start()
        with tempfile.TemporaryDirectory(prefix="cope-sweep-train-") as scratch:
            trainer = TorchTrainer(
                train_loop,
                train_loop_config=config,
                scaling_config=ScalingConfig(
                    num_workers=self.workers,
                    use_gpu=trial["gpus"] > 0,
                    resources_per_worker=trial["bundle"],
                    label_selector=_usable_nodes(trial),
                ),
                run_config=RunConfig(name=self.run_id, storage_path=scratch, callbacks=[_ToTrial(evaluations)]),
            )
            try:
                return cast(Event, trainer.fit().return_value)
            finally:
                evaluations.shutdown(force=True)

    def _report(self, event: Event) -> None:
        self.latest = event
        if event.evaluated and event.status == "running":
            self._messages.put(event)

    def _report_all(self, evaluations: Queue) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the queue's actor has ended, with the run
            while True:
                self._report(evaluations.get())
