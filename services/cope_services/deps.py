"""What routes ask for: the app's parts, and checked parameters."""

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
from cope_sweep.record import Ledger, RunFolder, Status


@dataclass(frozen=True)
class Parts:
    """Everything that an app is made of."""

    library: Library
    tables: Tables
    checkpoints: Checkpoints
    predictors: Predictors

    @classmethod
    def of(cls, settings: Settings) -> Parts:
        library = Library(Catalogue(settings.ablations), Ledger(settings.store))
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


def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


def _json_only(content_type: Annotated[str | None, Header()] = None) -> None:
    """A browser sends any other type across origins without asking, so only JSON is taken."""
    media = (content_type or "").split(";")[0].strip().lower()
    if media != "application/json":
        raise MediaTypeError(f"the body's Content-Type is {media or 'missing'!r}; send application/json")


PartsDep = Annotated[Parts, Depends(_parts)]


def _finished(run_id: str, parts: PartsDep) -> RunFolder:
    return parts.library.finished(run_id)


FinishedRun = Annotated[RunFolder, Depends(_finished)]
JsonOnly = Depends(_json_only)
Scale = Annotated[str | None, Query(description="One of the ablation's named sizes.", max_length=100)]
StatusFilter = Annotated[Status | None, Query(description="Only runs that stand there.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Runs on a page.")]
Offset = Annotated[int, Query(ge=0, le=2**31, description="Runs to leave out first.")]
Accept = Annotated[str | None, Header(description="A table's media type; `format` wins.")]
IfNoneMatch = Annotated[str | None, Header(description="The ETag of what you have.")]
