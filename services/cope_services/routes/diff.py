"""Routes that compare runs: differences, and curves of several runs."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from cope_services.access import READ
from cope_services.cached_route import RunFilesRoute
from cope_services.dependencies import ComponentsDep, IfNoneMatch
from cope_services.responses import json_response
from cope_sweep.queries.answers import CurvesOfRuns, RunsDifference

router = APIRouter(tags=["runs"], dependencies=[READ], responses={304: {}}, route_class=RunFilesRoute)

Side = Annotated[str, Query(description="The id of a run or sweep.", max_length=100)]
Points = Annotated[
    int | None,
    Query(ge=4, le=10_000, description="At most so many points of a run; spikes stay. Default: all."),
]


@router.get("/diff", response_model=RunsDifference)
def get_difference(left: Side, right: Side, components: ComponentsDep, if_none_match: IfNoneMatch = None) -> Response:
    """Differences between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test."""
    return json_response(components.queries.difference(left, right))


@router.get("/curves", response_model=CurvesOfRuns)
def get_curves_of_runs(
    run: Annotated[list[str], Query(min_length=1, max_length=100, description="The id of a run. May be repeated.")],
    metric: Annotated[str, Query(description="A metric that the runs have logged: `train/loss`.", max_length=200)],
    components: ComponentsDep,
    points: Points = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """A metric of several runs, by step and by seconds since each run began.

    A run whose curve cannot be read has no points.
    """
    return json_response(components.queries.curves_of(list(dict.fromkeys(run)), metric, points))
