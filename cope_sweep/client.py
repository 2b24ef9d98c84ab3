"""A client of the REST service, for scripts and notebooks.

    from cope_sweep.client import Client

    with Client("http://127.0.0.1:8000") as client:
        print(client.table("quickstart"))
        client.runs(["model.layers>=1"], status=["finished"])  # pandas: one line per run, a column per value
        client.figure("quickstart", "summary")  # a notebook shows it
        sweep = client.submit("quickstart", set=["train.steps=100"])
        for progress in client.events(sweep.sweep_id):
            print(progress.counts)

The service validates requests and fills in defaults. Importing this module imports neither torch nor ray.
"""

# ruff: noqa: A002 - `filter`, `format` and `set` are names of the service

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, Self, TypeVar, cast, overload
from urllib.parse import quote, urlsplit

import httpx
import pandas as pd
from pydantic import BaseModel, TypeAdapter, ValidationError

from cope_sweep.api.ablations import (
    AblationDetail,
    AblationSummary,
    ClaimResult,
    GetAblation,
    GetCurves,
    GetMlflowPage,
    GetPlan,
    ListAblations,
    ListClaims,
    PlanCost,
)
from cope_sweep.api.figures import FigureFormat, FigureInfo, GetFigure, ListFigures
from cope_sweep.api.question import API, Question, checked
from cope_sweep.api.requests import (
    BestOfRow,
    MatrixName,
    PerplexityComparison,
    PerplexityRequest,
    ProbeRequest,
    ProbeResponse,
    SweepRequest,
    Trainable,
)
from cope_sweep.api.runs import Checkpoint, ExportRuns, GetDiff, GetLog, GetRun, RunDetail, RunLog, RunsDiff
from cope_sweep.api.sweeps import GetSweep, ListSweeps, SweepDetail, SweepState
from cope_sweep.api.tables import GetReport, GetTable, ReportFormat, TableFormat
from cope_sweep.errors import UserError
from cope_sweep.proxies import bypass_proxies_here, proxy_data, through_proxy
from cope_sweep.records import SweepProgress, SweepSummary, new_sweep_id

__all__ = ["Client", "ConnectionFailed", "DownloadError", "Page", "Picture", "RetryPolicy", "ServiceError"]

A = TypeVar("A")
M = TypeVar("M", bound=BaseModel)

KEY_VARIABLE = "COPE_SWEEP_KEY"
SWEEPS_PER_PAGE = 1000
TEMPORARY_CODES = ("not_ready", "service_unavailable")
"""Codes of a 503 that may pass: from the service, and from a proxy in front of it."""
MAX_WAIT_S = 60.0
"""An error is raised at once if its Retry-After is longer than this."""
RECONNECT_S = 1.0
"""The wait before reopening a stream of events that has ended early."""
SILENCE_S = 60.0
"""A stream of events counts as broken after this time without any data, not even a comment."""


class ServiceError(UserError):
    """The service has answered with an error: its HTTP status, message, code and data.

    If the service has sent `retry_after_s`, the request may be repeated after that time.
    """

    status = 500
    retry_after_s: float | None = None


class ConnectionFailed(UserError):
    """The service cannot be reached, or has closed the connection."""

    default_code = "not_connected"


