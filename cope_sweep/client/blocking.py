"""The client that blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from cope_sweep.client import calls
from cope_sweep.client.calls import PAGE, Call
from cope_sweep.client.downloads import Download
from cope_sweep.client.errors import ConnectionFailed, DownloadError, ServiceError
from cope_sweep.client.events import RECONNECT_S, SILENCE_S, EventParser, LineBuffer
from cope_sweep.client.policy import RetryPolicy, connection_failed, service_error
from cope_sweep.queries.answers import RunSummary, SweepEntry, SweepProgress

P = ParamSpec("P")
T = TypeVar("T")


def _method(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method that sends a call."""

    @wraps(call)
    def send(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._send(call(*args, **kwargs))

    return send


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

    ablations = _method(calls.ablations)
    ablation = _method(calls.ablation)
    plan_status = _method(calls.plan_status)
    ablation_curves = _method(calls.ablation_curves)
    table = _method(calls.table)
    rendered_table = _method(calls.rendered_table)

    # -- runs ----------------------------------------------------------------------------------------------------

    run_page = _method(calls.run_page)
    run = _method(calls.run)
    curve = _method(calls.curve)
    logs = _method(calls.logs)
    difference = _method(calls.difference)
    perplexity = _method(calls.perplexity)
    checkpoint = _method(calls.checkpoint)

    def runs(self, filters: Sequence[str] = (), **query: Any) -> Iterator[RunSummary]:
        """All runs that match, page by page: the arguments of `run_page` but limit, offset and cursor."""
        page = self.run_page(filters, limit=PAGE, **query)
        yield from page.runs
        while page.next is not None:
            page = self.run_page(filters, limit=PAGE, cursor=page.next, **query)
            yield from page.runs

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

    sweep_page = _method(calls.sweep_page)
    sweep = _method(calls.sweep)
    submit = _method(calls.submit)
    stop = _method(calls.stop)
    retry = _method(calls.retry)

    def sweeps(self, ablation: str | None = None) -> Iterator[SweepEntry]:
        """All sweeps, newest first."""
        count = 0
        while (page := self.sweep_page(ablation, PAGE, count)).sweeps:
            yield from page.sweeps
            count += len(page.sweeps)

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

    def _send(self, call: Call[T]) -> T:
        """The answer of a request, which is repeated if it is a GET, or may be."""
        attempt = 0
        while True:
            try:
                return self._once(call)
            except (ServiceError, ConnectionFailed) as error:
                if call.method != "GET" and not call.repeats:
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
