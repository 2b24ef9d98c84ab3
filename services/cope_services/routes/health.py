"""Routes of the health checks."""

from fastapi import APIRouter

from cope_services.dependencies import ComponentsDep
from cope_services.errors import NotReadyError
from cope_services.schemas import Health, error_responses

router = APIRouter(prefix="/health", tags=["health"])


@router.get("/live")
async def live() -> Health:
    """The process answers requests."""
    return Health(status="live")


@router.get("/ready", responses=error_responses(503))
def ready(components: ComponentsDep) -> Health:
    """The folder of the ablations can be read, and the index answers."""
    try:
        components.queries.check()
    except OSError as error:
        raise NotReadyError(f"{error.filename}: {error.strerror}") from error
    return Health(status="ready")
