"""Prometheus metrics of an application and its store, and the access log."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from fastapi.routing import iter_route_contexts
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cope_services.http.components import Components
from cope_services.http.work import WorkQueue, WorkQueues
from cope_services.models.batching import BATCH_SIZES
from cope_services.models.predictors import Predictors
from cope_sweep.store import STATUSES, Store, StoreError
from cope_sweep.store.index import Activity
from cope_sweep.sweep.leases import LEASE_S

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
UNKNOWN = "unknown"
"""Label for paths and methods that do not exist, so that clients cannot add labels."""

ACCESS = logging.getLogger("cope_services.access")


class AppMetrics:
    """The metrics of one application. It has its own registry, so that a process may run several applications."""

    def __init__(self, components: Components, store: Callable[[], Store]) -> None:
        predictors, work = components.predictors, components.work
        self.registry = CollectorRegistry(auto_describe=True)
        labels = ("method", "route")
        self.requests = Counter(
            "cope_http_requests", "Requests by method, route and status.", (*labels, "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "cope_http_request_duration_seconds",
            "Time until the response starts.",
            labels,
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.active = Gauge("cope_http_requests_active", "Requests that are being answered.", registry=self.registry)
        self.registry.register(_InferenceMetrics(predictors, work["models"]))
        self.registry.register(_WorkMetrics(work))
        self.registry.register(StoreMetrics(store))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)


class _InferenceMetrics(Collector):
    """The metrics of the batcher and of the models in memory, read at each scrape.

    The event loop writes these numbers. Reading one is atomic, so no lock is needed.
    """

    def __init__(self, predictors: Predictors, requests: WorkQueue) -> None:
        self.predictors, self.requests = predictors, requests

    def collect(self) -> Iterator[Metric]:
        models, queue = self.predictors, self.predictors.batcher
        counts = queue.counts
        refused = counts.refused + self.requests.refused
        for name, text, value in (
            ("inference_requests", "Requests to models that wait or are being answered.", self.requests.running),
            ("inference_queued_tokens", "Tokens of the accepted requests.", queue.queued_tokens),
            ("inference_waiting", "Windows that wait.", queue.waiting),
            ("inference_running", "Batches, generations and probes that are being computed.", queue.running),
            ("models", "Models in memory.", len(models.models)),
            ("models_bytes", "Weights of the models in memory.", int(models.models.currsize)),
        ):
            yield GaugeMetricFamily(f"cope_{name}", text, value)
        for name, text, value in (
            ("inference_refused", "Requests that were refused because the queue was full.", refused),
            ("inference_scored_tokens", "Tokens that models read in batches, without padding.", counts.scored_tokens),
            ("inference_padding_tokens", "Padding in batches.", counts.padding_tokens),
            ("inference_generated_tokens", "Tokens that models generated.", counts.generated_tokens),
            ("models_hits", "Requests for a model that was in memory.", models.requested - models.loads),
            ("models_loads", "Models read from files.", models.loads),
        ):
            yield CounterMetricFamily(f"cope_{name}", text, value)
        totals = accumulate(counts.sizes)
        yield HistogramMetricFamily(
            "cope_inference_batch_windows",
            "Windows of a batch.",
            buckets=[(str(bound), total) for bound, total in zip((*BATCH_SIZES, "+Inf"), totals, strict=True)],
            sum_value=counts.windows,
        )


class _WorkMetrics(Collector):
    def __init__(self, queues: WorkQueues) -> None:
        self.queues = queues

    def collect(self) -> Iterator[Metric]:
        for kind, name, text in (
            (GaugeMetricFamily, "running", "Requests that have a slot, by kind of work."),
            (GaugeMetricFamily, "waiting", "Requests that wait for a slot, by kind of work."),
            (CounterMetricFamily, "refused", "Requests that were answered with 429, by kind of work."),
        ):
            family = kind(f"cope_work_{name}", text, labels=["work"])
            for work, queue in self.queues.items():
                family.add_metric([work], getattr(queue, name))
            yield family


class Measurement:
    """ASGI middleware that counts and times requests, and with `log` writes a line for each.

    A line has neither headers nor the query, which may contain secrets.
    """

    def __init__(self, app: ASGIApp, metrics: AppMetrics, routes: list[BaseRoute], *, log: bool) -> None:
        self.app = app
        self.metrics = metrics
        self.log = log
        self._routes = routes
        self._templates: dict[tuple[object, ...], str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started_s = time.perf_counter()
        status, answered_s = 499, None  # 499: the client leaves before the response

        async def watched_send(message: Message) -> None:
            nonlocal status, answered_s
            if message["type"] == "http.response.start":
                status, answered_s = message["status"], time.perf_counter()
            await send(message)

        self.metrics.active.inc()
        try:
            await self.app(scope, receive, watched_send)
        except Exception:
            # A response that has started keeps its status.
            status = status if answered_s else 500
            raise
        finally:
            self.metrics.active.dec()
            ended_s = time.perf_counter()
            self._count(scope, status, (answered_s or ended_s) - started_s)
            if self.log:
                self._write_line(scope, status, ended_s - started_s)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else UNKNOWN
        key = method, self.route(scope)
        self.metrics.seconds.labels(*key).observe(seconds)
        self.metrics.requests.labels(*key, str(status)).inc()

    def route(self, scope: Scope) -> str:
        """The template of the request's route, such as `/api/v1/runs/{run_id}`."""
        if not self._templates:
            for context in iter_route_contexts(self._routes):
                handler = context.route.app if isinstance(context.route, Mount) else context.endpoint
                path = context.path or ""
                # One function may answer two paths with different parameters.
                self._templates[handler, *re.findall(r"{(\w+)", path)] = path
        return self._templates.get((scope.get("endpoint"), *scope.get("path_params", ())), UNKNOWN)

    def _write_line(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope["client"][0] if scope.get("client") else "-"
        # The raw path: a decoded path could contain line breaks.
        path = scope.get("raw_path", b"").decode("latin-1")
        ACCESS.info('%s "%s %s" %d %.1f ms', client, scope["method"], path, status, seconds * 1000)


# -- the store: its runs and sweeps, and the disk of its folder -------------------------------------

READ_EVERY_S = 5.0
"""Scrapes within this time share one read of the index."""


class StoreMetrics(Collector):
    """The metrics of a store.

    They come from the index, so they do not depend on where runs are trained: on one Ray cluster, on several, or with
    `--local`. Labels contain no ids of runs or sweeps, so the cost of a scrape does not grow with their number.
    """

    def __init__(self, store: Callable[[], Store], clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.clock = store, clock
        self._lock = threading.Lock()
        # Whatever the clock starts with, the first scrape reads.
        self._read_s = -READ_EVERY_S
        self._activity: Activity | None = None

    def describe(self) -> Iterable[Metric]:
        """Empty, so that the registry does not read the index when the service starts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        activity = self._read()
        yield GaugeMetricFamily("cope_index_up", "Whether the index answers.", int(activity is not None))
        if activity is not None:
            yield from _activity_metrics(activity)
        yield from _disk_metrics(self.store())

    def _read(self) -> Activity | None:
        """The state of runs and sweeps; None if the index does not answer."""
        # Of scrapes at the same time, one reads the index.
        with self._lock:
            if self.clock() - self._read_s >= READ_EVERY_S:
                try:
                    self._activity = self.store().index.activity()
                except StoreError:
                    self._activity = None
                self._read_s = self.clock()
            return self._activity


def _activity_metrics(activity: Activity) -> Iterator[Metric]:
    for name, text, counts in (
        ("cope_runs", "Runs by status; a leased one that waits for its worker is pending.", activity.runs),
        ("cope_sweeps", "Sweeps by status; pending ones wait for the cluster.", activity.sweeps),
    ):
        family = GaugeMetricFamily(name, text, labels=["status"])
        for status in STATUSES:
            family.add_metric([status], counts.get(status, 0))
        yield family
    age_s = 0.0 if activity.shortest_lease_s is None else max(0.0, LEASE_S - activity.shortest_lease_s)
    for name, text, value in (
        ("cope_runs_waiting", "Runs of running sweeps that have not started.", activity.waiting),
        ("cope_runs_steps", "Training steps of all runs.", activity.steps),
        ("cope_heartbeat_age_seconds", "Longest time since a running sweep renewed its lease.", age_s),
        ("cope_nodes_left_out", "Nodes that running sweeps do not use because they cannot train.", activity.left_out),
    ):
        yield GaugeMetricFamily(name, text, value)


def _disk_metrics(store: Store) -> Iterator[Metric]:
    """The disk of the store's folder; for an object store, of its working folder on this machine."""
    folder = store.root.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    yield GaugeMetricFamily("cope_disk_free_bytes", "Free space of the disk of the store's folder.", usage.free)
    yield GaugeMetricFamily("cope_disk_size_bytes", "Size of the disk of the store's folder.", usage.total)
