"""Creates the application from its settings."""

from __future__ import annotations

from fastapi import FastAPI

from cope_services.body_limit import BodyLimit
from cope_services.dependencies import Components
from cope_services.errors import PlainErrors, install_error_handlers
from cope_services.openapi_document import complete
from cope_services.routes import api, dashboard, health, openai
from cope_services.settings import Settings
from cope_sweep import __version__


def create_app(settings: Settings) -> FastAPI:
    """The service for the ablations and the store of `settings`. This reads no file and starts no thread."""
    app = FastAPI(
        title="cope_sweep",
        version=__version__,
        description="Ablations, result tables, runs, checkpoints, perplexity and probes. "
        "Every error has a `ProblemDetails` body, `application/problem+json`; the OpenAI protocol has its own.",
    )
    app.state.components = Components.create(settings)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(PlainErrors)
    install_error_handlers(app)
    app.include_router(health.router)
    app.include_router(api)
    app.include_router(openai.router)
    app.include_router(openai.run_router)
    app.include_router(dashboard.router)
    app.mount("/static", dashboard.assets)
    complete(app)
    return app
