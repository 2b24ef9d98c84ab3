"""The web page at `/`, the documentation at `/docs`, health checks, metrics, and what runs here."""

import platform
from functools import cache
from importlib import metadata
from pathlib import Path

import swagger_ui_bundle
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from cope_services.http.access import READ
from cope_services.http.cached_route import ReadRoute
from cope_services.http.components import ComponentsDep
from cope_services.http.errors import NotReadyError
from cope_services.http.headers import PAGE_POLICY
from cope_services.http.keys import ApiKey
from cope_services.http.schemas import Health, error_responses
from cope_sweep import __version__
from cope_sweep.errors import NotFoundError

DASHBOARD = Path(__file__).parent.parent / "page"
HEADERS = {"content-security-policy": PAGE_POLICY}

dashboard = APIRouter(include_in_schema=False, route_class=ReadRoute)
assets = StaticFiles(directory=DASHBOARD)


@dashboard.get("/")
def dashboard_page() -> FileResponse:
    return FileResponse(DASHBOARD / "index.html", headers=HEADERS)


DOCUMENTATION = Path(__file__).parent / "documentation"
DOCUMENTATION_FILES = {
    "docs.js": DOCUMENTATION / "docs.js",
    "swagger-ui-bundle.js": Path(swagger_ui_bundle.swagger_ui_path) / "swagger-ui-bundle.js",
    "swagger-ui.css": Path(swagger_ui_bundle.swagger_ui_path) / "swagger-ui.css",
}

documentation = APIRouter(include_in_schema=False, route_class=ReadRoute)


@documentation.get("/docs")
def documentation_page() -> FileResponse:
    return FileResponse(DOCUMENTATION / "index.html", headers={"content-security-policy": PAGE_POLICY})


@documentation.get("/docs/{name}")
def documentation_file(name: str) -> FileResponse:
    if name not in DOCUMENTATION_FILES:
        raise NotFoundError(f"the documentation has no file {name[:80]!r}")
    return FileResponse(DOCUMENTATION_FILES[name])


health = APIRouter(prefix="/health", tags=["health"], route_class=ReadRoute)


@health.get("/live")
async def live() -> Health:
    """The process answers requests."""
    return Health(status="live")


@health.get("/ready", responses=error_responses(503))
def ready(components: ComponentsDep) -> Health:
    """The folder of the ablations can be read, and the index answers."""
    try:
        components.queries.check()
    except OSError as error:
        raise NotReadyError(f"{error.filename}: {error.strerror}") from error
    return Health(status="ready")


metrics = APIRouter(tags=["health"], dependencies=[READ], route_class=ReadRoute)


@metrics.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(request: Request) -> Response:
    """Counts, times and sizes in the text format of Prometheus."""
    return Response(generate_latest(request.app.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


version = APIRouter(prefix="/version", tags=["health"], dependencies=[READ], route_class=ReadRoute)


class Version(BaseModel):
    version: str
    python: str
    torch: str
    can_submit: bool = Field(
        description="Whether the service has a cluster to train on, and the key of this request may submit sweeps."
    )


@version.get("")
async def get_version(request: Request, components: ComponentsDep) -> Version:
    """The versions of cope_sweep, Python and PyTorch, and whether sweeps can be submitted."""
    key: ApiKey | None = request.scope.get("cope_key")
    can_submit = bool(components.sweeps.settings.ray_address) and (key is None or "submit" in key.scopes)
    return Version(version=__version__, python=platform.python_version(), torch=_torch_version(), can_submit=can_submit)


@cache
def _torch_version() -> str:
    return metadata.version("torch")  # importing it would take seconds
