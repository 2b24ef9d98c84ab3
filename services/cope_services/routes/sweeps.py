"""Routes of sweeps."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from cope_services.access import READ
from cope_services.cached_route import CachedRoute
from cope_services.dependencies import ComponentsDep, IfNoneMatch, Limit, Offset
from cope_services.responses import json_response
from cope_sweep.queries.answers import SweepDetail, SweepPage

router = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[READ], route_class=CachedRoute)


@router.get("", response_model=SweepPage, responses={304: {}})
def list_sweeps(
    components: ComponentsDep,
    ablation: Annotated[str | None, Query(description="Only the sweeps of this ablation.", max_length=200)] = None,
    limit: Limit = 100,
    offset: Offset = 0,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The sweeps of the store, newest first, with the present number of their runs by status."""
    return json_response(components.queries.sweeps(ablation=ablation, limit=limit, offset=offset))


@router.get("/{sweep_id}", response_model=SweepDetail, responses={304: {}})
def get_sweep(sweep_id: str, components: ComponentsDep, if_none_match: IfNoneMatch = None) -> Response:
    """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""
    return json_response(components.queries.sweep(sweep_id))
