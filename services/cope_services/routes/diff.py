"""The route that compares two runs or two sweeps."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from cope_services.access import READ
from cope_services.dependencies import ComponentsDep
from cope_services.schemas import error_responses

router = APIRouter(prefix="/diff", tags=["runs"], dependencies=[READ], responses=error_responses(404, 422))

Side = Annotated[str, Query(description="The id of a run or sweep.", max_length=100)]


@router.get("")
def get_difference(left: Side, right: Side, components: ComponentsDep) -> dict[str, Any]:
    """What differs between two runs or two sweeps: spec, facts, and metrics (right minus left) with a test."""
    return components.queries.difference(left, right).to_json()
