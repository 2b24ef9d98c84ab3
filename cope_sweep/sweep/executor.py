"""What executes a plan's runs: the contract of both twins, and what they share."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cope_sweep.errors import UserError
from cope_sweep.record import Event, Ledger, RunFolder
from cope_sweep.spec import Resources, RunSpec

INTERRUPT_S = 15.0
"""Seconds that running runs get to write their checkpoint once they are asked to stop and nobody waits any longer."""


class ClusterError(UserError):
    """The cluster cannot do it; the message names the address or the node, why, and the way out."""


class Executor(Protocol):
    """Executes every run that is not finished, in the given order, each as `cope_sweep.train.train_run` does.

    `on_event` is called from the calling thread. The call returns when every run is finished or failed, or when `stop`
    is set: then running runs write a resumable checkpoint at their next step, and pending ones stay untouched. One
    run's failure never stops the others. A run that another living process trains is come back to after the others,
    until it is finished, failed, or free. KeyboardInterrupt does what `stop` does, and is raised again at the end.

    Raises ClusterError where there is nothing to execute on, any more; ValueError where `resources` name a device that
    is not there.
    """

    def __call__(
        self,
        runs: Sequence[RunSpec],
        ledger: Ledger,
        resources: Resources,
        *,
        on_event: Callable[[Event], None],
        stop: threading.Event,
    ) -> None: ...


def unfinished(runs: Sequence[RunSpec], ledger: Ledger) -> list[RunSpec]:
    """The runs to execute, in order, each once."""
    distinct = {run.run_id: run for run in runs}
    return [run for run_id, run in distinct.items() if ledger.run(run_id).status != "finished"]


def worker_id() -> str:
    """Where this process runs, for people: `host:pid`."""
    return f"{platform.node()}:{os.getpid()}"


@dataclass
class Elsewhere:
    """A run that another living process trains, as far as its folder shows."""

    folder: RunFolder
    seen_running: bool = False

    def look(self) -> Literal["running", "over", "free"]:
        """Whether it trains on there, came to an end there, or is ours to train."""
        status = self.folder.status
        if status == "running":
            self.seen_running = True
            return "running"
        # A failure counts as the other's only if it was seen at work: else it is the state that we were to try again.
        if status == "finished" or (status == "failed" and self.seen_running):
            return "over"
        return "free"


def event_of(run: RunSpec, folder: RunFolder) -> Event:
    """What the folder of a run that is over says, as an event."""
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
