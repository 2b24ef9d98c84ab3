"""The page `/docs`: Swagger UI for the OpenAPI document, with files of an installed package, so it needs no network."""

from pathlib import Path

import swagger_ui_bundle
from fastapi import APIRouter
from fastapi.responses import FileResponse

from cope_services.headers import PAGE_POLICY
from cope_sweep.errors import NotFoundError

FOLDER = Path(__file__).parent.parent / "documentation"
FILES = {
    "docs.js": FOLDER / "docs.js",
    "swagger-ui-bundle.js": Path(swagger_ui_bundle.swagger_ui_path) / "swagger-ui-bundle.js",
    "swagger-ui.css": Path(swagger_ui_bundle.swagger_ui_path) / "swagger-ui.css",
}

router = APIRouter(include_in_schema=False)


@router.get("/docs")
def page() -> FileResponse:
    return FileResponse(FOLDER / "index.html", headers={"content-security-policy": PAGE_POLICY})


@router.get("/docs/{name}")
def file(name: str) -> FileResponse:
    if name not in FILES:
        raise NotFoundError(f"the documentation has no file {name[:80]!r}")
    return FileResponse(FILES[name])
