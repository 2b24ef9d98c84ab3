"""A client of the REST service, for scripts and notebooks.

    from cope_sweep.client import Client

    with Client("http://127.0.0.1:8000") as client:
        print(client.table("quickstart"))
        client.runs(["model.layers>=1"], status=["finished"])  # pandas: one line per run, a column per value
        client.figure("quickstart", "summary")  # a notebook shows it
        sweep = client.submit("quickstart", set=["train.steps=100"])
        for progress in client.events(sweep.sweep_id):
            print(progress.counts)

The service checks what is asked, and fills in what is left out. Importing this module imports neither torch nor ray.
"""

# ruff: noqa: A002 - `filter`, `format` and `set` are names of the service

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, Self, TypeVar, overload
from urllib.parse import quote, urlsplit

import httpx
import pandas as pd
from pydantic import BaseModel, TypeAdapter, ValidationError

from cope_sweep.api.answers import (
    AblationDetail,
    AblationSummary,
    Checkpoint,
    ClaimResult,
    Curves,
    FigureInfo,
    MlflowPage,
    PlanCost,
    RunDetail,
    RunLog,
    RunsDiff,
    SweepDetail,
    SweepState,
)
from cope_sweep.api.formats import Band, FigureFormat, ReportFormat, TableFormat, Trainable
from cope_sweep.api.questions import API, MAX_CURVE_ROWS
from cope_sweep.api.requests import (
    BestOfRow,
    MatrixName,
    PerplexityComparison,
    PerplexityRequest,
    ProbeRequest,
    ProbeResponse,
    SweepRequest,
)
from cope_sweep.errors import UserError
from cope_sweep.proxies import bypass_proxies_here, proxy_data, through_proxy
from cope_sweep.records import Status, SweepPage, SweepProgress, SweepSummary

__all__ = ["Client", "ConnectionFailed", "DownloadError", "Page", "Picture", "RetryPolicy", "ServiceError"]

A = TypeVar("A")
M = TypeVar("M", bound=BaseModel)

KEY_VARIABLE = "COPE_SWEEP_KEY"
PAGE = 1000
"""Sweeps that are requested at a time."""
PASSING = ("not_ready", "service_unavailable")
"""Codes of a 503 that may pass by waiting: of the service, and of a proxy in front of it."""
MAX_WAIT_S = 60.0
"""An error is raised at once if its Retry-After is longer than this."""
RECONNECT_S = 1.0
"""The wait before a stream of events that has ended early is opened again."""
SILENCE_S = 60.0
"""A stream of events without any data, not even a comment, for this time counts as broken."""


class ServiceError(UserError):
    """The service has answered with an error: its HTTP status and message, and code and data of the error there.

    The request may be repeated after `retry_after_s`, if the service has sent one.
    """

    status = 500
    retry_after_s: float | None = None


class ConnectionFailed(UserError):
    """The service cannot be reached, or has closed the connection."""

    default_code = "not_connected"


class DownloadError(UserError):
    """A downloaded file is not the one that the service has announced."""

    default_code = "damaged_download"


