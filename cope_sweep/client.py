"""A typed client of the REST service.

    from cope_sweep.client import Client

    with Client("http://127.0.0.1:8000") as client:
        sweep = client.submit(ablation="quickstart", set=["train.steps=100"])
        for progress in client.events(sweep.sweep_id):
            print(progress.counts)
        print(client.table("quickstart", "markdown").decode())

Importing this module imports neither torch nor ray nor sqlalchemy.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from cope_sweep.api import questions
from cope_sweep.api.answers import Checkpoint, PlanCost, RunSummary, SweepEntry, SweepProgress, SweepState
from cope_sweep.api.questions import API, ListRuns, Question
from cope_sweep.api.requests import PerplexityComparison, PerplexityRequest, ProbeRequest, ProbeResponse, SweepRequest
from cope_sweep.errors import UserError

__all__ = ["Client", "ConnectionFailed", "DownloadError", "RetryPolicy", "ServiceError"]

A = TypeVar("A")
M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

KEY_VARIABLE = "COPE_SWEEP_KEY"
PAGE = 1000
"""Runs or sweeps that are requested at a time."""
REPEATED_STATUSES = (429, 503)
NO_CLUSTER = "no_cluster"
"""The code of a 503 that waiting does not change."""
MAX_WAIT_S = 60.0
"""An error is raised at once if its Retry-After is longer than this."""
RECONNECT_S = 1.0
"""The wait before a stream of events that has ended early is opened again."""
SILENCE_S = 60.0
"""A stream of events without any data, not even a comment, for this time counts as broken."""


class ServiceError(UserError):
    """The service has answered with an error: its HTTP status, its kind, as `not_found`, and a sentence about it.

    The request may be repeated after `retry_after_s`, if the service has sent one.
    """

    def __init__(self, status: int, code: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{detail} ({status} {code})")
        self.status, self.code, self.detail, self.retry_after_s = status, code, detail, retry_after_s


class ConnectionFailed(UserError):
    """The service cannot be reached, or has closed the connection."""


class DownloadError(UserError):
    """A downloaded file is not the one that the service has announced."""


@dataclass(frozen=True)
class RetryPolicy:
    """The rule for repeating a request: after connection errors and the statuses 429 and 503."""

    retries: int = 4
    """The maximum number of repetitions."""
    first_wait_s: float = 0.5
    """Doubled for each further repetition, and shortened at random by up to a half."""

    def wait_s(self, error: ServiceError | ConnectionFailed, attempt: int) -> float | None:
        """The wait after the attempt with this number, from 0; None if the error is to be raised."""
        if attempt >= self.retries:
            return None
        wait_s = self.first_wait_s * 2**attempt * random.uniform(0.5, 1.0)
        if isinstance(error, ServiceError):
            if error.status not in REPEATED_STATUSES or error.code == NO_CLUSTER:
                return None
            wait_s = max(wait_s, error.retry_after_s or 0.0)
        return wait_s if wait_s <= MAX_WAIT_S else None


def _asks(question: type[Question[A]]) -> Callable[..., A]:
    """A method that asks a question: it has the parameters and the documentation of the question."""

    def method(client: Client, /, *values: Any, **named: Any) -> A:
        answer: A = client.ask(_constructed(question, values, named))
        return answer

    return _documented(method, question)


def _constructed(question: Any, values: Iterable[Any], named: Mapping[str, Any]) -> Any:
    """A question, which the service validates. Its first fields are those of the path."""
    in_path = path_names(question)
    names = [*in_path, *(each for each in question.model_fields if each not in in_path)]
    return question.model_construct(**dict(zip(names, values)), **named)  # noqa: B905 - some may be given


def path_names(question: type[Question[Any]]) -> list[str]:
    return re.findall(r"{(\w+)}", question.path)


def _lists(question: type[ListRuns]) -> Callable[..., Iterator[RunSummary]]:
    """A method that yields all runs of a list, whatever its `limit`: it requests page by page."""

    def method(client: Client, /, *values: Any, **named: Any) -> Iterator[RunSummary]:
        asked = _constructed(question, values, named).model_copy(update={"limit": PAGE})
        while True:
            page = client.ask(asked)
            yield from page.runs
            if page.next is None:
                return
            asked = asked.model_copy(update={"cursor": page.next, "offset": 0})

    return _documented(method, question)


def _with_fields_of(
    request: Callable[P, BaseModel],
) -> Callable[[Callable[..., A]], Callable[Concatenate[Client, P], A]]:
    """Gives a method with any keywords the parameters of a request, for type checkers and `help`."""
    return lambda method: _documented(method, request, method.__doc__)


def _documented(method: F, question: Callable[..., Any], doc: str | None = None) -> F:
    signature = inspect.signature(question)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    in_path = getattr(question, "path", "")
    parameters = sorted(signature.parameters.values(), key=lambda each: f"{{{each.name}}}" not in in_path)
    method.__signature__ = signature.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
    method.__doc__ = doc or question.__doc__
    return method


class Client:
    """A client of the service. All methods that send a request raise ServiceError and ConnectionFailed."""

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
            timeout_s: The limit for connecting, and between two parts of an answer.
            retry: How often requests are repeated.
            transport: Sends the requests; for tests.
            sleep: Called with each wait in seconds; for tests.

        Raises:
            UserError: `server` is not the address of a service.
        """
        url = server if "://" in server else f"http://{server}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{server!r} is not the address of a service, as http://127.0.0.1:8000 is")
        key = key or os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.server, self.retries, self._sleep = server, retry or RetryPolicy(), sleep
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- questions -----------------------------------------------------------------------------------------------

    def ask(self, question: Question[A]) -> A:
        """The answer to a question."""
        in_path = path_names(type(question))
        path = question.path.format_map({each: _quoted(getattr(question, each)) for each in in_path})
        given = question.model_dump(exclude={*in_path}, exclude_defaults=True, exclude_none=True, warnings=False)
        content: Any = self._send("GET", path, params=given).content
        answer: A = content if question.answer is bytes else TypeAdapter(question.answer).validate_json(content)
        return answer

    ablations = _asks(questions.ListAblations)
    ablation = _asks(questions.GetAblation)
    plan = _asks(questions.GetPlan)
    ablation_curves = _asks(questions.GetCurves)
    run_page = _asks(questions.ListRuns)
    runs = _lists(ListRuns)
    run = _asks(questions.GetRun)
    logs = _asks(questions.GetLog)
    diff = _asks(questions.GetDiff)
    table = _asks(questions.GetTable)
    report = _asks(questions.GetReport)
    figures = _asks(questions.ListFigures)
    figure = _asks(questions.GetFigure)
    export = _asks(questions.ExportRuns)
    sweep_page = _asks(questions.ListSweeps)
    sweep = _asks(questions.GetSweep)

    def sweeps(self, ablation: str | None = None) -> Iterator[SweepEntry]:
        """All sweeps, newest first."""
        count = 0
        while (page := self.sweep_page(ablation, PAGE, count)).sweeps:
            yield from page.sweeps
            count += len(page.sweeps)

    # -- runs ----------------------------------------------------------------------------------------------------

    def curve(self, run_id: str) -> list[dict[str, float]]:
        """The logged rows of a run, by step."""
        rows: list[dict[str, float]] = self._send("GET", f"/runs/{_quoted(run_id)}/curve").json()
        return rows

    def perplexity(self, request: PerplexityRequest | Mapping[str, Any]) -> PerplexityComparison:
        """The perplexity of token ids or texts under one or several models. The request is not repeated."""
        body = _body(PerplexityRequest, request)
        return self._answer(PerplexityComparison, "POST", "/perplexity", json=body, repeats=False)

    def probe(self, run_id: str, request: ProbeRequest | Mapping[str, Any]) -> ProbeResponse:
        """Gates, positions and attention of a run's model on a sequence. The request is not repeated."""
        body = _body(ProbeRequest, request)
        return self._answer(ProbeResponse, "POST", f"/runs/{_quoted(run_id)}/probe", json=body, repeats=False)

    def checkpoint(self, run_id: str) -> Checkpoint:
        """The files of a finished run's checkpoint, with their digests."""
        return self._answer(Checkpoint, "GET", f"/runs/{_quoted(run_id)}/checkpoint")

    def download_checkpoint(self, run_id: str, folder: str | Path) -> list[Path]:
        """Download all files of a checkpoint to a folder, and return their paths. Interrupted downloads are continued.

        Raises:
            DownloadError: A file does not have the announced digest.
            OSError: A file cannot be written.
        """
        files = self.checkpoint(run_id).files
        return [self.download(file.url, Path(folder, file.name), file.sha256, file.size_bytes) for file in files]

    def download(self, url: str, path: str | Path, sha256: str, size_bytes: int) -> Path:
        """Download a file of the service to a path, and return the path. An interrupted download is continued.

        The path holds either its former content or the whole file: the data is received in a file beside it, which
        replaces it after its digest was compared.

        Args:
            url: The address of the file, or its path on the service.
            path: Where the file is written.
            sha256: The digest of its content, in hexadecimal.
            size_bytes: Its size.

        Raises:
            DownloadError: The file does not have this digest.
            OSError: It cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name contains the digest, so a download of other content is not continued.
        partial = path.with_name(f".{path.name}.{sha256[:16]}.part")
        with partial.open("ab") as file:
            attempt = 0
            while (before := file.tell()) < size_bytes:
                try:
                    self._receive(url, file, size_bytes)
                except (ServiceError, ConnectionFailed) as error:
                    attempt = 0 if file.tell() > before else attempt
                    self._wait(error, attempt)
                    attempt += 1
                else:
                    if file.tell() < size_bytes:
                        raise DownloadError(f"{path}: the service has sent {file.tell():,} bytes only")
            file.flush()
            os.fsync(file.fileno())
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            partial.unlink(missing_ok=True)
            raise DownloadError(f"{path}: its SHA-256 is {digest}, and {sha256} was announced; download it again")
        partial.replace(path)
        return path

    def _receive(self, url: str, file: IO[bytes], size_bytes: int) -> None:
        """Append the rest of a file, or write it anew if the service sends the whole; stop after too many bytes."""
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={file.tell()}-"} if file.tell() else {})
        with self._stream("GET", url, headers=headers) as response:
            if response.status_code != 206:
                file.truncate(0)
                file.seek(0)
            for chunk in response.iter_bytes():
                file.write(chunk)
                if file.tell() > size_bytes:
                    return

    # -- sweeps --------------------------------------------------------------------------------------------------

    def execute(self, request: SweepRequest | Mapping[str, Any], idempotency_key: str | None = None) -> SweepState:
        """Submit a sweep. The request is repeated as a GET is: those with the same key mean the same sweep.

        Args:
            request: The ablation, and which of its runs to train.
            idempotency_key: None: a new key.
        """
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self._answer(SweepState, "POST", "/sweeps", json=_body(SweepRequest, request), headers=headers)

    @_with_fields_of(SweepRequest)
    def submit(self, *, idempotency_key: str | None = None, **values: Any) -> SweepState:
        """`execute` with the fields of a `SweepRequest`: `submit(ablation="quickstart", set=["train.steps=100"])`.

        `idempotency_key` is that of `execute`; type checkers know the fields of the request only.
        """
        return self.execute(values, idempotency_key)

    @_with_fields_of(SweepRequest)
    def preview(self, **values: Any) -> PlanCost:
        """The runs that `submit` with the same values would train, and their estimated cost. Nothing is started."""
        return self._answer(PlanCost, "POST", "/sweeps/preview", json=_body(SweepRequest, values))

    def stop(self, sweep_id: str) -> SweepState:
        """Request a sweep to end; its runs write checkpoints."""
        return self._answer(SweepState, "POST", f"/sweeps/{_quoted(sweep_id)}/stop")

    def retry(self, sweep_id: str) -> SweepState:
        """Train the runs again that a sweep has not finished. Returns the new sweep."""
        return self._answer(SweepState, "POST", f"/sweeps/{_quoted(sweep_id)}/retry")

    def events(self, sweep_id: str, last_id: str | None = None) -> Iterator[SweepProgress]:
        """The progress of a sweep up to its end, after the event `last_id`.

        After a lost connection, the events continue after the last one that was received.
        """
        path = f"{API}/sweeps/{_quoted(sweep_id)}/events"
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_S)
        attempt = 0
        while last_id != "end":
            headers = {"accept": "text/event-stream", "cache-control": "no-store"}
            headers |= {"last-event-id": last_id} if last_id else {}
            try:
                with self._stream("GET", path, headers=headers, timeout=timeout) as response:
                    for kind, data, event_id in server_events(response.iter_lines()):
                        attempt, last_id = 0, event_id or last_id
                        yield SweepProgress.model_validate_json(data)
                        if kind == "end":
                            return
            except (ServiceError, ConnectionFailed) as error:
                self._wait(error, attempt)
                attempt += 1
            else:
                self._sleep(RECONNECT_S)

    # -- requests ------------------------------------------------------------------------------------------------

    def _answer(self, kind: type[M], method: str, path: str, **options: Any) -> M:
        """The answer to a request, with the options of `_send`."""
        return kind.model_validate_json(self._send(method, path, **options).content)

    def _send(self, method: str, path: str, *, repeats: bool = True, **options: Any) -> httpx.Response:
        """The response to a request, which is repeated after some errors if `repeats` is true.

        `options` are those of `httpx.Client.stream`.
        """
        attempt = 0
        while True:
            try:
                with self._stream(method, API + path, **options) as response:
                    response.read()
                    return response
            except (ServiceError, ConnectionFailed) as error:
                if not repeats:
                    raise
                self._wait(error, attempt)
                attempt += 1

    @contextmanager
    def _stream(self, method: str, url: str, **options: Any) -> Iterator[httpx.Response]:
        """The response to a request, whose body was not read. `options` are those of `httpx.Client.stream`."""
        try:
            with self._http.stream(method, url, **options) as response:
                if not response.is_success:
                    response.read()
                    raise _service_error(response)
                yield response
        except httpx.TransportError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConnectionFailed(
                f"the service at {self.server} does not answer ({reason}); start one with `cope-sweep serve`"
            ) from error

    def _wait(self, error: ServiceError | ConnectionFailed, attempt: int) -> None:
        """Wait before the next attempt. Raises the error if there is none."""
        wait_s = self.retries.wait_s(error, attempt)
        if wait_s is None:
            raise error
        self._sleep(wait_s)


def _body(kind: type[BaseModel], request: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request. Raises UserError for values that it cannot have."""
    try:
        return kind.model_validate(request).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{place}: {first['msg']}" if place else first["msg"]) from error


def _quoted(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def _service_error(response: httpx.Response) -> ServiceError:
    """The error in a response whose body was read: problem details, or the text of another server."""
    try:
        body = response.json()
    except ValueError:
        body = None
    problem = body if isinstance(body, dict) else {}
    detail = problem.get("detail") or f"{response.url} answers {response.status_code} {response.reason_phrase}"
    code = problem.get("code") or response.reason_phrase.lower().replace(" ", "_")
    return ServiceError(response.status_code, str(code), str(detail), _retry_after_s(response))


def _retry_after_s(response: httpx.Response) -> float | None:
    """The seconds of a Retry-After header, which may be a number or a date."""
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def server_events(lines: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """Kind, data and id of the server-sent events in the lines of a stream. A service sends data as one line of ASCII.

    An event that is not complete is left out.
    """
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        if "data" in fields:
            yield fields.get("event", "message"), fields["data"], fields.get("id")
        fields = {}
