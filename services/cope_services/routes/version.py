"""The route that says what runs here."""

import platform
from functools import cache
from importlib import metadata

from fastapi import APIRouter
from pydantic import BaseModel

from cope_services.access import READ
from cope_sweep import __version__

router = APIRouter(prefix="/version", tags=["health"], dependencies=[READ])


class Version(BaseModel):
    version: str
    python: str
    torch: str


@router.get("")
def get_version() -> Version:
    """The versions of cope_sweep, Python and PyTorch."""
    return _version()


@cache
def _version() -> Version:
    # The metadata of torch has its version, too; importing it would take seconds.
    return Version(version=__version__, python=platform.python_version(), torch=metadata.version("torch"))
