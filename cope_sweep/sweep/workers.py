"""A worker group: long-lived processes that train the sweep's runs one after another.

Starting a process and importing torch takes 10 to 26 s; leasing the next run takes one message. Each worker calls Ray
Train's `TorchTrainer.fit` in its own process (`num_workers=0`), so that no further processes stand beside it: Train's
controller and its helpers would take 1.3 GB for each group. Train connects the workers of a group by the variables of
torchrun. Rank 0 leases runs from the broker and broadcasts them to the other ranks, which train them data-parallel.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray

from cope_sweep.registry import PluginError, load_plugins
from cope_sweep.spec import Resources
from cope_sweep.store import Event, Store, StoreError
from cope_sweep.sweep.executor import worker_id
from cope_sweep.sweep.messages import Assignment, AssignmentResult, StopOrder

if TYPE_CHECKING:
    from cope_sweep.train import Runtime, StopRequest

LEASE_WAIT_S = 10.0
"""Rank 0 asks for a run again after this time, so that the other ranks' broadcast never times out."""
STORE_VISIBLE_TIMEOUT_S = 5.0
"""How long a shared disk may take to show a file to another node."""


class WorkerError(Exception):
    """An error that code in a worker raised. Any other error of a worker means that its process died."""


class BrokenDevice(Exception):
    """The process cannot train any more, so the group's workers have to be started again."""


@dataclass(frozen=True)
class GroupPlan:
    """What the workers of a group need to know."""

    broker: Any
    """The handle of the broker actor."""
    location: str
    """The store: its folder, or its URL."""
    token: str
    """The name of a file that the driver wrote to the store. A worker that sees it uses the same store."""
    sweep_id: str
    resources: Resources
    gpus: float
    """GPUs of each worker."""
    shape: int = 0
    """The number of these resources in the sweep."""
    plugins: tuple[str, ...] = ()
    """Modules to import before a run is received."""


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    node_id: str
    host: str
    """The node's address, which the other workers of the group can reach."""
    port: int
    """A free port there."""


@dataclass(frozen=True)
class WorkerEnd:
    """Why a worker ended."""

    problem: str | None = None
    """Why its node cannot train; None: it is not needed any more, or its node asked it to leave."""


