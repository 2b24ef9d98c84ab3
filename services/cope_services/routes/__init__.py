"""The routes. Each validates its parameters and calls one function."""

from fastapi import APIRouter

from cope_services.routes import (
    ablations,
    dashboard,
    diff,
    documentation,
    health,
    metrics,
    openai,
    perplexity,
    probe,
    runs,
    sweeps,
    version,
)
from cope_services.schemas import error_responses

api = APIRouter(prefix="/api/v1", responses=error_responses(404, 422))
api.include_router(ablations.router)
api.include_router(runs.router)
api.include_router(sweeps.router)
api.include_router(perplexity.router)
api.include_router(probe.router)
api.include_router(diff.router)
api.include_router(version.router)

__all__ = ["api", "dashboard", "documentation", "health", "metrics", "openai"]
