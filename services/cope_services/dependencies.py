"""Dependencies of the routes: the components of the application, and validated parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Query, Request

from cope_services.catalogue import Catalogue
from cope_services.checkpoints import Checkpoints
from cope_services.errors import MediaTypeError
from cope_services.library import Library
from cope_services.predictors import Predictors
from cope_services.settings import Settings
from cope_services.tables import Tables
from cope_sweep.store import RunFolder, Status, Store


@dataclass(frozen=True)
class Components:
    """The objects that answer the requests of an application."""

    library: Library
    tables: Tables
    checkpoints: Checkpoints
    predictors: Predictors

    @classmethod
    def create(cls, settings: Settings) -> Components:
        library = Library(Catalogue(settings.ablations), Store(settings.store))
        checkpoints = Checkpoints()
        predictors = Predictors(
            checkpoints,
            device=settings.device,
            max_models=settings.max_models,
            max_inferences=settings.max_inferences,
            max_tokens=settings.max_tokens,
            max_probe_values=settings.max_probe_values,
        )
        return cls(library, Tables(library), checkpoints, predictors)


def _components(request: Request) -> Components:
    components: Components = request.app.state.components
    return components


def _require_json(content_type: Annotated[str | None, Header()] = None) -> None:
    """Raise MediaTypeError unless the body is declared as JSON.

    A browser sends other types to another origin without a CORS preflight request, so they are refused.
    """
    media = (content_type or "").split(";")[0].strip().lower()
    if media != "application/json":
        raise MediaTypeError(f"the body's Content-Type is {media or 'missing'!r}; send application/json")


ComponentsDep = Annotated[Components, Depends(_components)]


def _finished_run(run_id: str, components: ComponentsDep) -> RunFolder:
    return components.library.finished(run_id)


FinishedRun = Annotated[RunFolder, Depends(_finished_run)]
RequireJson = Depends(_require_json)
Scale = Annotated[str | None, Query(description="One of the ablation's scales.", max_length=100)]
StatusFilter = Annotated[Status | None, Query(description="Only runs with this status.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of runs.")]
Offset = Annotated[int, Query(ge=0, le=2**31, description="Number of runs to skip.")]
Accept = Annotated[str | None, Header(description="Media type of the table; the parameter `format` has priority.")]
IfNoneMatch = Annotated[str | None, Header(description="ETag of the version that the client has.")]
