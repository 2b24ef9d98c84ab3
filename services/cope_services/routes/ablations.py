"""Ablations: their plans, tables and learning curves."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from cope_services.deps import Accept, IfNoneMatch, Limit, Offset, PartsDep, Scale, StatusFilter
from cope_services.responses import tagged
from cope_services.schemas import AblationDetail, AblationSummary, Curves, Responses, RunPage, problems
from cope_services.tables import MEDIA_TYPES, TableFormat, negotiate

router = APIRouter(prefix="/ablations", tags=["ablations"], responses=problems(409))

FORMATS: Responses = {200: {"content": {media: {} for media in MEDIA_TYPES.values()}}, 304: {}, **problems(406)}


@router.get("")
def list_ablations(parts: PartsDep) -> list[AblationSummary]:
    """All ablations and how far their runs are."""
    return parts.library.ablations()


@router.get("/{name}")
def get_ablation(name: str, parts: PartsDep, scale: Scale = None) -> AblationDetail:
    """One ablation: its rows, runs and file."""
    return parts.library.ablation(name, scale)


@router.get("/{name}/table", response_class=Response, responses=FORMATS)
def get_table(
    name: str,
    parts: PartsDep,
    format: Annotated[TableFormat | None, Query(description="Default: as Accept says; JSON.")] = None,  # noqa: A002
    scale: Scale = None,
    runs: Annotated[bool, Query(description="CSV only: a line for each run, not for each row.")] = False,
    accept: Accept = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Mean ± standard deviation over seeds, beside the published numbers."""
    return tagged(parts.tables.table(name, scale, negotiate(format, accept), runs=runs), if_none_match)


@router.get("/{name}/curves", response_class=Response, responses={200: {"model": Curves}, 304: {}})
def get_curves(
    name: str,
    parts: PartsDep,
    metric: Annotated[str | None, Query(description="Default: the first of the table.", max_length=200)] = None,
    scale: Scale = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """A metric of every run by step, thinned to 200 points each: what a plot needs."""
    return tagged(parts.tables.curves(name, scale, metric), if_none_match)


@router.get("/{name}/runs")
def list_planned_runs(
    name: str,
    parts: PartsDep,
    status: StatusFilter = None,
    scale: Scale = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> RunPage:
    """The runs of an ablation in the order of its plan, pending ones too."""
    return parts.library.runs(status=status, ablation=name, scale=scale, limit=limit, offset=offset)
