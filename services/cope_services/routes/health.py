"""Whether the server lives, and whether it can answer."""

from fastapi import APIRouter

from cope_services.deps import PartsDep
from cope_services.schemas import Health, problems

router = APIRouter(prefix="/health", tags=["health"])


@router.get("/live")
async def live() -> Health:
    """The process answers."""
    return Health(status="live")


@router.get("/ready", responses=problems(503))
def ready(parts: PartsDep) -> Health:
    """The ablations and the store can be read."""
    parts.library.check()
    return Health(status="ready")
