"""A worker group: one long-lived Ray Train run whose workers train the sweep's runs one after another.

Starting processes and importing torch takes 10 to 26 s for each group; leasing the next run takes one message. Rank 0
leases runs from the broker and broadcasts them to the other ranks. Several ranks train a run with data parallelism.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
import ray.train
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, UserCallback

from cope_sweep.registry import PluginError, load_plugins
from cope_sweep.spec import Resources
from cope_sweep.store import Event, Store
from cope_sweep.sweep.broker import Lease, LeaseResult
from cope_sweep.sweep.executor import worker_id

if TYPE_CHECKING:
    from cope_sweep.train import Runtime

LEASE_WAIT_S = 10.0
"""Rank 0 asks for a lease again after this time, so that the other ranks' broadcast never times out."""
STORE_VISIBLE_TIMEOUT_S = 5.0
"""How long a shared disk may take to show a file to another node."""
CALLBACK_TIMEOUT_S = 10.0
"""For the broker to accept the report of a failure."""


class WorkerError(Exception):
    """An error that code in a worker raised. Any other error of a worker means that its process died or hangs."""


class BrokenDevice(Exception):
    """The process cannot train any more, so Ray Train has to restart the group's workers."""


@dataclass(frozen=True)
class GroupPlan:
    """What the workers of a group need to know."""

    group: int
    broker: Any
    """The handle of the broker actor."""
    root: str
    """The store."""
    token: str
    """A file that the driver wrote to the store. A worker that sees it uses the same store."""
    logs: str
    """The folder, in the store, for the workers' output."""
    resources: Resources
    gpus: float
    """GPUs of each worker."""
    scratch: str
    """A folder of the driver for Ray Train's files."""
    plugins: tuple[str, ...] = ()
    """Modules to import before a run is received."""


