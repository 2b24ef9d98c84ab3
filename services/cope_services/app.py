"""The application, from its settings."""

from __future__ import annotations

from fastapi import FastAPI

from cope_services import errors
from cope_services.bodies import BodyLimit
from cope_services.deps import Parts
from cope_services.routes import api, dashboard, health
from cope_services.settings import Settings
from cope_sweep import __version__


def create_app(settings: Settings) -> FastAPI:
    """The service over the ablations and the store of `settings`. Creating it reads nothing and starts nothing."""
    app = FastAPI(
        title="cope_sweep",
        version=__version__,
        description="Ablations, tables, runs, checkpoints and perplexity. Every error is a `Problem`.",
    )
    app.state.parts = Parts.of(settings)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    errors.install(app)
    app.include_router(health.router)
    app.include_router(api)
    app.include_router(dashboard.router)
    app.mount("/static", dashboard.assets)
    return app
