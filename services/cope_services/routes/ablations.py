"""Routes of ablations: plans, tables and learning curves."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from cope_services.access import READ
from cope_services.dependencies import Accept, ComponentsDep, IfNoneMatch, RunQueryDep, Scale
from cope_services.responses import conditional_response
from cope_services.schemas import Responses, error_responses
from cope_services.tables import negotiate
from cope_sweep.queries.answers import AblationDetail, AblationSummary, Curves, RunPage
from cope_sweep.results.formats import formats

router = APIRouter(prefix="/ablations", tags=["ablations"], dependencies=[READ], responses=error_responses(409))

FORMATS: Responses = {
    200: {"content": {each.media_type: {} for each in formats().values()}}, 304: {}, **error_responses(406),
}  # fmt: skip


@router.get("")
def list_ablations(components: ComponentsDep) -> list[AblationSummary]:
    """All ablations, with the number of runs by status."""
    return components.queries.ablations()


@router.get("/{name}")
def get_ablation(name: str, components: ComponentsDep, scale: Scale = None) -> AblationDetail:
    """One ablation: its rows, runs and file."""
    return components.queries.ablation(name, scale)


@router.get("/{name}/table", response_class=Response, responses=FORMATS)
def get_table(
    name: str,
    components: ComponentsDep,
    format: Annotated[  # noqa: A002
        str | None,
        Query(description="Default: by the Accept header, else JSON.", json_schema_extra={"enum": list(formats())}),
    ] = None,
    scale: Scale = None,
    runs: Annotated[bool, Query(description="CSV and Parquet: one line per run instead of one per row.")] = False,
    compare: Annotated[
        str | None,
        Query(description="Compare the rows with this one, or with the published numbers: `paper`.", max_length=500),
    ] = None,
    accept: Accept = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The result table: mean ± standard deviation over seeds, and the published numbers."""
    return conditional_response(
        components.tables.table(name, scale, negotiate(format, accept), runs=runs, against=compare), if_none_match
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
def list_planned_runs(name: str, components: ComponentsDep, query: RunQueryDep, scale: Scale = None) -> RunPage:
    """The runs of an ablation in plan order, including pending ones; with a filter or order, those that were begun."""
    return components.queries.runs(query, ablation=name, scale=scale)
