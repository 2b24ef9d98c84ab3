"""The client that blocks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from cope_sweep.client import calls
from cope_sweep.client.calls import PAGE, Call
from cope_sweep.client.downloads import Download
from cope_sweep.client.errors import ConnectionFailed, DownloadError, ServiceError
from cope_sweep.client.events import RECONNECT_S, SILENCE_S, EventParser, LineBuffer
from cope_sweep.client.policy import RetryPolicy, connection_failed, service_error
from cope_sweep.queries.answers import (
    AblationDetail,
    AblationSummary,
    Checkpoint,
    Curves,
    PlanStatus,
    RunDetail,
    RunLog,
    RunPage,
    RunsDifference,
    RunSummary,
    SweepDetail,
    SweepEntry,
    SweepPage,
    SweepProgress,
    SweepState,
)

T = TypeVar("T")


class Client:
    """Asks the service. All methods raise ServiceError and ConnectionFailed."""

    def __init__(
        self,
        server: str = "http://127.0.0.1:8000",
        *,
        key: str | None = None,
        timeout_s: float = 60.0,
        retry: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a client; nothing is sent.

        Args:
            server: The address of the service.
            key: Its API key; None: that of COPE_SWEEP_KEY, if there is one.
            timeout_s: For the service to accept a request, and between two parts of its answer.
            retry: How often GET requests are repeated.
            transport: What sends requests, for tests.
            sleep: What waits, for tests.
        """
        self.server, self.retries, self._sleep = server, retry or RetryPolicy(), sleep
        self._http = httpx.Client(**calls.options(server, key, timeout_s), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- ablations -----------------------------------------------------------------------------------------------

    def ablations(self) -> list[AblationSummary]:
        """All ablations by name."""
        return self._send(calls.ablations())

    def ablation(self, name: str, scale: str | None = None) -> AblationDetail:
        """One ablation with its plan."""
        return self._send(calls.ablation(name, scale))

    def plan_status(self, name: str, scale: str | None = None) -> PlanStatus:
        """Each run of an ablation, in the order of its plan, and how far it is."""
        return self._send(calls.plan_status(name, scale))

    def ablation_curves(self, name: str, metric: str | None = None, scale: str | None = None) -> Curves:
        """A metric of every run of an ablation."""
        return self._send(calls.ablation_curves(name, metric, scale))

    def table(self, name: str, scale: str | None = None, compare: str | None = None) -> dict[str, Any]:
        """The table of an ablation."""
        found: dict[str, Any] = json.loads(self.rendered_table(name, "json", scale, compare))
        return found

    def rendered_table(
        self,
        name: str,
        output_format: str,
        scale: str | None = None,
        compare: str | None = None,
        *,
        runs: bool = False,
    ) -> bytes:
        """The table in a format: markdown, latex, csv, parquet, html or json; with `runs`, a line for each run."""
        return self._send(calls.table(name, output_format, scale, compare, runs))

    # -- runs ----------------------------------------------------------------------------------------------------

    def run_page(
        self,
        filters: Sequence[str] = (),
        *,
        statuses: Sequence[str] = (),
        sweep: str | None = None,
        ablation: str | None = None,
        scale: str | None = None,
        sort: str | None = None,
        descending: bool = False,
        limit: int = 100,
        offset: int = 0,
        cursor: str | None = None,
    ) -> RunPage:
        """A page of runs. Filters are texts, as `model.layers>=4`; all have to hold."""
        call = calls.run_page(
            filters, statuses, sweep, ablation, scale, sort, descending, limit, offset, cursor
        )  # fmt: skip
        return self._send(call)

    def runs(self, filters: Sequence[str] = (), **query: Any) -> Iterator[RunSummary]:
        """All runs that match, page by page: the arguments of `run_page` but limit, offset and cursor."""
        page = self.run_page(filters, limit=PAGE, **query)
        yield from page.runs
        while page.next is not None:
            page = self.run_page(filters, limit=PAGE, cursor=page.next, **query)
            yield from page.runs

    def run(self, run_id: str, *, curve: bool = True) -> RunDetail:
        """One run; with `curve`, its logged rows."""
        return self._send(calls.run(run_id, curve))

    def curve(self, run_id: str) -> list[dict[str, float]]:
        """The logged rows of a run, by step."""
        return self._send(calls.curve(run_id))

    def logs(self, run_id: str, tail: int = 200) -> RunLog:
        """The end of a run's log."""
        return self._send(calls.logs(run_id, tail))

    def difference(self, left: str, right: str) -> RunsDifference:
        """What differs between two runs or two sweeps."""
        return self._send(calls.difference(left, right))

    def perplexity(self, run_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The perplexity of token ids or texts under a run's model; the body of the service's request."""
        return self._send(calls.perplexity(run_id, body))

    def checkpoint(self, run_id: str) -> Checkpoint:
        """The files of a finished run's checkpoint, with their digests."""
        return self._send(calls.checkpoint(run_id))

    def download_checkpoint(self, run_id: str, folder: Path) -> list[Path]:
        """Download all files of a checkpoint to a folder. What was downloaded before is continued. Raises OSError.

        Raises:
            DownloadError: A file has not the announced digest.
        """
        files = self.checkpoint(run_id).files
        return [self.download(file.url, folder / file.name, file.sha256, file.size_bytes) for file in files]

    def download(self, url: str, path: Path, sha256: str, size_bytes: int) -> Path:
        """Download a file of the service, check its digest, and put it in its place. Raises DownloadError, OSError."""
        with Download(path, sha256, size_bytes) as target:
            attempt = 0
            while not target.is_complete:
                before = target.received_bytes
                try:
                    self._receive(url, target)
                except (ServiceError, ConnectionFailed) as error:
                    attempt = 0 if target.received_bytes > before else attempt
                    self._wait(error, attempt)
                    attempt += 1
            return target.finish()

    def _receive(self, url: str, target: Download) -> None:
        try:
            with self._http.stream("GET", url, headers=target.headers) as response:
                if not response.is_success:
                    response.read()
                    raise service_error(response)
                target.start(response.status_code)
                for chunk in response.iter_bytes():
                    target.write(chunk)
        except httpx.TransportError as error:
            raise connection_failed(self.server, error) from error
        if not target.is_complete:
            raise DownloadError(f"{target.path}: the service has sent {target.received_bytes:,} bytes only")

    # -- sweeps --------------------------------------------------------------------------------------------------

    def sweep_page(self, ablation: str | None = None, limit: int = 100, offset: int = 0) -> SweepPage:
        """A page of sweeps, newest first."""
        return self._send(calls.sweep_page(ablation, limit, offset))

    def sweeps(self, ablation: str | None = None) -> Iterator[SweepEntry]:
        """All sweeps, newest first."""
        count = 0
        while (page := self.sweep_page(ablation, PAGE, count)).sweeps:
            yield from page.sweeps
            count += len(page.sweeps)

    def sweep(self, sweep_id: str) -> SweepDetail:
        """One sweep with its runs."""
        return self._send(calls.sweep(sweep_id))

    def submit(self, *, idempotency_key: str | None = None, **body: Any) -> SweepState:
        """Submit a sweep: `ablation`, or `name` and `spec`; `scale`, `set`, `only`, `max_runs`, ….

        The request is repeated as a GET is, under a key of its own, so that no second sweep is made.
        """
        return self._send(calls.submit(body, idempotency_key or uuid.uuid4().hex), repeat=True)

    def stop(self, sweep_id: str) -> SweepState:
        """Ask a sweep to end; its runs write checkpoints."""
        return self._send(calls.stop(sweep_id), repeat=True)

    def retry(self, sweep_id: str) -> SweepState:
        """Train again what a sweep has not finished; the sweep that does it."""
        return self._send(calls.retry(sweep_id), repeat=True)

    def events(self, sweep_id: str, last_id: str | None = None) -> Iterator[SweepProgress]:
        """The progress of a sweep up to its end. A broken connection is opened again, after the last event."""
        parser, attempt = EventParser(last_id), 0
        while True:
            try:
                for line in self._lines(sweep_id, parser):
                    if (event := parser.feed(line)) is not None:
                        attempt = 0
                        yield SweepProgress.model_validate_json(event.data)
                        if event.kind == "end":
                            return
                if parser.last_id == "end":
                    return
            except (ServiceError, ConnectionFailed) as error:
                self._wait(error, attempt)
                attempt += 1
            else:
                self._sleep(RECONNECT_S)
            parser.restart()

    def _lines(self, sweep_id: str, parser: EventParser) -> Iterator[str]:
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_S)
        try:
            with self._http.stream(
                "GET", calls.events_path(sweep_id), headers=parser.headers, timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                    raise service_error(response)
                lines = LineBuffer()
                for text in response.iter_text():
                    yield from lines.feed(text)
        except httpx.TransportError as error:
            raise connection_failed(self.server, error) from error

    # -- internals -----------------------------------------------------------------------------------------------

    def _send(self, call: Call[T], *, repeat: bool = False) -> T:
        """The answer of a request, which is repeated if it is a GET, or with `repeat`."""
        attempt = 0
        while True:
            try:
                return self._once(call)
            except (ServiceError, ConnectionFailed) as error:
                if call.method != "GET" and not repeat:
                    raise
                self._wait(error, attempt)
                attempt += 1

    def _once(self, call: Call[T]) -> T:
        try:
            response = self._http.request(**call.request)
        except httpx.TransportError as error:
            raise connection_failed(self.server, error) from error
        if not response.is_success:
            raise service_error(response)
        return call.read(response)

    def _wait(self, error: ServiceError | ConnectionFailed, attempt: int) -> None:
        """Wait before the next attempt; raise the error where there is none."""
        wait_s = self.retries.wait_s(error, attempt)
        if wait_s is None:
            raise error
        self._sleep(wait_s)