class DownloadError(UserError):
    """A downloaded file does not have the size or digest that the service has announced."""

    default_code = "damaged_download"


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is repeated: after connection errors, status 429, and a status 503 that may pass."""

    retries: int = 4
    """The maximum number of repetitions."""
    first_wait_s: float = 0.5
    """Doubled for each further repetition, and shortened at random by up to half."""

    def wait_s(self, error: ServiceError | ConnectionFailed, attempt: int) -> float | None:
        """The wait after the attempt with this number, from 0; None if the error is to be raised."""
        if attempt >= self.retries:
            return None
        wait_s = self.first_wait_s * 2**attempt * random.uniform(0.5, 1.0)
        if isinstance(error, ServiceError):
            if error.status != 429 and not (error.status == 503 and error.code in TEMPORARY_CODES):
                return None
            wait_s = max(wait_s, error.retry_after_s or 0.0)
        return wait_s if wait_s <= MAX_WAIT_S else None


class Picture(bytes):
    """An SVG, which notebooks show."""

    def _repr_svg_(self) -> str:
        return self.decode()


class Page(bytes):
    """An HTML page, which notebooks show."""

    def _repr_html_(self) -> str:
        return self.decode()


class Client:
    """A client of the service. All methods that send a request raise ServiceError and ConnectionFailed.

    Ablations have the names that `ablations` lists. A run is named by its id or its first digits. `scale` is one of the
    ablation's scales; None: the ablation without a scale.
    """

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
            key: Its API key; None: from COPE_SWEEP_KEY, if it is set.
            timeout_s: The limit for connecting, and between two parts of an answer.
            retry: How often requests are repeated.
            transport: Sends the requests; for tests.
            sleep: Called with each wait in seconds; for tests.

        Raises:
            UserError: `server` is not the address of a service, or `key` cannot be a key.
        """
        url = server if "://" in server else f"http://{server}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"{server!r} is not the address of a service; write it like http://127.0.0.1:8000",
                code="invalid_address",
                address=server,
            )
        key = (key or os.environ.get(KEY_VARIABLE) or "").strip()
        if not (key.isascii() and key.isprintable()):  # without the key: a message is no place for it
            raise UserError(
                f"the API key has a character that no key has, such as a line break; copy it again into {KEY_VARIABLE}",
                code="invalid_key",
            )
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.server, self.retries, self._sleep = server, retry or RetryPolicy(), sleep
        bypass_proxies_here(url)
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -- ablations -----------------------------------------------------------------------------------------------

    def ask(self, question: Question[A], *, committed: bool = False) -> A:
        """The answer to a question of `cope_sweep.api`, such as `GetTable(name="quickstart", compare="CoPE")`.

        With `committed`, a question about an ablation is answered from the results that come with the ablation files
        instead of the service's store.

        The methods below ask the same questions. Where they take `**options`, these are the other fields of the
        question; they raise UserError for an option that the question does not have.
        """
        kind = type(question)
        in_path = kind.path_fields()
        path = kind.PATH.format(**{name: _quoted(getattr(question, name)) for name in in_path})
        # The service fills in defaults: its own, if it is of another version.
        params = question.model_dump(mode="json", exclude=in_path, exclude_defaults=True)
        params |= {"committed": True} if committed else {}
        response = self._send("GET", path, params=params)
        if kind.answer_type() is bytes:
            self._check_media(response, kind.MEDIA_TYPES.values())
            return cast(A, response.content)
        return cast(A, self._parsed(kind.answer_type(), response.content))

    def _ask(self, kind: type[Question[A]], *, committed: bool = False, **fields: Any) -> A:
        return self.ask(checked(kind, **fields), committed=committed)

    def ablations(self) -> list[AblationSummary]:
        """All ablations, with the number of their runs by status."""
        return self.ask(ListAblations())

    def ablation(self, name: str, scale: str | None = None, **options: Any) -> AblationDetail:
        """One ablation: its rows, runs and file. `options`: `set`; and `committed` as in `ask`."""
        return self._ask(GetAblation, name=name, scale=scale, **options)

    def plan(self, name: str, scale: str | None = None, **options: Any) -> PlanCost:
        """Each run of an ablation in plan order: status, and estimated time and memory on the service's machine.

        `options`: `set`.
        """
        return self._ask(GetPlan, name=name, scale=scale, **options)

    @overload
    def table(self, name: str, *, format: None = None, **options: Any) -> pd.DataFrame: ...
    @overload
    def table(self, name: str, *, format: TableFormat, **options: Any) -> bytes: ...
    def table(self, name: str, *, format: TableFormat | None = None, **options: Any) -> pd.DataFrame | bytes:
        """The table of an ablation: mean ± standard deviation over seeds, beside the published numbers.

        Args:
            name: The ablation.
            format: Return a file in this format, which also has intervals, medians and p. None: return a DataFrame that
                prints as the table, or with `compare` as the comparisons below the table; its cells are texts.
            options: `scale`, `compare`, `sort`, and the other fields of `GetTable`; `committed` as in `ask`. With
                `runs=True`, the DataFrame has one line per run.
        """
        runs = options.get("runs", False)
        chosen = format or ("csv" if runs else "markdown")
        content = self._ask(GetTable, name=name, format=chosen, **options)
        if format is not None:
            return content
        if not runs:
            tables = [part for part in content.decode().split("\n\n") if part.startswith("|")]
            return _table_frame(tables[-1 if options.get("compare") else 0])
        # A row can be called None or NA; only an empty cell has no value. A run's id can look like a number.
        return pd.read_csv(io.BytesIO(content), keep_default_na=False, na_values=[""], dtype={"run_id": str})

    def mlflow_page(self, name: str) -> str | None:
        """The URL of an ablation's experiment in MLflow; None if the service knows no server or no experiment."""
        return self._ask(GetMlflowPage, name=name).url

    def claims(self, ablation: str | None = None, **options: Any) -> list[ClaimResult]:
        """The claims of an ablation with their verdicts, or of all ablations at each scale with finished runs.

        `options` are the other fields of `ListClaims`: `scale` and `set`; and `committed` as in `ask`.
        """
        return self._ask(ListClaims, ablation=ablation, **options)

    def report(self, name: str, *, format: ReportFormat = "html", **options: Any) -> bytes:
        """The report on an ablation's finished runs: table with comparisons, figures, and provenance.

        `options` are the other fields of `GetReport`: `scale` and `set`; and `committed` as in `ask`. Notebooks show
        HTML.
        """
        content = self._ask(GetReport, name=name, format=format, **options)
        return Page(content) if format == "html" else content

    def figures(self, name: str, scale: str | None = None, **options: Any) -> list[FigureInfo]:
        """The figures that the ablation's file declares, and the kinds of figures that every ablation has.

        `options`: `set`; and `committed` as in `ask`.
        """
        return self._ask(ListFigures, name=name, scale=scale, **options)

    def figure(self, name: str, figure: str, *, format: FigureFormat = "svg", **options: Any) -> bytes:
        """A figure of the finished runs of an ablation, or its data. Notebooks show SVG.

        Args:
            name: The ablation.
            figure: A figure that the file declares, such as `maps-2`, or a kind, such as `curves`; `figures` lists
                both.
            format: A file format; csv: the data behind the figure.
            options: `metric`, `row`, `x`, `size`, and the other fields of `GetFigure`; `committed` as in `ask`.
        """
        content = self._ask(GetFigure, name=name, figure=figure, format=format, **options)
        return Picture(content) if format == "svg" else content

    def curves(self, name: str, metric: str | None = None, *, committed: bool = False, **options: Any) -> pd.DataFrame:
        """The learning curves of a metric: columns row, run_id, seed, step and value, about 200 points per run.

        The default metric is the ablation's primary metric. `options`: `scale` and `set`; `committed` as in `ask`.
        """
        question, lines = checked(GetCurves, name=name, metric=metric, **options), []
        while True:
            page = self.ask(question, committed=committed)
            for row in page.rows:
                for run in row.series:
                    lines += [(row.row, run.run_id, run.seed, step, value) for step, value in run.points]
            if page.next is None:
                return pd.DataFrame(lines, columns=["row", "run_id", "seed", "step", "value"])
            question = question.model_copy(update={"offset": page.next})

    # -- runs ----------------------------------------------------------------------------------------------------

    def runs(self, filter: Sequence[str] = (), **options: Any) -> pd.DataFrame:
        """All matching runs that have started, with all their values, one line per run.

        The columns are run_id, status, ablation, row, seed, …, the configuration by dotted keys (`model.layers`),
        metrics, and facts such as versions and durations.

        Args:
            filter: Conditions that all must hold: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`.
            options: `status`, `ablation`, `sort`, and the other fields of `ExportRuns`. With `curves=True`, one line
                for each logged value of a run.
        """
        content = self._ask(ExportRuns, filter=filter, format="parquet", **options)
        return pd.read_parquet(io.BytesIO(content))

    def run(self, run_id: str, *, curve: bool = True) -> RunDetail:
        """One run: configuration, state, attempts, metrics, facts, why it failed, and with `curve` its logged rows."""
        return self._ask(GetRun, run_id=run_id, curve=curve)

    def curve(self, run_id: str) -> pd.DataFrame:
        """The logged rows of a run, by step: a column for each metric."""
        rows = self._parsed(list[dict[str, Any]], self._send("GET", f"/runs/{_quoted(run_id)}/curve").content)
        return pd.DataFrame(rows).set_index("step") if rows else pd.DataFrame()

    def logs(self, run_id: str, tail: int = 200) -> RunLog:
        """The last lines of a run's log: its attempts, evaluations, and errors with their tracebacks."""
        return self._ask(GetLog, run_id=run_id, tail=tail)

    def diff(self, left: str, right: str, *, scale: str | None = None, set: Sequence[str] = ()) -> RunsDiff:
        """What differs between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test.

        Each is an id, or `ABLATION/ROW` for the row's best finished run at this `scale`, with these values of `--set`.
        """
        return self._ask(GetDiff, left=left, right=right, scale=scale, set=list(set))

    # -- models --------------------------------------------------------------------------------------------------

    def perplexity(
        self,
        models: Sequence[str | BestOfRow | Mapping[str, Any]],
        *,
        tokens: Sequence[Sequence[int]] | None = None,
        text: str | Sequence[str] | None = None,
        context: int | None = None,
        stride: int | None = None,
        log_probabilities: bool = False,
        token_labels: bool = False,
        top: int = 0,
    ) -> PerplexityComparison:
        """The perplexity of token ids or texts under one or several models. The request is not repeated.

        Args:
            models: Run ids; or the best run of a row: `{"ablation": "quickstart", "row": "CoPE"}`.
            tokens: Whole sequences of token ids, including the answers. Only tokens that the task trains are scored.
            text: A text or texts, instead. A model without a tokenizer reads labels of its task, separated by blanks.
            context: Tokens per window; None: for texts, as in training; for token ids, the whole sequence.
            stride: Tokens from the start of one window to the start of the next, 1 … context; None: disjoint windows.
            log_probabilities: Return the log-probability of each token.
            token_labels: Return the ids and labels of the tokens.
            top: Number of most probable tokens to return at each position, at most 20.
        """
        body = _body(
            PerplexityRequest, models=models, tokens=tokens, text=text, context=context, stride=stride,
            log_probabilities=log_probabilities, token_labels=token_labels, top=top,
        )  # fmt: skip
        return self._answer(PerplexityComparison, "POST", "/perplexity", json=body, repeats=False)

    def probe(
        self,
        run_id: str,
        *,
        tokens: Sequence[int] | None = None,
        text: str | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        matrices: Sequence[MatrixName] | None = None,
        marks: Mapping[str, Sequence[int]] | None = None,
        load: bool = False,
    ) -> ProbeResponse:
        """Gates, positions and attention of a run's model on a sequence. The request is not repeated.

        Args:
            run_id: The full id of a finished run.
            tokens: Token ids.
            text: A text instead of token ids.
            layers: Numbers from 0; None: all.
            heads: Numbers from 0; None: all.
            matrices: The matrices to send; None: all; an empty list: statistics only.
            marks: Name → indices of marked tokens; None: the marks of the task or the text.
            load: Also return what the position logits of each encoding do.
        """
        body = _body(
            ProbeRequest, tokens=tokens, text=text, layers=layers, heads=heads, matrices=matrices, marks=marks,
            load=load,
        )  # fmt: skip
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

        The path holds either its previous content or the whole file: the data goes to a second file, which replaces
        the path once its digest is verified.

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
                        raise DownloadError(
                            f"{path}: the service has sent {file.tell():,} of {size_bytes:,} bytes; download it again",
                            code="incomplete_download",
                            file=str(path),
                            size_bytes=file.tell(),
                        )
            file.flush()
            os.fsync(file.fileno())
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            partial.unlink(missing_ok=True)
            raise DownloadError(
                f"{path}: its SHA-256 is {digest} instead of {sha256}; download it again",
                file=str(path),
                sha256=digest,
                announced=sha256,
            )
        partial.replace(path)
        return path

    def _receive(self, url: str, file: IO[bytes], size_bytes: int) -> None:
        """Append the rest of a file; if the service sends the whole file, overwrite it. Stops after `size_bytes`."""
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

    def sweeps(self, ablation: str | None = None) -> list[SweepSummary]:
        """All sweeps, or an ablation's, newest first."""
        sweeps: list[SweepSummary] = []
        while True:
            question = checked(ListSweeps, ablation=ablation, limit=SWEEPS_PER_PAGE, offset=len(sweeps))
            page = self.ask(question).sweeps
            if not page:
                return sweeps
            sweeps += page

    def sweep(self, sweep_id: str) -> SweepDetail:
        """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""
        return self._ask(GetSweep, sweep_id=sweep_id)

    def submit(
        self,
        ablation: str | None = None,
        *,
        name: str | None = None,
        spec: str | Mapping[str, Any] | None = None,
        scale: str | None = None,
        set: Sequence[str] = (),
        only: Sequence[Trainable] | None = None,
        time_budget_s: float | None = None,
        max_runs: int | None = None,
        max_failures: int | None = None,
        sweep_id: str | None = None,
    ) -> SweepState:
        """Submit a sweep: the service trains the runs of an ablation that are not finished.

        A request whose answer is lost is sent again, with the same id: it submits one sweep.

        Args:
            ablation: An ablation of the service.
            name: Instead of `ablation`: a name for the ablation in `spec`.
            spec: The text of an ablation file (YAML), or the same as a dictionary.
            scale: One of the ablation's scales.
            set: Values that replace the ablation's: `["train.steps=100", "seeds=[0]"]`.
            only: Train only the runs with these statuses; None: all runs that are neither finished nor stopped early by
                the ablation's schedule.
            time_budget_s: Stop after this time; runs in training write checkpoints first.
            max_runs: Train at most this many runs.
            max_failures: Start no more runs after this many have failed.
            sweep_id: The id of the sweep, as `cope_sweep.records.new_sweep_id` makes them; None: a new one. The same
                id again, with the same arguments, returns the same sweep.
        """
        body = _body(
            SweepRequest, ablation=ablation, name=name, spec=spec, scale=scale, set=list(set), only=only,
            time_budget_s=time_budget_s, max_runs=max_runs, max_failures=max_failures,
        )  # fmt: skip
        path = f"/sweeps/{_quoted(sweep_id or new_sweep_id())}"
        return self._answer(SweepState, "PUT", path, json=body)

    def preview(self, ablation: str | None = None, **options: Any) -> PlanCost:
        """The runs that `submit` would train, and their estimated cost. Nothing is started.

        `options` are the arguments of `submit` but `sweep_id`: `name` and `spec`, `scale`, `set`, `only`, `max_runs`, …
        """
        body = _body(SweepRequest, ablation=ablation, **options)
        return self._answer(PlanCost, "POST", "/sweeps/preview", json=body)

    def stop(self, sweep_id: str) -> SweepState:
        """Stop a sweep; its runs write checkpoints first."""
        return self._answer(SweepState, "POST", f"/sweeps/{_quoted(sweep_id)}/stop")

    def retry(self, sweep_id: str) -> SweepState:
        """Start a new sweep that trains the runs that this sweep has not finished, and return it."""
        return self._answer(SweepState, "POST", f"/sweeps/{_quoted(sweep_id)}/retry")

    def events(self, sweep_id: str, last_id: str | None = None) -> Iterator[SweepProgress]:
        """The progress of a sweep until it ends, after the event `last_id`.

        After a lost connection, events continue after the last one received.
        """
        path = f"{API}/sweeps/{_quoted(sweep_id)}/events"
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_S)
        attempt = 0
        while last_id != "end":
            headers = {"accept": "text/event-stream", "cache-control": "no-store"}
            headers |= {"last-event-id": last_id} if last_id else {}
            try:
                with self._stream("GET", path, headers=headers, timeout=timeout) as response:
                    self._check_media(response, ["text/event-stream"])
                    for kind, data, event_id in server_events(response.iter_lines()):
                        attempt, last_id = 0, event_id or last_id
                        yield self._parsed(SweepProgress, data)
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
        return cast(M, self._parsed(kind, self._send(method, path, **options).content))

    def _parsed(self, kind: Any, content: bytes | str) -> Any:
        """The JSON of an answer as a value of a type. Raises ServiceError."""
        try:
            return TypeAdapter(kind).validate_json(content)
        except ValidationError as error:
            raise self._unexpected_answer() from error

    def _check_media(self, response: httpx.Response, media_types: Iterable[str]) -> None:
        """Raise ServiceError for an answer of another media type, such as the login page of a proxy."""
        if response.headers.get("content-type", "").partition(";")[0] not in media_types:
            raise self._unexpected_answer()

    def _unexpected_answer(self) -> ServiceError:
        message = f"{self.server} answers something else than this client expects; is it the service, of this version?"
        return ServiceError(message, code="unexpected_answer", server=self.server)

    def _send(self, method: str, path: str, *, repeats: bool = True, **options: Any) -> httpx.Response:
        """The response to a request. With `repeats`, the request is repeated after temporary errors.

        `options` are passed to `httpx.Client.stream`.
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
        """The response to a request, before its body is read. `options` are passed to `httpx.Client.stream`."""
        try:
            with self._http.stream(method, url, **options) as response:
                if not response.is_success:
                    response.read()
                    raise _service_error(response)
                yield response
        except httpx.InvalidURL as error:  # longer than 64 kB
            raise UserError(
                f"the request cannot be sent ({error}); ask for less at a time", code="too_large"
            ) from error
        except httpx.TransportError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            base_url = str(self._http.base_url)
            raise ConnectionFailed(
                f"the service at {self.server} does not answer ({reason}){through_proxy(base_url)}; start one with "
                "`cope-sweep serve`",
                server=self.server,
                reason=reason,
                **proxy_data(base_url),
            ) from error

    def _wait(self, error: ServiceError | ConnectionFailed, attempt: int) -> None:
        """Wait before the next attempt. Raises the error if there is no next attempt."""
        wait_s = self.retries.wait_s(error, attempt)
        if wait_s is None:
            raise error
        self._sleep(wait_s)


