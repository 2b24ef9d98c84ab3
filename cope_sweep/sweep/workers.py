"""A worker group: one long-lived Ray Train run, whose workers lease runs one after another instead of being torn down.

Starting processes and importing torch costs 10 to 26 s (a group for each run); going from run to run costs a message.
Rank 0 asks the broker, and tells the other ranks; several ranks train a run data-parallel.
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

from cope_sweep.record import Event, Ledger
from cope_sweep.spec import Resources
from cope_sweep.sweep.broker import Ended, Lease
from cope_sweep.sweep.executor import worker_id

if TYPE_CHECKING:
    from cope_sweep.train import Runtime

LEASE_WAIT_S = 10.0
"""A lease is asked for again after this long, so that the other ranks' wait for it never times out."""
SEE_STORE_S = 5.0
"""How long a shared disk may take to show another node what was written."""


class BrokenDevice(Exception):
    """No run can be trained in this process any more: Ray Train starts the group's workers anew."""


@dataclass(frozen=True)
class GroupPlan:
    """What every worker of a group is told."""

    group: int
    broker: Any
    """The broker's actor handle."""
    root: str
    """The store."""
    token: str
    """A file in the store that the driver wrote: who sees it shares the store."""
    logs: str
    """Where, in the store, the workers' output goes."""
    resources: Resources
    gpus: float
    """For each worker."""
    scratch: str
    """The driver's folder for what Ray Train itself wants to write."""


def train_group(plan: GroupPlan) -> None:
    """Run one worker group until the broker has nothing left to lease. Dead workers are replaced.

    Raises ray.train.TrainingFailedError where the group cannot be started.
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
        run_config=RunConfig(  # type: ignore[call-arg]  # its type is the old one, its class is not
            name=f"group-{plan.group}",
            storage_path=plan.scratch,
            # The broker counts each run's tries; a group itself is worth starting again as often as it takes.
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[_TellBroker(plan)],  # type: ignore[list-item]
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    ).fit()


class _TellBroker(UserCallback):
    """Runs in the group's controller, which is the first to know that a worker died."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        reason = "\n".join(f"rank {rank}: {error}" for rank, error in worker_exceptions.items())
        # By name, for Ray Train's classes for a worker that does not answer (any more) are internal.
        died = any(type(error).__name__.startswith("WorkerHealthCheck") for error in worker_exceptions.values())
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.plan.broker.lost.remote(self.plan.group, reason, died), timeout=10)


def _train_leases(config: dict[str, Any]) -> None:
    """What each worker runs: lease, train, lease, train, …"""
    plan: GroupPlan = config["plan"]
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    unseen = _unseen_store(plan)
    if unseen is None:
        _write_output_to(Path(plan.logs) / f"group-{plan.group}-rank-{rank}.log")
    try:
        _Worker(plan, rank, workers).train_all(unseen)
    except ray.exceptions.RayActorError:
        # The broker is gone, and with it the sweep: the driver says so. The runs have their checkpoints.
        return


class _Worker:
    """One rank of a group."""

    def __init__(self, plan: GroupPlan, rank: int, workers: int) -> None:
        self.plan, self.rank, self.workers = plan, rank, workers
        self.broker = plan.broker
        self.ledger = Ledger(plan.root)
        self.interrupted = 0
        """The latest lease that was to be interrupted."""
        self.orphaned = False
        self.last_event: Event | None = None

    def train_all(self, problem: str | None) -> None:
        runtime, unfit = self._runtime()
        problem = problem or unfit
        if self.rank == 0:
            ray.get(self.broker.hello.remote(self.plan.group, problem))
        if problem or runtime is None:
            return
        if self.rank == 0:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        ended: Ended | None = None
        while (lease := self._lease(ended)) is not None:
            ended = self._train(lease, runtime)

    def _runtime(self) -> tuple[Runtime | None, str | None]:
        """How this worker executes, or why it cannot."""
        from cope_sweep.train import Runtime

        try:
            runtime = Runtime.of(self.plan.resources, worker_id=worker_id(), rank=self.rank, world_size=self.workers)
        except ValueError as error:
            return None, f"node {platform.node()}: {error}"
        return runtime, None

    def _lease(self, ended: Ended | None) -> Lease | None:
        """Tell how the last lease ended, and get the next: the same on every rank."""
        while True:
            lease: Lease | Literal["wait"] | None = None
            if self.rank == 0:
                lease = ray.get(self.broker.lease.remote(self.plan.group, ended, LEASE_WAIT_S))
                ended = None
            if self.workers > 1:
                import torch.distributed

                word = [lease]
                torch.distributed.broadcast_object_list(word, src=0)
                lease = word[0]
            if lease != "wait":
                return lease

    def _train(self, lease: Lease, runtime: Runtime) -> Ended:
        from cope_sweep.train import train_run

        def on_event(event: Event) -> None:
            # The last event goes with the outcome: an error in `train_run` may have been another rank's death.
            self.last_event = event
            if event.status == "running" and self.rank == 0:
                self.broker.tell.remote(lease.number, event)

        self.last_event = None
        outcome = train_run(
            lease.run,
            self.ledger,
            runtime,
            on_event=on_event,
            should_stop=lambda: self.orphaned or self.interrupted >= lease.number,
        )
        if outcome == "failed" and runtime.device == "cuda":
            _check_cuda()
        return Ended(lease.number, outcome, self.last_event)

    def _watch(self) -> None:
        """Hear of leases to interrupt, while the main thread trains."""
        while True:
            try:
                self.interrupted = ray.get(self.broker.watch.remote(self.plan.group, self.interrupted))
            except ray.exceptions.RayError:
                self.orphaned = True
                return


def _check_cuda() -> None:
    """A device-side error spoils the process for every run after it: raises BrokenDevice then."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise BrokenDevice(f"the CUDA device is in error: {error}") from error


def _unseen_store(plan: GroupPlan) -> str | None:
    """Why this node cannot work on the store, or None."""
    until = time.monotonic() + SEE_STORE_S
    while not Path(plan.token).exists():
        if time.monotonic() > until:
            return (
                f"node {platform.node()} cannot see the store {plan.root}: "
                "use a folder that all nodes share, by --store or COPE_SWEEP_STORE"
            )
        time.sleep(0.2)
    return None


def _write_output_to(path: Path) -> None:
    """Send what this process prints, crashes in C included, to a file that survives the cluster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=2, all_threads=False)
