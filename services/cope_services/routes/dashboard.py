"""Route of the web page at `/`. Its HTML, CSS and JavaScript are files of this package."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from cope_services.headers import PAGE_POLICY

FOLDER = Path(__file__).parent.parent / "dashboard"
HEADERS = {"content-security-policy": PAGE_POLICY}

router = APIRouter(include_in_schema=False)
assets = StaticFiles(directory=FOLDER)


@router.get("/")
def page() -> FileResponse:
    return FileResponse(FOLDER / "index.html", headers=HEADERS)
