"""Creates the application from its settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from cope_services.http import openapi_document
from cope_services.http.access import AllowedHosts, Authentication, is_loopback
from cope_services.http.body_limit import BodyLimit
from cope_services.http.components import Components
from cope_services.http.compression import Compression
from cope_services.http.errors import PlainErrors, install_error_handlers
from cope_services.http.headers import SecurityHeaders
from cope_services.http.keys import KeysFile
from cope_services.http.metrics import Measurement, Metrics
from cope_services.http.overload import OverloadGuard
from cope_services.http.routes import include_api, include_models, include_pages, pages
from cope_services.http.settings import Settings
from cope_sweep import __version__

DESCRIPTION = """\
Ablations, result tables, runs, checkpoints, perplexity and probes.

Every error has a `ProblemDetails` body, `application/problem+json`; the OpenAI protocol has its own. A server that
listens on loopback only, and has no keys, needs none.
"""


class Service(FastAPI):
    """The application, with middleware around everything: errors of the server have headers and are counted, too."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        super().__init__(
            title="cope_sweep", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None, **options
        )
        self.settings = settings
        self.state.components = Components.create(settings)
        components: Components = self.state.components
        self.metrics = Metrics(components.predictors, lambda: components.queries.store)

    def build_middleware_stack(self) -> ASGIApp:
        """The application of starlette, which routes requests and handles errors, in the middleware of this service."""
        settings = self.settings
        app: ASGIApp = super().build_middleware_stack()
        app = BodyLimit(app, settings.max_body_bytes)
        app = OverloadGuard(app, self.state.components.predictors.batcher)
        app = Authentication(app, KeysFile(settings.keys_file), always=not is_loopback(settings.host))
        app = PlainErrors(app)
        app = Compression(app)
        app = AllowedHosts(app, settings.host, settings.allowed_hosts)
        app = SecurityHeaders(app)
        return Measurement(app, self.metrics, self.routes, log=settings.access_log)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document; it is made once."""
        if self.openapi_schema is None:
            openapi_document.complete(super().openapi())
        return super().openapi()


class ModelRoutes(Service):
    """The routes that ask models, without the checks of keys, hosts and sizes: a gateway has made them."""

    def build_middleware_stack(self) -> ASGIApp:
        """The application of starlette, which refuses requests while the queue of its models is full."""
        return OverloadGuard(FastAPI.build_middleware_stack(self), self.state.components.predictors.batcher)

    async def find_run(self, run_id: str) -> None:
        """Find a finished run. Raises NotFoundError, NotFinishedError, StoreError."""
        components: Components = self.state.components
        await components.predictors.folders.get(run_id, lambda: components.finished.find(run_id))


def create_model_app(settings: Settings) -> ModelRoutes:
    """The application of a replica of Ray Serve."""
    app = ModelRoutes(settings)
    install_error_handlers(app, settings.shown_paths)
    include_models(app)
    return app


@asynccontextmanager
async def _with_sweeps(app: Service) -> AsyncIterator[None]:
    """While the application runs, sweeps whose jobs have died are noticed."""
    task = asyncio.create_task(app.state.components.sweeps.keep_reconciled())
    yield
    task.cancel()


def create_app(settings: Settings) -> Service:
    """The service for the ablations and the store of `settings`. This reads no file and starts no thread."""
    app = Service(settings, lifespan=_with_sweeps)
    install_error_handlers(app, settings.shown_paths)
    app.include_router(pages.health)
    app.include_router(pages.metrics)
    include_models(app)  # first: routers are asked in this order, and these requests take part of the models' cores
    include_api(app)
    include_pages(app)
    return app
