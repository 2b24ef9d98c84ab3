"""The routes. Each validates its parameters and calls one function."""

from fastapi import FastAPI

from cope_services.http import pages, reading, sweep_actions
from cope_services.http.schemas import error_responses
from cope_services.models import openai
from cope_services.models import routes as models

API_ROUTERS = (
    reading.ablations,
    reading.pages,
    reading.exports,
    reading.files,
    reading.checkpoints,
    reading.sweeps,
    sweep_actions.router,
    sweep_actions.followed,
    reading.comparisons,
)
MODEL_ROUTERS = (models.perplexity, models.probes, pages.version)
"""Routes below `/api/v1` that ask models, or say what runs here."""


def include_api(app: FastAPI) -> None:
    """Add the routes below `/api/v1`.

    They are not nested in a router of their own: every request would pass it, which takes a fifth of an answer's time.
    """
    for router in API_ROUTERS:
        app.include_router(router, prefix="/api/v1", responses=error_responses(404, 422))


def include_models(app: FastAPI) -> None:
    """Add the routes that ask models, and those of the OpenAI protocol."""
    for router in MODEL_ROUTERS:
        app.include_router(router, prefix="/api/v1", responses=error_responses(404, 422))
    app.include_router(openai.router)
    app.include_router(openai.run_router)


def include_pages(app: FastAPI) -> None:
    """Add the web page and the documentation."""
    app.include_router(pages.dashboard)
    app.include_router(pages.documentation)
    app.mount("/static", pages.assets)


__all__ = ["include_api", "include_models", "include_pages", "pages"]
