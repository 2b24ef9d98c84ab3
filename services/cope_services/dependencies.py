"""Dependencies of the routes: the components of the application, and validated parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from fastapi import Depends, Header, Path, Query, Request

from cope_services.cached_route import Answers
from cope_services.checkpoints import Checkpoints
from cope_services.connection import while_connected
from cope_services.errors import MediaTypeError
from cope_services.freshness import Freshness
from cope_services.pictures import Pictures
from cope_services.plans import Plans
from cope_services.predictors import FinishedRuns, Predictors
from cope_services.settings import Settings
from cope_services.sweep_events import Watchers
from cope_services.sweep_jobs import SweepJobs
from cope_services.tables import Tables
from cope_sweep.queries import AblationFiles, Queries, parse_filter
from cope_sweep.store import RunFolder, RunQuery, Status, Store

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor

T = TypeVar("T")


@dataclass(frozen=True)
class Components:
    """The objects that answer the requests of an application."""

    queries: Queries
    answers: Answers
    plans: Plans
    tables: Tables
    pictures: Pictures
    checkpoints: Checkpoints
    predictors: Predictors
    finished: FinishedRuns
    sweeps: SweepJobs
    watchers: Watchers

    async def infer(self, request: Request, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns, unless there are too many requests, the client leaves, or the time limit is over."""
        with self.predictors.batcher.entered():
            return await while_connected(request, work(), self.predictors.settings.max_seconds)

    async def predictor(self, run_id: str) -> Predictor:
        """The model of a finished run. Raises as `Predictors.get`."""
        return await self.predictors.get(run_id, lambda: self.finished.find(run_id))

    @classmethod
    def create(cls, settings: Settings) -> Components:
        files = AblationFiles(settings.ablations, max_runs=settings.max_plan_runs, waits=False)
        queries = Queries(Store(settings.store, index=settings.index or None), files)
        checkpoints = Checkpoints()
        predictors = Predictors(checkpoints, settings)
        answers, plans, finished = Answers(Freshness(queries)), Plans(files), FinishedRuns(queries)
        jobs = SweepJobs(queries, settings)
        watchers = Watchers(lambda: queries.store, jobs, settings.max_listeners)
        tables, pictures = Tables(queries), Pictures(queries)
        return cls(
            queries, answers, plans, tables, pictures, checkpoints, predictors, finished, jobs, watchers
        )  # fmt: skip


async def _components(request: Request) -> Components:
    components: Components = request.app.state.components
    return components


async def _require_json(content_type: Annotated[str | None, Header()] = None) -> None:
    """Raise MediaTypeError unless the body is declared as JSON.

    A browser sends other types to another origin without a CORS preflight request, so they are refused.
    """
    media = (content_type or "").split(";")[0].strip().lower()
    if media != "application/json":
        raise MediaTypeError(f"the body's Content-Type is {media or 'missing'!r}; send application/json")


ComponentsDep = Annotated[Components, Depends(_components)]
Scale = Annotated[str | None, Query(description="One of the ablation's scales.", max_length=100)]
AblationFilter = Annotated[
    str | None, Query(description="Only the runs of this ablation, in plan order.", max_length=200)
]
StatusFilter = Annotated[Status | None, Query(description="Only runs with this status.")]
Filters = Annotated[
    list[str],
    Query(
        alias="filter",
        max_length=20,
        description="Conditions that have to hold: `model.layers>=4`, `model.position=cope`, `in_dist/loss<0.5`, "
        "`facts.device=cuda`, `tags.row=CoPE` (also `tags.sweep`, `tags.ablation`, and the label of an axis). A run "
        "that lacks the key does not match.",
    ),
]
RunIds = Annotated[
    list[str] | None,
    Query(alias="run", max_length=1000, description="Only these runs, by their ids, in this order. May be repeated."),
]
SweepFilter = Annotated[str | None, Query(description="Only the runs of this sweep.", max_length=100)]
Sort = Annotated[str, Query(description="A key as in `filter`, or run_id, status, seed, step, created_ms.")]
Order = Annotated[Literal["asc", "desc"], Query(description="Runs without the key come last.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of runs or sweeps.")]
Cursor = Annotated[
    str | None,
    Query(description="`next` of the page before. Pages stay exact while runs arrive and end.", max_length=2000),
]
Fields = Annotated[
    list[str],
    Query(
        max_length=50,
        description="What is shown of each run, as names of its fields (`status,step,metrics`) and keys as in `filter` "
        "(`model.layers`), whose values are in `values`. May be repeated. Default: all fields.",
    ),
]
Offset = Annotated[int, Query(ge=0, le=2**31, description="Number of runs or sweeps to skip.")]


def _run_query(
    status: StatusFilter = None,
    filters: Filters = [],  # noqa: B006 - FastAPI copies it
    run: RunIds = None,
    sweep: SweepFilter = None,
    sort: Sort = "run_id",
    order: Order = "asc",
    limit: Limit = 100,
    offset: Offset = 0,
) -> RunQuery:
    """The query in the parameters of a request. Raises QueryError."""
    return RunQuery(
        (status,) if status else (),
        run_ids=None if run is None else tuple(run),
        sweep_id=sweep,
        filters=tuple(map(parse_filter, filters)),
        sort=sort,
        descending=order == "desc",
        limit=limit,
        offset=offset,
    )


def _finished_run(run_id: str, components: ComponentsDep) -> RunFolder:
    return components.queries.finished(run_id)


async def _prepare(components: ComponentsDep, name: Annotated[str, Path(max_length=200)], scale: Scale = None) -> None:
    await components.plans.prepare(name, scale)


async def _prepare_all(components: ComponentsDep) -> None:
    await components.plans.prepare_all()


async def _prepare_named(components: ComponentsDep, ablation: AblationFilter = None, scale: Scale = None) -> None:
    await components.plans.prepare_all()
    if ablation is not None:
        await components.plans.prepare(ablation, scale)


PreparePlan = Depends(_prepare)
"""The plan of the ablation in the path is made when the route is called, if it can be made."""
PreparePlans = Depends(_prepare_all)
"""The plans of all ablations are made, or are being made."""
PrepareNamedPlan = Depends(_prepare_named)
"""Both, for the ablation in the query."""
RunQueryDep = Annotated[RunQuery, Depends(_run_query)]
FinishedRun = Annotated[RunFolder, Depends(_finished_run)]
RequireJson = Depends(_require_json)
Accept = Annotated[str | None, Header(description="Media type of the table; the parameter `format` has priority.")]
IfNoneMatch = Annotated[str | None, Header(description="ETag of the version that the client has.")]
