"""Routes of ablations: plans, tables and learning curves."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from cope_services.dependencies import Accept, ComponentsDep, IfNoneMatch, Limit, Offset, Scale, StatusFilter
from cope_services.responses import conditional_response
from cope_services.schemas import AblationDetail, AblationSummary, Curves, Responses, RunPage, error_responses
from cope_services.tables import MEDIA_TYPES, TableFormat, negotiate

router = APIRouter(prefix="/ablations", tags=["ablations"], responses=error_responses(409))

FORMATS: Responses = {200: {"content": {media: {} for media in MEDIA_TYPES.values()}}, 304: {}, **error_responses(406)}


@router.get("")
def list_ablations(components: ComponentsDep) -> list[AblationSummary]:
    """All ablations, with the number of runs by status."""
    return components.library.ablations()


@router.get("/{name}")
def get_ablation(name: str, components: ComponentsDep, scale: Scale = None) -> AblationDetail:
    """One ablation: its rows, runs and file."""
    return components.library.ablation(name, scale)


@router.get("/{name}/table", response_class=Response, responses=FORMATS)
def get_table(
    name: str,
    components: ComponentsDep,
    format: Annotated[TableFormat | None, Query(description="Default: by the Accept header, else JSON.")] = None,  # noqa: A002
    scale: Scale = None,
    runs: Annotated[bool, Query(description="CSV only: one line per run instead of one per row.")] = False,
    accept: Accept = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The result table: mean ± standard deviation over seeds, and the published numbers."""
    return conditional_response(
        components.tables.table(name, scale, negotiate(format, accept), runs=runs), if_none_match
    )


@router.get("/{name}/curves", response_class=Response, responses={200: {"model": Curves}, 304: {}})
def get_curves(
    name: str,
    components: ComponentsDep,
    metric: Annotated[str | None, Query(description="Default: the first metric of the table.", max_length=200)] = None,
    scale: Scale = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Learning curves of a metric: every run, at most about 200 points each."""
    return conditional_response(components.tables.curves(name, scale, metric), if_none_match)


@router.get("/{name}/runs")
def list_planned_runs(
    name: str,
    components: ComponentsDep,
    status: StatusFilter = None,
    scale: Scale = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> RunPage:
    """The runs of an ablation in plan order, including pending ones."""
    return components.library.runs(status=status, ablation=name, scale=scale, limit=limit, offset=offset)
