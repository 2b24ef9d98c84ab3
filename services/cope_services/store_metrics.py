"""Prometheus metrics of the store: its runs and sweeps, what MLflow lacks, and the disk of its folder.

They are read from the index, so that they are the same whoever trains: a Ray cluster, several, or `--local`. No label
has the id of a run or sweep, and what a scrape costs does not depend on what was trained where.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cope_sweep.store import Status, Store, StoreError
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.index.summaries import Activity, activity
from cope_sweep.store.leases import LEASE_S
from cope_sweep.tracking.uri import resolve_uri, tracker_key

READ_EVERY_S = 5.0
"""Scrapes within this time share their numbers: however often somebody asks, the index is not asked more often."""
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class _Numbers:
    activity: Activity
    mlflow_backlog: int | None
    """None where MLflow is not used."""


class StoreMetrics(Collector):
    """The metrics of a store."""

    def __init__(self, store: Callable[[], Store], clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.clock = store, clock
        self._lock = threading.Lock()
        self._read_s = -READ_EVERY_S
        self._numbers: _Numbers | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry does not ask the index when the service starts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        numbers = self._read()
        yield GaugeMetricFamily("cope_index_up", "Whether the index answers.", int(numbers is not None))
        if numbers is not None:
            yield from _activity_metrics(numbers.activity)
            if numbers.mlflow_backlog is not None:
                text = "Runs and sweeps that have ended, and that MLflow does not have."
                yield GaugeMetricFamily("cope_mlflow_backlog", text, numbers.mlflow_backlog)
        yield from _disk_metrics(self.store())

    def _read(self) -> _Numbers | None:
        """The numbers; None where the index does not answer."""
        with self._lock:
            if self.clock() - self._read_s >= READ_EVERY_S:
                try:
                    store = self.store()
                    self._numbers = _Numbers(activity(store.index), _mlflow_backlog(store))
                except StoreError:
                    self._numbers = None
                self._read_s = self.clock()
            return self._numbers


def _mlflow_backlog(store: Store) -> int | None:
    """Number of runs and sweeps that this environment's MLflow lacks; None if that is a file which nobody uses."""
    uri = resolve_uri(store)
    mirrored = Mirrored(store.index, tracker_key(store, uri))
    if uri.startswith("sqlite:") and mirrored.newest_tracked_id() is None:
        return None
    return mirrored.count()


def _activity_metrics(found: Activity) -> Iterator[Metric]:
    for name, text, counts in (
        ("cope_runs", "Runs that were begun, by status.", found.runs),
        ("cope_sweeps", "Sweeps by status; pending ones wait for the cluster.", found.sweeps),
    ):
        family = GaugeMetricFamily(name, text, labels=["status"])
        for status in STATUSES:
            family.add_metric([status], counts.get(status, 0))
        yield family
    age_s = 0.0 if found.shortest_lease_s is None else max(0.0, LEASE_S - found.shortest_lease_s)
    for name, text, value in (
        ("cope_runs_waiting", "Runs of running sweeps that were not begun yet.", found.waiting),
        ("cope_runs_steps", "Training steps of all runs.", found.steps),
        ("cope_heartbeat_age_seconds", "Time since the sweep that is silent longest was heard of.", age_s),
        ("cope_nodes_left_out", "Nodes that running sweeps have left out: they cannot train.", found.left_out),
    ):
        yield GaugeMetricFamily(name, text, value)


def _disk_metrics(store: Store) -> Iterator[Metric]:
    """The disk of the store's folder; of an object store, that of its working folder on this machine."""
    folder = store.root.absolute()
    usage = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists()))
    yield GaugeMetricFamily("cope_disk_free_bytes", "Free space of the disk of the store's folder.", usage.free)
    yield GaugeMetricFamily("cope_disk_size_bytes", "Size of the disk of the store's folder.", usage.total)
