"""The interface of the executors, which train the runs of a plan: the local one, and the one on Ray."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cope_sweep.config import Resources, Row, RunSpec
from cope_sweep.config.ablation import EarlyStopping
from cope_sweep.errors import ClusterError
from cope_sweep.store import Event, Store
from cope_sweep.sweep.leases import Leases

if TYPE_CHECKING:
    from cope_sweep.sweep.search import Search

LOOK_INTERVAL_S = 1.0
"""Time between two looks at what does not report by itself: the cluster, the runs that other sweeps train, and an index
that did not answer."""
INTERRUPT_TIMEOUT_S = 15.0
"""Time that running runs have to write their checkpoints after they were asked to stop."""


class ClusterLost(ClusterError):
    """The cluster is gone in the middle of a sweep. Nothing has failed: the same command continues on another one."""

    default_code = "cluster_lost"
    exit_code = 130


@dataclass(frozen=True)
class Callbacks:
    """Functions that a sweep calls, from the thread of its caller where nothing else is said. They may raise."""

    on_event: Callable[[Event], None] = lambda event: None
    """Called with every event of a run."""
    on_note: Callable[[str], None] = lambda text: None
    """Called with what the user should know at once: nodes that are left out, say."""
    on_row: Callable[[Row], None] = lambda row: None
    """Called, from any thread, with each row that the search suggests, before its runs are leased.

    Where it raises IndexUnavailable, it is called again."""
    on_sending: Callable[[int, int], None] = lambda sent, total: None
    """Called at the end of the sweep with the number of runs and sweeps sent to MLflow, and the number to send."""


@dataclass(frozen=True)
class Workload:
    """The runs of a sweep for an executor, and how both talk to each other."""

    runs: Sequence[RunSpec]
    """The runs in order. Those that are finished are left out."""
    store: Store
    resources: Resources
    """What each run takes, and how many are trained at a time."""
    leases: Leases
    """The leases of the sweep."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to interrupt the sweep: running runs write a checkpoint at their next step, pending runs stay untouched."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """What to call while the runs are trained."""
    plugins: Sequence[str] = ()
    """Modules that have to be imported before a run can be trained."""
    schedule: EarlyStopping | None = None
    """The rule that ends runs early, where several are trained at a time; every setting is filled in."""
    max_failed_runs: int | None = None
    """After this number of failed runs no more are started, and those in training end."""
    search: Search | None = None
    """Suggests further rows, one after another, and learns their results."""

    @property
    def sweep_id(self) -> str:
        """The id of the sweep."""
        return self.leases.sweep_id


Executor = Callable[[Workload], None]
"""Trains every run that is not finished, with `cope_sweep.train.train_run`.

Each run is leased when it is handed to a process that trains. One that another sweep trains is left to that sweep; the
executor waits until it has ended there, and trains the run itself if the other sweep gave it up. The call returns when
every run has ended, or after `stop` was set. A failing run does not stop the others. KeyboardInterrupt has the effect
of `stop` and is raised again at the end.

Raises:
    ClusterError: There is no cluster to train on, or none of it can train any more.
    PluginError: A plugin cannot be imported.
    ValueError: `resources` ask for a device that is not available.
    Exception: Whatever a callback raises.
"""


def worker_id() -> str:
    """The id of this process, for people: `host:pid`."""
    return f"{platform.node()}:{os.getpid()}"