class Worker:
    """One rank of a group, as a Ray actor."""

    def place(self) -> Place:
        """Where this worker runs."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Place(ray.get_runtime_context().get_node_id(), host, port)

    def train(self, group: int, rank: int, plan: GroupPlan, first: Place) -> WorkerEnd:
        """Train runs until there are no more. `first` is the place of rank 0.

        Raises:
            WorkerError: An error on this rank, after which the ranks of the group are no longer in step.
        """
        if problem := _store_problem(plan):
            return WorkerEnd(problem)
        _redirect_output(Store(plan.location).root / "logs" / plan.sweep_id / f"group-{group}-rank-{rank}.log")
        if problem := _plugin_problem(plan):
            return WorkerEnd(problem)
        try:
            runtime = _runtime(plan, rank)
        except Exception as error:
            return WorkerEnd(f"node {platform.node()}: {error}")
        try:
            with _preemptions() as preempted:
                _fit(_TrainingFunction(group, plan, runtime, preempted), plan, rank, first)
        except ray.exceptions.RayActorError:
            pass  # The broker died and the sweep has ended, which the driver reports. The runs have their checkpoints.
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error
        return WorkerEnd()


def _fit(function: _TrainingFunction, plan: GroupPlan, rank: int, first: Place) -> None:
    """Call `function` through Ray Train, in this process, as a rank of its group."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    if plan.resources.workers > 1:
        # A process sees only its own GPUs, so that each is the first on its node.
        ranks = {"RANK": rank, "WORLD_SIZE": plan.resources.workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update({"MASTER_ADDR": first.host, "MASTER_PORT": str(first.port)})
    TorchTrainer(function, scaling_config=ScalingConfig(num_workers=0, use_gpu=plan.gpus > 0)).fit()


class _TrainingFunction:
    """What every worker of a group executes: leases and trains runs until there are no more."""

    def __init__(self, group: int, plan: GroupPlan, runtime: Runtime, preempted: threading.Event) -> None:
        self.group, self.plan, self.runtime, self.preempted = group, plan, runtime, preempted
        self.broker = plan.broker
        self.store = Store(plan.location)
        self.order: StopOrder | None = None
        """The last order of the broker."""
        self.broker_lost = False
        self.last_event: Event | None = None

    def __call__(self) -> None:
        if self.runtime.rank == 0:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        result: AssignmentResult | None = None
        while (assignment := self._next(result)) is not None:
            result = self._train(assignment)

    def _next(self, result: AssignmentResult | None) -> Assignment | None:
        """End the last assignment with `result` and get the next one, which is the same on every rank."""
        while True:
            answer: Assignment | Literal["wait"] | None = None
            if self.runtime.rank == 0:
                leaves = self.preempted.is_set()
                answer = ray.get(self.broker.lease.remote(self.group, result, LEASE_WAIT_S, leaves, self.plan.shape))
                result = None
            if self.runtime.world_size > 1:
                import torch.distributed

                shared = [answer]
                torch.distributed.broadcast_object_list(shared, src=0)
                answer = shared[0]
            if answer != "wait":
                return answer

    def _train(self, assignment: Assignment) -> AssignmentResult:
        from cope_sweep.train import train_run

        def on_event(event: Event) -> None:
            # Only progress is sent here. The last event is part of the result, because an error in `train_run` may be
            # the effect of another rank's death.
            self.last_event = event
            if event.status == "running" and self.runtime.rank == 0:
                self.broker.report.remote(assignment.number, event)

        def should_stop() -> StopRequest | None:
            if self.order is not None and self.order.number == assignment.number:
                return self.order.request
            return "interrupted" if self.broker_lost or self.preempted.is_set() else None

        self.last_event = None
        outcome = train_run(
            assignment.run,
            self.store,
            self.runtime,
            attempt=assignment.attempt,
            parent_id=assignment.parent_id,
            on_event=on_event,
            should_stop=should_stop,
        )
        if outcome == "failed" and self.runtime.device == "cuda":
            _check_cuda()
        return AssignmentResult(assignment.number, outcome, self.last_event)

    def _watch(self) -> None:
        """Wait for the broker's orders, while the main thread trains."""
        while True:
            try:
                self.order = ray.get(self.broker.watch.remote(self.group, self.plan.shape))
            except ray.exceptions.RayError:
                self.broker_lost = True
                return


@contextlib.contextmanager
def _preemptions() -> Iterator[threading.Event]:
    """An event that SIGTERM sets: the node is taken away, or the process has to leave it."""
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda signum, frame: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def _runtime(plan: GroupPlan, rank: int) -> Runtime:
    """The runtime of this worker. Raises an exception if its device does not work."""
    import torch

    from cope_sweep.train import Runtime

    resources = plan.resources
    runtime = Runtime.of(resources, worker_id=worker_id(), rank=rank, world_size=resources.workers)
    if plan.gpus and runtime.device != "cuda" and resources.device != "cpu":
        raise RuntimeError("Ray gave this worker a GPU, but torch sees no CUDA device; look at nvidia-smi there")
    if runtime.device == "cuda":
        torch.ones(8, device="cuda").sum().item()
    return runtime


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
    while True:
        reason = ""
        try:
            if Store(plan.location).files.read(plan.token) is not None:
                return None
        except StoreError as error:
            reason = f" ({error})"
        if time.monotonic() > until:
            return (
                f"node {platform.node()} cannot see the store {plan.location}{reason}: "
                "use a folder that all nodes share or an object store, with --store or COPE_SWEEP_STORE"
            )
        time.sleep(0.2)


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
