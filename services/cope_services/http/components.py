"""Dependencies of the routes: the components of the application, and validated parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Header, Request

from cope_services.http.cached_route import Answers
from cope_services.http.errors import MediaTypeError
from cope_services.http.freshness import Freshness
from cope_services.http.pictures import Pictures
from cope_services.http.plans import Plans
from cope_services.http.settings import Settings
from cope_services.http.sweep_events import Watchers
from cope_services.http.sweep_jobs import SweepJobs
from cope_services.http.tables import Tables
from cope_services.models.checkpoints import Checkpoints
from cope_services.models.connection import while_connected
from cope_services.models.predictors import FinishedRuns, Predictors
from cope_sweep.read.queries import AblationFiles, NotFoundError, Queries
from cope_sweep.store import RunFolder, Store

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
        """Result of `work`, unless there are too many requests, the client leaves, or the time limit is over."""
        with self.predictors.batcher.entered():
            return await while_connected(request, work(), self.predictors.settings.max_seconds)

    async def predictor(self, run_id: str) -> Predictor:
        """The model of a finished run. Raises as `Predictors.get`."""
        return await self.find(lambda: self.predictors.get(run_id, lambda: self.finished.find(run_id)))

    async def find(self, work: Callable[[], Awaitable[T]]) -> T:
        """Result of `work`. A run that it does not find may be in a plan that is not made yet: then once more."""
        try:
            return await work()
        except NotFoundError:
            await self.plans.prepare_all()
            return await work()

    @classmethod
    def create(cls, settings: Settings) -> Components:
        files = AblationFiles(
            settings.ablations, max_runs=settings.max_plan_runs, waits=False, error_text=settings.shown_paths
        )
        queries = Queries(Store(settings.store, index=settings.index or None), files)
        checkpoints = Checkpoints()
        predictors = Predictors(checkpoints, settings)
        answers, plans, finished = Answers(Freshness(queries)), Plans(files), FinishedRuns(queries)
        jobs = SweepJobs(queries, settings)
        watchers = Watchers(lambda: queries.store, settings.max_listeners)
        tables, pictures = Tables(queries), Pictures(queries)
        return cls(
            queries, answers, plans, tables, pictures, checkpoints, predictors, finished, jobs, watchers
        )  # fmt: skip


async def _components(request: Request) -> Components:
    components: Components = request.app.state.components
    return components


async def _require_json(request: Request) -> None:
    """Raise MediaTypeError unless the body is declared as JSON.

    A browser sends other types to another origin without a CORS preflight request, so they are refused.
    """
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise MediaTypeError(f"the body's Content-Type is {media or 'missing'!r}; send application/json")


ComponentsDep = Annotated[Components, Depends(_components)]


def _finished_run(run_id: str, components: ComponentsDep) -> RunFolder:
    return components.queries.finished(run_id)


async def _prepare_all(components: ComponentsDep) -> None:
    await components.plans.prepare_all()


PreparePlans = Depends(_prepare_all)
"""The plans of all ablations are made, or are being made."""
FinishedRun = Annotated[RunFolder, Depends(_finished_run)]
RequireJson = Depends(_require_json)
Accept = Annotated[str | None, Header(description="Media type of the file; the parameter `format` has priority.")]
IfNoneMatch = Annotated[str | None, Header(description="ETag of the version that the client has.")]
