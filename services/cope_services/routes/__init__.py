"""The routes. Each validates its parameters and calls one function."""

from fastapi import FastAPI

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
    sweep_actions,
    sweeps,
    version,
)
from cope_services.schemas import error_responses

API_ROUTERS = (
    ablations.router,
    runs.pages,
    runs.files,
    runs.checkpoints,
    sweeps.router,
    sweep_actions.router,
    sweep_actions.followed,
    perplexity.router,
    probe.router,
    diff.router,
    version.router,
)


def include_api(app: FastAPI) -> None:
    """Add the routes below `/api/v1`.

    They are not nested in a router of their own: every request would pass it, which takes a fifth of an answer's time.
    """
    for router in API_ROUTERS:
        app.include_router(router, prefix="/api/v1", responses=error_responses(404, 422))


__all__ = ["dashboard", "documentation", "health", "include_api", "metrics", "openai"]
