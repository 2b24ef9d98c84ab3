"""Dependencies of the routes: the components of the application, and validated parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

from anyio import CapacityLimiter
from fastapi import Depends, Header, Request
from pydantic import TypeAdapter, ValidationError

from cope_services.http.connection import while_connected
from cope_services.http.errors import MediaTypeError
from cope_sweep.read.queries import Queries
from cope_sweep.store import RunFolder

if TYPE_CHECKING:
    from cope_services.http.caching import AnswerCache
    from cope_services.http.following import Watchers
    from cope_services.http.jobs import SweepJobs
    from cope_services.http.work import WorkQueues
    from cope_services.models.predictors import Predictors
    from cope_sweep.inference import Predictor

T = TypeVar("T")
_BOOL = TypeAdapter(bool)

PROBES = 4
"""Health checks and scrapes of metrics that are answered at a time."""


@dataclass(frozen=True)
class Components:
    """The objects that answer the requests to an application."""

    queries: Queries
    committed: Queries
    """The same for the results beside the ablation files: what `?committed=true` asks."""
    answers: AnswerCache
    work: WorkQueues
    predictors: Predictors
    sweeps: SweepJobs
    watchers: Watchers
    probes: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(PROBES))
    """Threads of health checks and metrics, which wait for no other request."""

    async def infer(self, request: Request, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`. Raises an error if the client leaves, or time runs out."""
        return await while_connected(request, work(), self.predictors.settings.max_seconds)

    async def best_run_id(self, ablation: str, row: str, scale: str | None, sets: Sequence[str]) -> str:
        """The id of the row's best finished run; requests share a look-up. Raises what `Queries.best_of_row` raises."""
        find = partial(self.queries.best_of_row, ablation, row, scale, sets)
        return await self.predictors.look_up((ablation, row, scale, *sets), find)

    async def predictor(self, run_id: str) -> Predictor:
        """The model of a finished run. Raises the errors of `Predictors.get`."""
        return await self.predictors.get(run_id, lambda: self.queries.finished(run_id))


def asked_queries(request: Request) -> Queries:
    """What answers a request: the store, or with `?committed=true` the results beside the ablation files."""
    components: Components = request.app.state.components
    try:
        is_committed = _BOOL.validate_python(request.query_params.get("committed", False))
    except ValidationError:  # the route, which has the same parameter, refuses the value
        is_committed = False
    return components.committed if is_committed else components.queries


async def _components(request: Request) -> Components:
    components: Components = request.app.state.components
    return components


AskedQueries = Annotated[Queries, Depends(asked_queries)]
ComponentsDep = Annotated[Components, Depends(_components)]
IfNoneMatch = Annotated[str | None, Header(description="ETag of the version that the client has.")]


async def _require_json(request: Request) -> None:
    """Raise MediaTypeError unless the body is declared as JSON.

    Other types are refused because a browser sends them to another origin without a CORS preflight request.
    """
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise MediaTypeError(
            f"the Content-Type of the body is {media or 'missing'!r}; send `Content-Type: application/json`"
        )


def _finished_run(run_id: str, components: ComponentsDep) -> RunFolder:
    return components.queries.finished(run_id)


async def _document_etag(if_none_match: IfNoneMatch = None) -> None:
    """Documents the header, which `CachedRoute` reads."""


RequireJson = Depends(_require_json)
WithETag = Depends(_document_etag)
FinishedRun = Annotated[RunFolder, Depends(_finished_run)]
Accept = Annotated[str | None, Header(description="Media type of the file; the parameter `format` takes precedence.")]
