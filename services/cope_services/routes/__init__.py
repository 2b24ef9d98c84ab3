"""The endpoints: words in, one call each."""

from fastapi import APIRouter

from cope_services.routes import ablations, dashboard, health, runs
from cope_services.schemas import problems

api = APIRouter(prefix="/api/v1", responses=problems(404, 422))
api.include_router(ablations.router)
api.include_router(runs.router)

__all__ = ["api", "dashboard", "health"]
