"""Routes of sweeps."""

from fastapi import APIRouter

from cope_services.access import READ
from cope_services.cached_route import CachedRoute
from cope_services.questions import add_questions
from cope_sweep.api.questions import GetSweep, ListSweeps

router = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[READ], responses={304: {}}, route_class=CachedRoute)
add_questions(router, ListSweeps, GetSweep)