@dataclass(frozen=True)
class RetryPolicy:
    """The rule for repeating a request: after connection errors, 429, and those 503 that may pass."""

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
            if error.status != 429 and not (error.status == 503 and error.code in PASSING):
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

    Ablations are named as `ablations` lists them, runs by their ids or the first digits of one. `scale` is one of the
    ablation's scales; None: its own size.
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
            UserError: `server` is not the address of a service.
        """
        url = server if "://" in server else f"http://{server}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"{server!r} is not the address of a service, as http://127.0.0.1:8000 is",
                code="invalid_address",
                address=server,
            )
        key = key or os.environ.get(KEY_VARIABLE)
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

    def ablations(self) -> list[AblationSummary]:
        """All ablations, with the number of their runs by status."""
        return self._get(list[AblationSummary], "/ablations")

    def ablation(self, name: str, scale: str | None = None) -> AblationDetail:
        """One ablation: its rows, runs and file."""
        return self._get(AblationDetail, f"/ablations/{_quoted(name)}", scale=scale)

    def plan(self, name: str, scale: str | None = None) -> PlanCost:
        """Each run of an ablation in plan order, with its status, and the time and memory that it takes there."""
        return self._get(PlanCost, f"/ablations/{_quoted(name)}/plan", scale=scale)

    @overload
    def table(
        self, name: str, *, scale: str | None = None, compare: str | None = None, sort: str | None = None,
        runs: bool = False, committed: bool = False, stars: bool = False, group: str | None = None,
        caption: str | None = None, label: str | None = None, notes: bool = True, format: None = None,
    ) -> pd.DataFrame: ...  # fmt: skip
    @overload
    def table(
        self, name: str, *, scale: str | None = None, compare: str | None = None, sort: str | None = None,
        runs: bool = False, committed: bool = False, stars: bool = False, group: str | None = None,
        caption: str | None = None, label: str | None = None, notes: bool = True, format: TableFormat,
    ) -> bytes: ...  # fmt: skip
    def table(
        self, name: str, *, scale: str | None = None, compare: str | None = None, sort: str | None = None,
        runs: bool = False, committed: bool = False, stars: bool = False, group: str | None = None,
        caption: str | None = None, label: str | None = None, notes: bool = True, format: TableFormat | None = None,
    ) -> pd.DataFrame | bytes:  # fmt: skip
        """The table of an ablation: mean ± standard deviation over seeds, beside the published numbers.

        Args:
            name: The ablation.
            scale: One of its scales.
            compare: Compare the rows with one of them, named by its labels as in `RoPE, layers 2`; or with the
                published numbers: `paper`; or, as in `model.position=CoPE`, each row with the one that has this label
                and the same other labels.
            sort: Order the rows by a metric, best first, by an axis, or by `parameters`.
            runs: One line for each run instead, with its numbers.
            committed: The results that come with the ablation files, instead of the store's.
            stars: Of latex: mark significant differences by stars instead of a table of comparisons.
            group: Of latex: an axis whose labels group the rows; None: the first.
            caption: Of latex: the caption, as LaTeX code; None: the title.
            label: Of latex: the label; None: `tab:` and the name.
            notes: Of latex: whether the notes are below the table.
            format: The file in this format. It has intervals, medians and p, too. None: a DataFrame that prints as the
                table, and with `compare` as the comparisons below it; its cells are texts.
        """
        path = f"/ablations/{_quoted(name)}/table"
        chosen = format or ("parquet" if runs else "markdown")
        content = self._file(
            path, format=chosen, scale=scale, compare=compare, sort=sort, runs=runs, committed=committed, stars=stars,
            group=group, caption=caption, label=label, notes=notes,
        )  # fmt: skip
        if format is not None:
            return content
        return pd.read_parquet(io.BytesIO(content)) if runs else _table_frame(content.decode())

    def mlflow_page(self, name: str) -> str | None:
        """The URL of an ablation's experiment in MLflow; None if the service knows no server, or it has none."""
        return self._get(MlflowPage, f"/ablations/{_quoted(name)}/mlflow").url

    def claims(
        self, ablation: str | None = None, *, scale: str | None = None, committed: bool = False
    ) -> list[ClaimResult]:
        """The claims of an ablation with their verdicts, or of all ablations at each scale with finished runs.

        Args:
            ablation: The ablation; None: all.
            scale: One of its scales.
            committed: About the results that are kept with the ablation files, not those of the store.
        """
        return self._get(list[ClaimResult], "/claims", ablation=ablation, scale=scale, committed=committed)

    def report(self, name: str, *, scale: str | None = None, format: ReportFormat = "html") -> bytes:
        """The report on an ablation's finished runs: table with comparisons, figures, and what made the runs.

        Notebooks show HTML.
        """
        content = self._file(f"/ablations/{_quoted(name)}/report", scale=scale, format=format)
        return Page(content) if format == "html" else content

    def figures(self, name: str, scale: str | None = None) -> list[FigureInfo]:
        """The figures of an ablation: those that its file declares, and those that any ablation has."""
        return self._get(list[FigureInfo], f"/ablations/{_quoted(name)}/figures", scale=scale)

    def figure(
        self,
        name: str,
        figure: str,
        *,
        metric: Sequence[str] = (),
        x: str | None = None,
        panels: str | None = None,
        row: Sequence[str] = (),
        band: Band = "auto",
        log: bool | None = None,
        log_x: bool | None = None,
        title: str = "",
        width: float | None = None,
        height: float | None = None,
        font_size: float | None = None,
        scale: str | None = None,
        committed: bool = False,
        format: FigureFormat = "svg",
    ) -> bytes:
        """A figure of the finished runs of an ablation, or its data. Notebooks show SVG.

        Args:
            name: The ablation.
            figure: A figure that the file declares, as `curves` or `maps-2`, or a kind: `figures` lists both.
            metric: Metrics; empty: the metrics of the table.
            x: Of curves and convergence `step` or `time`; of values an axis, another key of a run, or a fact; of slice
                an axis.
            panels: An axis, with a panel for each of its values (values, contexts, budget, heatmap).
            row: Rows; empty: all.
            band: `interval` (95 %, of the mean), `range`, or what suits the number of seeds.
            log: Whether the metrics' axis is logarithmic; None: as the data ask for.
            log_x: The same of the other axis.
            title: Above the figure; empty: the ablation's title.
            width: Inches; None: as the panels need.
            height: Inches; None: as the panels need.
            font_size: Points; None: 8.
            scale: One of the ablation's scales.
            committed: The results that come with the ablation files, instead of the store's.
            format: csv: the data that is drawn.
        """
        content = self._file(
            f"/ablations/{_quoted(name)}/figures/{_quoted(figure)}", metric=metric, x=x, panels=panels, row=row,
            band=band, log=log, log_x=log_x, title=title, width=width, height=height,
            font_size=font_size, scale=scale, committed=committed, format=format,
        )  # fmt: skip
        return Picture(content) if format == "svg" else content

    def curves(self, name: str, metric: str | None = None, *, scale: str | None = None) -> pd.DataFrame:
        """The learning curves of a metric: the columns row, run_id, seed, step and value, about 200 points a run.

        The metric is the primary one of the ablation unless it is given.
        """
        path, lines, offset = f"/ablations/{_quoted(name)}/curves", [], 0
        while True:
            page = self._get(Curves, path, metric=metric, scale=scale, offset=offset, limit=MAX_CURVE_ROWS)
            for row in page.rows:
                for run in row.series:
                    lines += [(row.row, run.run_id, run.seed, step, value) for step, value in run.points]
            if page.next is None:
                return pd.DataFrame(lines, columns=["row", "run_id", "seed", "step", "value"])
            offset = page.next

    # -- runs ----------------------------------------------------------------------------------------------------

    def runs(
        self,
        filter: Sequence[str] = (),
        *,
        search: str = "",
        status: Sequence[Status] = (),
        run: Sequence[str] = (),
        sweep: str | None = None,
        ablation: str | None = None,
        scale: str | None = None,
        sort: str = "run_id",
        descending: bool = False,
        curves: bool = False,
    ) -> pd.DataFrame:
        """All matching runs that have been started, a line for each, with all their values.

        The columns are run_id, status, ablation, row, seed, …, the configuration by dotted keys (`model.layers`),
        metrics, and facts such as versions and durations.

        Args:
            filter: Conditions that all have to hold: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`.
            search: Words that have to be found, in the run's id, its message, row or ablation.
            status: Only runs with these statuses.
            run: Only these runs, by their ids, in this order.
            sweep: Only the runs of this sweep.
            ablation: Only the runs of this ablation, in plan order.
            scale: The ablation's scale.
            sort: A key as in `filter`, or run_id, status, seed, step, created_ms. Runs without it come last.
            descending: The greatest first.
            curves: The learning curves instead: one line for each logged value of a run.
        """
        content = self._file(
            "/runs/export", filter=filter, search=search, status=status, run=run, sweep=sweep, ablation=ablation,
            scale=scale, sort=sort, descending=descending, curves=curves, format="parquet",
        )  # fmt: skip
        return pd.read_parquet(io.BytesIO(content))

    def run(self, run_id: str, *, curve: bool = True) -> RunDetail:
        """One run: configuration, state, attempts, metrics and facts; why it failed; with `curve` its logged rows."""
        return self._get(RunDetail, f"/runs/{_quoted(run_id)}", curve=curve)

    def curve(self, run_id: str) -> pd.DataFrame:
        """The logged rows of a run, by step: a column for each metric."""
        rows = self._get(list[dict[str, Any]], f"/runs/{_quoted(run_id)}/curve")
        return pd.DataFrame(rows).set_index("step") if rows else pd.DataFrame()

    def logs(self, run_id: str, tail: int = 200) -> RunLog:
        """The last lines of a run's log: its attempts, evaluations, and errors with their tracebacks."""
        return self._get(RunLog, f"/runs/{_quoted(run_id)}/logs", tail=tail)

    def diff(self, left: str, right: str) -> RunsDiff:
        """What differs between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test."""
        return self._get(RunsDiff, "/diff", left=left, right=right)

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
            tokens: Whole sequences of token ids, their answers included. Scored are those that the task trains.
            text: A text or texts, instead. A model without a tokenizer reads labels of its task with blanks between
                them.
            context: Tokens of a window; None: for texts as many as in training, for token ids the whole sequence.
            stride: Tokens from the start of a window to the next, 1 … context; None: disjoint windows.
            log_probabilities: Whether the answer has the log-probability of each token.
            token_labels: Whether it has the ids and labels of the tokens.
            top: Number of most probable tokens to report for each place, at most 20.
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
    ) -> ProbeResponse:
        """Gates, positions and attention of a run's model on a sequence. The request is not repeated.

        Args:
            run_id: The whole id of a finished run.
            tokens: Token ids.
            text: A text, instead.
            layers: Numbers from 0; None: all.
            heads: Numbers from 0; None: all.
            matrices: The matrices to send; None: all; an empty list: statistics only.
            marks: Name → indices of marked tokens; None: the marks of the task or the text.
        """
        body = _body(ProbeRequest, tokens=tokens, text=text, layers=layers, heads=heads, matrices=matrices, marks=marks)
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

        The path holds either its previous content or the whole file: the data is received in a file beside it, which
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
                        raise DownloadError(
                            f"{path}: the service has sent {file.tell():,} bytes only",
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
                f"{path}: its SHA-256 is {digest}, and {sha256} was announced; download it again",
                file=str(path),
                sha256=digest,
                announced=sha256,
            )
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

    def sweeps(self, ablation: str | None = None) -> list[SweepSummary]:
        """All sweeps, or an ablation's, newest first."""
        found: list[SweepSummary] = []
        while page := self._get(SweepPage, "/sweeps", ablation=ablation, limit=PAGE, offset=len(found)).sweeps:
            found += page
        return found

    def sweep(self, sweep_id: str) -> SweepDetail:
        """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""
        return self._get(SweepDetail, f"/sweeps/{_quoted(sweep_id)}")

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
        idempotency_key: str | None = None,
    ) -> SweepState:
        """Submit a sweep: the service trains the runs of an ablation that are not finished.

        The request may be repeated, like a GET: requests with the same key mean the same sweep.

        Args:
            ablation: An ablation of the service.
            name: Instead, the name of the ablation in `spec`.
            spec: The text of an ablation file (YAML), or the same as a dictionary.
            scale: One of the ablation's scales.
            set: Values that replace the ablation's: `["train.steps=100", "seeds=[0]"]`.
            only: Train only the runs with these statuses; None: all that have not ended as planned.
            time_budget_s: Runs in training are checkpointed after it.
            max_runs: Train at most this many runs.
            max_failures: Start no more runs after this many have failed.
            idempotency_key: None: a new key.
        """
        body = _body(
            SweepRequest, ablation=ablation, name=name, spec=spec, scale=scale, set=list(set), only=only,
            time_budget_s=time_budget_s, max_runs=max_runs, max_failures=max_failures,
        )  # fmt: skip
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self._answer(SweepState, "POST", "/sweeps", json=body, headers=headers)

    def preview(
        self,
        ablation: str | None = None,
        *,
        name: str | None = None,
        spec: str | Mapping[str, Any] | None = None,
        scale: str | None = None,
        set: Sequence[str] = (),
        only: Sequence[Trainable] | None = None,
        max_runs: int | None = None,
    ) -> PlanCost:
        """The runs that `submit` with the same values would train, and their estimated cost. Nothing is started."""
        body = _body(
            SweepRequest, ablation=ablation, name=name, spec=spec, scale=scale, set=list(set), only=only,
            max_runs=max_runs,
        )  # fmt: skip
        return self._answer(PlanCost, "POST", "/sweeps/preview", json=body)

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

    def _get(self, kind: type[A], path: str, **parameters: Any) -> A:
        """The answer of a route: a model, or a list. Parameters that are None or empty are left out."""
        return TypeAdapter(kind).validate_json(self._file(path, **parameters))

    def _file(self, path: str, **parameters: Any) -> bytes:
        """The content of a route. Parameters that are None or empty are left out."""
        given = {name: value for name, value in parameters.items() if value not in (None, "", (), [])}
        return self._send("GET", path, params=given).content

    def _answer(self, kind: type[M], method: str, path: str, **options: Any) -> M:
        """The answer to a request, with the options of `_send`."""
        return kind.model_validate_json(self._send(method, path, **options).content)

    def _send(self, method: str, path: str, *, repeats: bool = True, **options: Any) -> httpx.Response:
        """The response to a request, which is repeated after some errors if `repeats` is true.

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
        """The response to a request, whose body was not read. `options` are passed to `httpx.Client.stream`."""
        try:
            with self._http.stream(method, url, **options) as response:
                if not response.is_success:
                    response.read()
                    raise _service_error(response)
                yield response
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
        """Wait before the next attempt. Raises the error if there is none."""
        wait_s = self.retries.wait_s(error, attempt)
        if wait_s is None:
            raise error
        self._sleep(wait_s)


def _body(kind: type[BaseModel], **values: Any) -> dict[str, Any]:
    """The body of a request, without the values that are None. Raises UserError for values that it cannot have."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return kind.model_validate(given).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{place}: {first['msg']}" if place else first["msg"]
        raise UserError(message, code="invalid_request", key=place) from error


def _table_frame(markdown: str) -> pd.DataFrame:
    """The last table of a text in Markdown. Its index are the columns before the first one of numbers."""
    table = [part for part in markdown.split("\n\n") if part.startswith("|")][-1]
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
    """The error in a response whose body was read: problem details, or the text of another server."""
    try:
        body = response.json()
    except ValueError:
        body = None
    problem = body if isinstance(body, dict) else {}
    answer = f"{response.url} answers {response.status_code} {response.reason_phrase}"
    detail = problem.get("detail") or f"{answer}{through_proxy(str(response.url))}"
    code = str(problem.get("code") or response.reason_phrase.lower().replace(" ", "_"))
    error = ServiceError(f"{detail} ({response.status_code} {code})", code=code, **(problem.get("data") or {}))
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