def _body(kind: type[BaseModel], **values: Any) -> dict[str, Any]:
    """The body of a request, without values that are None. Raises UserError for invalid values."""
    fields = {name: value for name, value in values.items() if value is not None}
    return checked(kind, **fields).model_dump(mode="json", exclude_unset=True)


def _table_frame(table: str) -> pd.DataFrame:
    """A table in Markdown. The columns before the first column of numbers are its index."""
    header, alignment, *rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in table.splitlines()]
    columns = [_plain_text(cell) for cell in header]
    frame = pd.DataFrame([[_plain_text(cell) for cell in row] for row in rows], columns=columns)
    numbers = [index for index, cell in enumerate(alignment) if cell.strip().endswith(":")]
    return frame.set_index(columns[: numbers[0]]) if numbers else frame


def _plain_text(cell: str) -> str:
    """The text of a cell without emphasis and escapes."""
    return re.sub(r"\\(.)", r"\1", cell.strip().removeprefix("**").removesuffix("**"))


def _quoted(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def _service_error(response: httpx.Response) -> ServiceError:
    """The error in a response whose body was read: problem details, or another server's text."""
    try:
        body = response.json()
    except ValueError:
        body = None
    problem = body if isinstance(body, dict) else {}
    answer = f"{response.url} answers {response.status_code} {response.reason_phrase}"
    detail = problem.get("detail") or f"{answer}{through_proxy(str(response.url))}"
    code = str(problem.get("code") or response.reason_phrase.lower().replace(" ", "_"))
    given = problem.get("data")
    data = {name: value for name, value in given.items() if name != "code"} if isinstance(given, dict) else {}
    error = ServiceError(f"{detail} ({response.status_code} {code})", code=code, **data)
    error.status, error.retry_after_s = response.status_code, _retry_after_s(response)
    return error


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
    """Kind, data and id of the server-sent events in the lines of a stream. The service sends data as one ASCII line.

    Incomplete events are left out.
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
