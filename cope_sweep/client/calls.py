"""The requests of the client: what is sent, and how the answer is read.

Each function is a method of both clients, which send its call and return what `read` makes of the answer.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, TypeAdapter

from cope_sweep.errors import UserError
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
    SweepDetail,
    SweepPage,
    SweepState,
)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

API = "/api/v1"
KEY_VARIABLE = "COPE_SWEEP_KEY"
PAGE = 1000
"""Runs or sweeps that are asked for at a time."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    """Those that are None are not sent."""
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeats: bool = False
    """Whether a POST may be repeated: twice has the effect of once."""

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of httpx."""
        params = {key: value for key, value in self.params.items() if value is not None}
        body = {} if self.body is None else {"json": self.body}
        return {"method": self.method, "url": self.path, "params": params, "headers": dict(self.headers), **body}


def options(server: str, key: str | None, timeout_s: float) -> dict[str, Any]:
    """The options of both clients' connections. Raises UserError for what is no address of a service."""
    url = server if "://" in server else f"http://{server}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{server!r} is not the address of a service, as http://127.0.0.1:8000 is")
    key = key or os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout_s}


def _model(kind: type[M]) -> Callable[[httpx.Response], M]:
    return lambda response: kind.model_validate_json(response.content)


def _get(path: str, kind: type[M], **params: Any) -> Call[M]:
    return Call("GET", API + path, _model(kind), params)


def _name(name: str) -> str:
    return quote(name, safe="")


def ablations() -> Call[list[AblationSummary]]:
    """All ablations by name."""
    adapter = TypeAdapter(list[AblationSummary])
    return Call("GET", f"{API}/ablations", lambda response: adapter.validate_json(response.content))


def ablation(name: str, scale: str | None = None) -> Call[AblationDetail]:
    """One ablation with its plan."""
    return _get(f"/ablations/{_name(name)}", AblationDetail, scale=scale)


def plan_status(name: str, scale: str | None = None) -> Call[PlanStatus]:
    """Each run of an ablation, in the order of its plan, and how far it is."""
    return _get(f"/ablations/{_name(name)}/status", PlanStatus, scale=scale)


def ablation_curves(
    name: str, metric: str | None = None, scale: str | None = None, *, offset: int = 0, limit: int | None = None
) -> Call[Curves]:
    """A metric of every run of a page of an ablation's rows; `next` of the answer is the offset of the next page."""
    path = f"/ablations/{_name(name)}/curves"
    return _get(path, Curves, metric=metric, scale=scale, offset=offset or None, limit=limit)


def table(name: str, scale: str | None = None, compare: str | None = None) -> Call[dict[str, Any]]:
    """The table of an ablation."""
    call = rendered_table(name, "json", scale, compare)
    return Call("GET", call.path, lambda response: response.json(), call.params)


def rendered_table(
    name: str, output_format: str, scale: str | None = None, compare: str | None = None, *, runs: bool = False
) -> Call[bytes]:
    """The table in a format: markdown, latex, csv, parquet, html or json; with `runs`, a line for each run."""
    params = {"format": output_format, "scale": scale, "compare": compare, "runs": runs or None}
    return Call("GET", f"{API}/ablations/{_name(name)}/table", lambda response: response.content, params)


def run_page(
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
) -> Call[RunPage]:
    """A page of runs. Filters are texts, as `model.layers>=4`; all have to hold."""
    path = "/runs" if ablation is None else f"/ablations/{_name(ablation)}/runs"
    return _get(
        path,
        RunPage,
        filter=list(filters) or None,
        status=list(statuses) or None,
        sweep=sweep,
        scale=scale,
        sort=sort,
        order="desc" if descending else None,
        limit=limit,
        offset=offset or None,
        cursor=cursor,
    )


def run(run_id: str, *, curve: bool = True) -> Call[RunDetail]:
    """One run; with `curve`, its logged rows."""
    return _get(f"/runs/{_name(run_id)}", RunDetail, curve=str(curve).lower())


def curve(run_id: str) -> Call[list[dict[str, float]]]:
    """The logged rows of a run, by step."""
    return Call("GET", f"{API}/runs/{_name(run_id)}/curve", lambda response: response.json())


def logs(run_id: str, tail: int = 200) -> Call[RunLog]:
    """The end of a run's log."""
    return _get(f"/runs/{_name(run_id)}/logs", RunLog, tail=tail)


def difference(left: str, right: str) -> Call[RunsDifference]:
    """What differs between two runs or two sweeps."""
    return _get("/diff", RunsDifference, left=left, right=right)


def checkpoint(run_id: str) -> Call[Checkpoint]:
    """The files of a finished run's checkpoint, with their digests."""
    return _get(f"/runs/{_name(run_id)}/checkpoint", Checkpoint)


def perplexity(run_id: str, body: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """The perplexity of token ids or texts under a run's model; the body of the service's request."""
    path = f"{API}/runs/{_name(run_id)}/perplexity"
    return Call("POST", path, lambda response: response.json(), body=dict(body))


def sweep_page(ablation: str | None = None, limit: int = 100, offset: int = 0) -> Call[SweepPage]:
    """A page of sweeps, newest first."""
    return _get("/sweeps", SweepPage, ablation=ablation, limit=limit, offset=offset or None)


def sweep(sweep_id: str) -> Call[SweepDetail]:
    """One sweep with its runs."""
    return _get(f"/sweeps/{_name(sweep_id)}", SweepDetail)


def submit(*, idempotency_key: str | None = None, **body: Any) -> Call[SweepState]:
    """Submit a sweep: `ablation`, or `name` and `spec`; `scale`, `set`, `leave_out`, `max_runs`, ….

    The request is repeated as a GET is, under a key of its own, so that no second sweep is made.
    """
    sent = {name: value for name, value in body.items() if value is not None}
    headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
    return Call("POST", f"{API}/sweeps", _model(SweepState), body=sent, headers=headers, repeats=True)


def stop(sweep_id: str) -> Call[SweepState]:
    """Ask a sweep to end; its runs write checkpoints."""
    return Call("POST", f"{API}/sweeps/{_name(sweep_id)}/stop", _model(SweepState), repeats=True)


def retry(sweep_id: str) -> Call[SweepState]:
    """Train again what a sweep has not finished; the sweep that does it."""
    return Call("POST", f"{API}/sweeps/{_name(sweep_id)}/retry", _model(SweepState), repeats=True)


def events_path(sweep_id: str) -> str:
    """The path of a sweep's events."""
    return f"{API}/sweeps/{_name(sweep_id)}/events"
