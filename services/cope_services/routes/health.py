"""Routes of the health checks."""

from fastapi import APIRouter

from cope_services.dependencies import ComponentsDep
from cope_services.schemas import Health, error_responses

router = APIRouter(prefix="/health", tags=["health"])


@router.get("/live")
async def live() -> Health:
    """The process answers requests."""
    return Health(status="live")


@router.get("/ready", responses=error_responses(503))
def ready(components: ComponentsDep) -> Health:
    """The folders of the ablations and of the store can be read."""
    components.library.check()
    return Health(status="ready")
