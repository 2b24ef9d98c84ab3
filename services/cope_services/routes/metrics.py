"""The route of the metrics."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from cope_services.access import READ

router = APIRouter(tags=["health"], dependencies=[READ])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(request: Request) -> Response:
    """Counts, times and sizes in the text format of Prometheus."""
    return Response(generate_latest(request.app.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})
