"""Creates the application from its settings: API, web page, documentation, health checks and metrics."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import swagger_ui_bundle
from anyio.to_thread import current_default_thread_limiter, run_sync
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.types import ASGIApp

from cope_services.http import reading, sweeps
from cope_services.http.access import READ, AllowedHosts, ApiKey, Authentication, KeysFile, is_loopback
from cope_services.http.caching import AnswerCache
from cope_services.http.components import Components, ComponentsDep, asked_queries
from cope_services.http.documents import Documents, documents_folder
from cope_services.http.errors import NotReadyError, add_common_errors, error_responses, install_error_handlers
from cope_services.http.following import Watchers
from cope_services.http.jobs import SweepJobs
from cope_services.http.metrics import AppMetrics, Measurement
from cope_services.http.middleware import (
    PAGE_POLICY,
    BodyLimit,
    HeadAsGet,
    Refusals,
    SecurityHeaders,
    compression,
)
from cope_services.http.settings import Settings
from cope_services.http.work import threads, work_queues
from cope_services.models import openai
from cope_services.models import routes as models
from cope_services.models.predictors import Predictors
from cope_sweep import __version__
from cope_sweep.errors import NotFoundError
from cope_sweep.read.figures.available import MAX_ROWS
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.queries.ablations import RESULTS
from cope_sweep.store import ParquetStore, open_store

DESCRIPTION = """\
Ablations, result tables, runs, checkpoints, perplexity and probes.

Errors have a `ProblemDetails` body (`application/problem+json`), except that an invalid `Range` header is answered in
plain text and the OpenAI protocol has its own error object. A server that listens on loopback only needs no keys.
"""


def guarded(app: ASGIApp, settings: Settings, *, always_asks_keys: bool) -> ASGIApp:
    """An application with the limits, hosts and keys of the settings. The body of a refused request is not read."""
    hosts = AllowedHosts(settings.host, settings.allowed_hosts)
    keys = Authentication(KeysFile(settings.keys_file), always_asks_keys)
    return Refusals(BodyLimit(app, settings.max_body_bytes), hosts.check, keys.check)


class Service(FastAPI):
    """The application inside middleware, so that internal errors, too, have security headers and are counted."""

    def __init__(self, settings: Settings, *, always_asks_keys: bool, **options: Any) -> None:
        super().__init__(
            title="cope-sweep", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None, **options
        )
        self.settings, self.always_asks_keys = settings, always_asks_keys
        self.components = self.state.components = components_of(settings)
        self.documents = documents_folder(settings.ablations)
        self.metrics = AppMetrics(self.components, lambda: self.components.queries.store)
        install_error_handlers(self, settings.hide_folders)

    def build_middleware_stack(self) -> ASGIApp:
        """Starlette's application, which routes requests and handles errors, inside this service's middleware."""
        # From the inside out. A refused request is counted, and its answer has the headers.
        app: ASGIApp = HeadAsGet(super().build_middleware_stack())
        app = guarded(app, self.settings, always_asks_keys=self.always_asks_keys)
        app = SecurityHeaders(compression(app))
        return Measurement(app, self.metrics, self.routes, log=self.settings.access_log)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, created once."""
        # FastAPI keeps the document, so it is changed in place, once.
        if self.openapi_schema is None:
            add_common_errors(super().openapi())
        return super().openapi()


def components_of(settings: Settings) -> Components:
    files = AblationFiles(settings.ablations, max_runs=settings.max_plan_runs, error_text=settings.hide_folders)
    queries = Queries(open_store(settings.store, index=settings.index or None), files, links=True, max_rows=MAX_ROWS)
    work = work_queues(settings.limits)
    return Components(
        queries=queries,
        committed=Queries(ParquetStore(settings.ablations / RESULTS), files, links=True, max_rows=MAX_ROWS),
        answers=AnswerCache(asked_queries, work["looks"]),
        work=work,
        predictors=Predictors(settings, work["drawings"]),
        sweeps=SweepJobs(queries, settings),
        watchers=Watchers(lambda: queries.store),
    )


# -- the web page, the documentation, health checks, metrics, and the version ------------------------------------------

PAGE = Path(__file__).parent.parent / "page"
DOCUMENTATION = Path(__file__).parent / "documentation"
DOCUMENTATION_FILES = {
    "docs.js": DOCUMENTATION / "docs.js",
    "swagger-ui-bundle.js": Path(swagger_ui_bundle.swagger_ui_path) / "swagger-ui-bundle.js",
    "swagger-ui.css": Path(swagger_ui_bundle.swagger_ui_path) / "swagger-ui.css",
}
PAGE_HEADERS = {"content-security-policy": PAGE_POLICY}

