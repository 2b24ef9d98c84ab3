"""Prometheus metrics of an application, and its access log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from fastapi.routing import iter_route_contexts
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cope_services.http.store_metrics import StoreMetrics
from cope_services.models.predictors import Predictors
from cope_sweep.store import Store

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
UNKNOWN = "unknown"
"""The route of paths that do not exist, and the method of words that are none: clients cannot add labels."""

ACCESS = logging.getLogger("cope_services.access")


class Metrics:
    """The metrics of one application. Each has a registry of its own, so that a process may have several."""

    def __init__(self, predictors: Predictors, store: Callable[[], Store]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        labels = ("method", "route")
        self.requests = Counter(
            "cope_http_requests", "Requests by method, route and status.", (*labels, "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "cope_http_request_duration_seconds",
            "Time until the response begins.",
            labels,
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.active = Gauge("cope_http_requests_active", "Requests that are being answered.", registry=self.registry)
        self.registry.register(_Inference(predictors))
        self.registry.register(StoreMetrics(store))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)


class _Inference(Collector):
    """Numbers of the batcher and the models in memory, read when the metrics are asked for."""

    def __init__(self, predictors: Predictors) -> None:
        self.predictors = predictors

    def collect(self) -> Iterator[Metric]:
        queue, models = self.predictors.batcher.stats(), self.predictors.stats()
        for name, text, value in (
            ("inference_requests", "Requests that ask a model and are answered or wait.", queue.requests),
            ("inference_queued_tokens", "Tokens of the accepted requests.", queue.queued_tokens),
            ("inference_waiting", "Windows and generations that wait.", queue.waiting),
            ("inference_running", "Batches that are being computed.", queue.running),
            ("inference_cache_bytes", "Keys and values of generations in memory.", queue.cache_bytes),
            ("models", "Models in memory.", models.models),
            ("models_bytes", "Weights of the models in memory.", models.model_bytes),
        ):
            yield GaugeMetricFamily(f"cope_{name}", text, value)
        for name, text, value in (
            ("inference_refused", "Requests that were refused because the queue was full.", queue.refused),
            ("inference_scored_tokens", "Tokens that models read in batches, without padding.", queue.scored_tokens),
            ("inference_padding_tokens", "Padding in batches.", queue.padding_tokens),
            ("inference_generated_tokens", "Tokens that models generated.", queue.generated_tokens),
            ("models_hits", "Times that a model was asked for and in memory.", models.hits),
            ("models_loads", "Models that were read from files.", models.loads),
        ):
            yield CounterMetricFamily(f"cope_{name}", text, value)
        yield HistogramMetricFamily(
            "cope_inference_batch_windows",
            "Windows of a batch.",
            buckets=[*cumulative(queue.batch_sizes), ("+Inf", queue.batches)],
            sum_value=queue.windows,
        )

    def describe(self) -> Iterable[Metric]:
        return self.collect()


def cumulative(sizes: Iterable[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """The buckets of a histogram: each counts what is not larger than its bound.

    `sizes` has the bound of each class and the number in it alone. The last class has what is larger, too, so its
    number is that of all, without a bound.
    """
    *bounded, _ = sizes
    total = 0
    for bound, count in bounded:
        total += count
        yield str(bound), total


class Measurement:
    """ASGI middleware that counts and times requests, and logs a line for each of them if `log`.

    A line has neither headers nor the query, which may hold secrets.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: list[BaseRoute], *, log: bool) -> None:
        self.app = app
        self.metrics = metrics
        self.log = log
        self._routes = routes
        self._templates: dict[object, str] = {}
        self._children: dict[tuple[str, str], Histogram] = {}
        self._counters: dict[tuple[str, str, int], Counter] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started_s = time.perf_counter()
        status, answered_s = 499, None  # a client that leaves before its response

        async def watched_send(message: Message) -> None:
            nonlocal status, answered_s
            if message["type"] == "http.response.start":
                status, answered_s = message["status"], time.perf_counter()
            await send(message)

        self.metrics.active.inc()
        try:
            await self.app(scope, receive, watched_send)
        except Exception:
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
        if (histogram := self._children.get(key)) is None:
            histogram = self._children[key] = self.metrics.seconds.labels(*key)
        histogram.observe(seconds)
        if (counter := self._counters.get((*key, status))) is None:
            counter = self._counters[*key, status] = self.metrics.requests.labels(*key, str(status))
        counter.inc()

    def route(self, scope: Scope) -> str:
        """The template of the request's route, as `/api/v1/runs/{run_id}`."""
        if not self._templates:
            for context in iter_route_contexts(self._routes):
                handler = context.route.app if isinstance(context.route, Mount) else context.endpoint
                self._templates[handler] = context.path or ""
        return self._templates.get(scope.get("endpoint"), UNKNOWN)

    def _write_line(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope["client"][0] if scope.get("client") else "-"
        # As it was sent: a decoded path could contain line breaks.
        path = scope.get("raw_path", b"").decode("latin-1")
        ACCESS.info('%s "%s %s" %d %.1f ms', client, scope["method"], path, status, seconds * 1000)
