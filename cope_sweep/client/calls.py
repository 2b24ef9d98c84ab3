"""The requests of the client: what is sent, and how the answer is read. Both clients send them."""

from __future__ import annotations

import os
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
    adapter = TypeAdapter(list[AblationSummary])
    return Call("GET", f"{API}/ablations", lambda response: adapter.validate_json(response.content))


def ablation(name: str, scale: str | None) -> Call[AblationDetail]:
    return _get(f"/ablations/{_name(name)}", AblationDetail, scale=scale)


def plan_status(name: str, scale: str | None) -> Call[PlanStatus]:
    return _get(f"/ablations/{_name(name)}/status", PlanStatus, scale=scale)


def ablation_curves(name: str, metric: str | None, scale: str | None) -> Call[Curves]:
    return _get(f"/ablations/{_name(name)}/curves", Curves, metric=metric, scale=scale)


def table(name: str, output_format: str, scale: str | None, compare: str | None, runs: bool) -> Call[bytes]:
    params = {"format": output_format, "scale": scale, "compare": compare, "runs": runs or None}
    return Call("GET", f"{API}/ablations/{_name(name)}/table", lambda response: response.content, params)


def run_page(
    filters: Sequence[str],
    statuses: Sequence[str],
    sweep: str | None,
    ablation: str | None,
    scale: str | None,
    sort: str | None,
    descending: bool,
    limit: int,
    offset: int,
    cursor: str | None,
) -> Call[RunPage]:
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


def run(run_id: str, curve: bool) -> Call[RunDetail]:
    return _get(f"/runs/{_name(run_id)}", RunDetail, curve=str(curve).lower())


def curve(run_id: str) -> Call[list[dict[str, float]]]:
    return Call("GET", f"{API}/runs/{_name(run_id)}/curve", lambda response: response.json())


def logs(run_id: str, tail: int) -> Call[RunLog]:
    return _get(f"/runs/{_name(run_id)}/logs", RunLog, tail=tail)


def difference(left: str, right: str) -> Call[RunsDifference]:
    return _get("/diff", RunsDifference, left=left, right=right)


def checkpoint(run_id: str) -> Call[Checkpoint]:
    return _get(f"/runs/{_name(run_id)}/checkpoint", Checkpoint)


def perplexity(run_id: str, body: Mapping[str, Any]) -> Call[dict[str, Any]]:
    path = f"{API}/runs/{_name(run_id)}/perplexity"
    return Call("POST", path, lambda response: response.json(), body=dict(body))


def sweep_page(ablation: str | None, limit: int, offset: int) -> Call[SweepPage]:
    return _get("/sweeps", SweepPage, ablation=ablation, limit=limit, offset=offset or None)


def sweep(sweep_id: str) -> Call[SweepDetail]:
    return _get(f"/sweeps/{_name(sweep_id)}", SweepDetail)


def submit(body: Mapping[str, Any], key: str) -> Call[SweepState]:
    sent = {name: value for name, value in body.items() if value is not None}
    return Call("POST", f"{API}/sweeps", _model(SweepState), body=sent, headers={"idempotency-key": key})


def stop(sweep_id: str) -> Call[SweepState]:
    return Call("POST", f"{API}/sweeps/{_name(sweep_id)}/stop", _model(SweepState))


def retry(sweep_id: str) -> Call[SweepState]:
    return Call("POST", f"{API}/sweeps/{_name(sweep_id)}/retry", _model(SweepState))


def events_path(sweep_id: str) -> str:
    return f"{API}/sweeps/{_name(sweep_id)}/events"
