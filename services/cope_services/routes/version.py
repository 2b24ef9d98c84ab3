"""The route that says what runs here."""

import platform
from functools import cache
from importlib import metadata

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from cope_services.access import READ
from cope_services.dependencies import ComponentsDep
from cope_services.keys import ApiKey
from cope_sweep import __version__

router = APIRouter(prefix="/version", tags=["health"], dependencies=[READ])


class Version(BaseModel):
    version: str
    python: str
    torch: str
    can_submit: bool = Field(
        description="Whether the service has a cluster to train on, and the key of this request may submit sweeps."
    )


@router.get("")
async def get_version(request: Request, components: ComponentsDep) -> Version:
    """The versions of cope_sweep, Python and PyTorch, and whether sweeps can be submitted."""
    key: ApiKey | None = request.scope.get("cope_key")
    can_submit = bool(components.sweeps.settings.ray_address) and (key is None or "submit" in key.scopes)
    return Version(version=__version__, python=platform.python_version(), torch=_torch_version(), can_submit=can_submit)


@cache
def _torch_version() -> str:
    return metadata.version("torch")  # importing it would take seconds
