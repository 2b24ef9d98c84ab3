"""The interface of the executors, which train the runs of a plan, and what both executors share."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cope_sweep.errors import UserError
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event, RunFolder, Store

INTERRUPT_TIMEOUT_S = 15.0
"""Time that running runs have to write their checkpoints after they were asked to stop."""
FOREIGN_POLL_INTERVAL_S = 0.5
"""Time between two polls of a run that another process trains."""


class ClusterError(UserError):
    """The cluster cannot be used. The message names the address or the node, the reason, and what to do."""


class Executor(Protocol):
    """Trains every run that is not finished, in the given order, with `cope_sweep.train.train_run`.

    `on_event` is called from the calling thread. The call returns when every run is finished or failed, or after `stop`
    was set: then running runs write a checkpoint at their next step, and pending runs stay untouched. A failing run
    does not stop the others. A run that another process is training is deferred until the others are done; then the
    executor waits until it is finished, failed, or no longer locked. KeyboardInterrupt has the effect of `stop` and is
    raised again at the end. `plugins` are modules that have to be imported before a run can be trained.

    Raises:
        ClusterError: There is no cluster to train on, or it broke.
        ValueError: `resources` ask for a device that is not available.
    """

    def __call__(
        self,
        runs: Sequence[RunSpec],
        store: Store,
        resources: Resources,
        *,
        on_event: Callable[[Event], None],
        stop: threading.Event,
        plugins: Sequence[str] = (),
    ) -> None: ...


def unfinished(runs: Sequence[RunSpec], store: Store) -> list[RunSpec]:
    """The runs that are not finished, in order and without duplicates."""
    distinct = {run.run_id: run for run in runs}
    return [run for run_id, run in distinct.items() if store.run(run_id).status != "finished"]


def worker_id() -> str:
    """The id of this process, for people: `host:pid`."""
    return f"{platform.node()}:{os.getpid()}"


@dataclass
class ForeignRun:
    """A run that another process is training, observed through its folder."""

    folder: RunFolder
    seen_running: bool = False

    def poll(self) -> Literal["running", "ended", "free"]:
        """The state of the run: still running there, ended there, or free to be trained here."""
        status = self.folder.status
        if status == "running":
            self.seen_running = True
            return "running"
        # A failure is the other process's only if that process was seen training. Otherwise it is an old failure, and
        # the run is to be tried again.
        if status == "finished" or (status == "failed" and self.seen_running):
            return "ended"
        return "free"


def final_event(run: RunSpec, folder: RunFolder) -> Event:
    """The last event of a run that has ended, made from its folder."""
    state, result = folder.state, folder.result
    rows = folder.curve()
    return Event(
        run_id=run.run_id,
        status=folder.status,
        step=int(rows[-1]["step"]) if rows else 0,
        steps=run.train.steps,
        metrics=result["metrics"] if result else {},
        worker_id=state.get("worker_id", ""),
        message=None if result else state.get("message"),
    )