pages = APIRouter(include_in_schema=False)
health = APIRouter(tags=["health"])
version = APIRouter(tags=["health"], dependencies=[READ])


@pages.get("/")
def dashboard_page(request: Request) -> HTMLResponse:
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    if request.app.documents is not None:
        text = text.replace('<a href="documents/index.html" hidden>', '<a href="documents/index.html">')
    return HTMLResponse(text, headers=PAGE_HEADERS)


@pages.get("/docs")
def documentation_page() -> FileResponse:
    return FileResponse(DOCUMENTATION / "index.html", headers=PAGE_HEADERS)


@pages.get("/docs/{name}")
def documentation_file(name: str) -> FileResponse:
    if name not in DOCUMENTATION_FILES:
        raise NotFoundError(f"the documentation has no file {name[:80]!r}; open /docs")
    return FileResponse(DOCUMENTATION_FILES[name])


class Health(BaseModel):
    status: str


@health.get("/health/live")
async def live() -> Health:
    """Answers if the process answers requests at all."""
    return Health(status="live")


@health.get("/health/ready", responses=error_responses(503))
async def ready(components: ComponentsDep) -> Health:
    """Answers 200 if the folder of the ablations is readable and the index answers."""
    try:
        await run_sync(components.queries.check, limiter=components.probes)
    except OSError as error:
        raise NotReadyError(
            f"cannot read {error.filename}: {error.strerror}; check the folder of --ablations"
        ) from error
    return Health(status="ready")


@health.get("/metrics", dependencies=[READ], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(request: Request, components: ComponentsDep) -> Response:
    """Counts, times and sizes in the text format of Prometheus."""
    text = await run_sync(generate_latest, request.app.metrics.registry, limiter=components.probes)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


class Version(BaseModel):
    version: str
    python: str
    torch: str
    can_submit: bool = Field(
        description="Whether the service has a cluster to train on, and the key of this request may submit sweeps."
    )


@version.get("/version")
async def get_version(request: Request, components: ComponentsDep) -> Version:
    """The versions of cope-sweep, Python and PyTorch, and whether sweeps can be submitted."""
    key: ApiKey | None = request.scope.get("cope_key")
    can_submit = bool(components.sweeps.settings.ray_address) and (key is None or key.may_submit)
    return Version(version=__version__, python=platform.python_version(), torch=_torch_version(), can_submit=can_submit)


@cache
def _torch_version() -> str:
    return metadata.version("torch")  # importing it would take seconds


# -- applications ------------------------------------------------------------------------------------------------------


def _include_models(app: FastAPI) -> None:
    """Add the routes that ask models, the OpenAI protocol, and the version."""
    _include_api(app, models.perplexity, models.probes, version)
    app.include_router(openai.models)
    app.include_router(openai.router)
    app.include_router(openai.router, prefix="/openai/{run_id}", dependencies=[Depends(openai.of_run)])


def _include_api(app: FastAPI, *routers: APIRouter) -> None:
    """Add routes below `/api/v1`.

    They are not nested in one more router: every request would pass through it, a fifth of the time of an answer.
    """
    for router in routers:
        busy = () if router is version else (429,)
        app.include_router(router, prefix="/api/v1", responses=error_responses(404, 422, *busy))


def create_model_app(settings: Settings) -> Service:
    """The application of a replica of Ray Serve. It always requires a key: Serve's proxies choose the address."""
    app = Service(settings, always_asks_keys=True)
    _include_models(app)
    return app


@asynccontextmanager
async def _in_background(app: Service) -> AsyncIterator[None]:
    """Size the pool of threads; while the application runs, record the end of sweeps whose jobs have died."""
    current_default_thread_limiter().total_tokens = threads(app.settings.limits)
    task = asyncio.create_task(app.components.sweeps.keep_reconciled())
    yield
    task.cancel()


def create_app(settings: Settings) -> Service:
    """The service for the ablations and the store of `settings`. Creating it reads no file and starts no thread."""
    app = Service(settings, always_asks_keys=not is_loopback(settings.host), lifespan=_in_background)
    app.include_router(health)
    _include_models(app)  # first: routers are tried in this order, and these requests are the most urgent
    _include_api(app, *reading.ROUTERS, *sweeps.ROUTERS)
    app.include_router(pages)
    app.mount("/static", StaticFiles(directory=PAGE))
    if app.documents is not None:
        app.mount("/documents", Documents(directory=app.documents, html=True))
    return app