def train_group(plan: GroupPlan) -> None:
    """Run one worker group until the broker has no more runs. Ray Train replaces workers that die.

    Raises:
        ray.train.TrainingFailedError: The group cannot be started.
    """
    from ray.train.torch import TorchTrainer

    resources = plan.resources
    TorchTrainer(
        _train_leases,
        train_loop_config={"plan": plan},
        scaling_config=ScalingConfig(
            num_workers=resources.workers,
            use_gpu=plan.gpus > 0,
            resources_per_worker={"CPU": resources.cpus} | ({"GPU": plan.gpus} if plan.gpus else {}),
        ),
        run_config=RunConfig(  # type: ignore[call-arg]  # the declared type is that of Ray's older class
            name=f"group-{plan.group}",
            storage_path=plan.scratch,
            # The broker limits the failures of each run. The group may be restarted any number of times.
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[_FailureReporter(plan)],  # type: ignore[list-item]
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    ).fit()


class _FailureReporter(UserCallback):
    """Reports failures of workers to the broker. Runs in the group's controller, which notices them first."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        reason = "\n".join(f"rank {rank}: {error}" for rank, error in worker_exceptions.items())
        died = not all(isinstance(error, WorkerError) for error in worker_exceptions.values())
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.plan.broker.group_failed.remote(self.plan.group, reason, died), timeout=CALLBACK_TIMEOUT_S)


def _train_leases(config: dict[str, Any]) -> None:
    """The training function of every worker: leases and trains runs until there are no more."""
    plan: GroupPlan = config["plan"]
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    problem = _store_problem(plan)
    if problem is None:
        _redirect_output(Path(plan.logs) / f"group-{plan.group}-rank-{rank}.log")
        problem = _plugin_problem(plan)
    try:
        _Worker(plan, rank, workers).train_all(problem)
    except ray.exceptions.RayActorError:
        # The broker died and the sweep has ended, which the driver reports. The runs have their checkpoints.
        return
    except Exception as error:
        raise WorkerError(f"{type(error).__name__}: {error}") from error


class _Worker:
    """One rank of a group."""

    def __init__(self, plan: GroupPlan, rank: int, workers: int) -> None:
        self.plan, self.rank, self.workers = plan, rank, workers
        self.broker = plan.broker
        self.store = Store(plan.root)
        self.interrupted = 0
        """The number of the last lease that was to be interrupted."""
        self.broker_lost = False
        self.last_event: Event | None = None

    def train_all(self, problem: str | None) -> None:
        """Register the group; train until there are no more leases. `problem` says why this node cannot train."""
        runtime, device_problem = self._runtime()
        problem = problem or device_problem
        if self.rank == 0:
            ray.get(self.broker.register.remote(self.plan.group, problem))
        if problem or runtime is None:
            return
        if self.rank == 0:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        result: LeaseResult | None = None
        while (lease := self._lease(result)) is not None:
            result = self._train(lease, runtime)

    def _runtime(self) -> tuple[Runtime | None, str | None]:
        """The runtime of this worker, or the reason why there is none."""
        from cope_sweep.train import Runtime

        try:
            runtime = Runtime.of(self.plan.resources, worker_id=worker_id(), rank=self.rank, world_size=self.workers)
        except ValueError as error:
            return None, f"node {platform.node()}: {error}"
        return runtime, None

    def _lease(self, result: LeaseResult | None) -> Lease | None:
        """End the last lease with `result` and get the next one, which is the same on every rank."""
        while True:
            lease: Lease | Literal["wait"] | None = None
            if self.rank == 0:
                lease = ray.get(self.broker.lease.remote(self.plan.group, result, LEASE_WAIT_S))
                result = None
            if self.workers > 1:
                import torch.distributed

                shared = [lease]
                torch.distributed.broadcast_object_list(shared, src=0)
                lease = shared[0]
            if lease != "wait":
                return lease

    def _train(self, lease: Lease, runtime: Runtime) -> LeaseResult:
        from cope_sweep.train import train_run

        def on_event(event: Event) -> None:
            # Only progress is sent here. The last event is part of the lease's result, because an error in
            # `train_run` may be the effect of another rank's death.
            self.last_event = event
            if event.status == "running" and self.rank == 0:
                self.broker.report.remote(lease.number, event)

        self.last_event = None
        outcome = train_run(
            lease.run,
            self.store,
            runtime,
            on_event=on_event,
            should_stop=lambda: self.broker_lost or self.interrupted >= lease.number,
        )
        if outcome == "failed" and runtime.device == "cuda":
            _check_cuda()
        return LeaseResult(lease.number, outcome, self.last_event)

    def _watch(self) -> None:
        """Wait for leases to interrupt, while the main thread trains."""
        while True:
            try:
                self.interrupted = ray.get(self.broker.watch.remote(self.plan.group, self.interrupted))
            except ray.exceptions.RayError:
                self.broker_lost = True
                return


def _check_cuda() -> None:
    """Raise BrokenDevice if CUDA is in an error state, in which every later run of this process would fail, too."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise BrokenDevice(f"the CUDA device is in an error state: {error}") from error


def _store_problem(plan: GroupPlan) -> str | None:
    """Why this node cannot use the store; None if it can."""
    until = time.monotonic() + STORE_VISIBLE_TIMEOUT_S
    while not Path(plan.token).exists():
        if time.monotonic() > until:
            return (
                f"node {platform.node()} cannot see the store {plan.root}: "
                "use a folder that all nodes share, with --store or COPE_SWEEP_STORE"
            )
        time.sleep(0.2)
    return None


def _plugin_problem(plan: GroupPlan) -> str | None:
    """Import the plugins; why that failed, or None."""
    try:
        load_plugins(plan.plugins)
    except PluginError as error:
        return f"node {platform.node()}: {error}"
    return None


def _redirect_output(path: Path) -> None:
    """Append what this process prints, including crashes of native code, to a file that outlives the cluster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=2, all_threads=False)
