"""Routes of sweeps."""

from typing import Annotated

from fastapi import APIRouter, Query

from cope_services.access import READ
from cope_services.dependencies import ComponentsDep, Limit, Offset
from cope_sweep.queries.answers import SweepDetail, SweepPage

router = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[READ])


@router.get("")
def list_sweeps(
    components: ComponentsDep,
    ablation: Annotated[str | None, Query(description="Only the sweeps of this ablation.")] = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> SweepPage:
    """The sweeps of the store, newest first, with the present number of their runs by status."""
    return components.queries.sweeps(ablation=ablation, limit=limit, offset=offset)


@router.get("/{sweep_id}")
def get_sweep(sweep_id: str, components: ComponentsDep) -> SweepDetail:
    """One sweep: its runs and their status, its ablation file, command, code and machine, and its table."""
    return components.queries.sweep(sweep_id)
