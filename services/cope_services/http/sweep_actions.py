"""Routes that submit, stop, retry and follow sweeps."""

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from cope_services.http.access import READ, SUBMIT
from cope_services.http.components import ComponentsDep, RequireJson
from cope_services.http.keys import ApiKey
from cope_services.http.schemas import Responses, error_responses
from cope_services.http.sweep_events import END_ID, HEARTBEAT_S, SEND_S
from cope_sweep.api.answers import SweepProgress, SweepState
from cope_sweep.api.requests import SweepRequest


class EventStream(EventSourceResponse):
    """Server-sent events, with their media type in the documentation."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. A client that does not read them loses the connection, and its place."""
        with suppress(SendTimeoutError):
            await super().__call__(scope, receive, send)


router = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[SUBMIT])
followed = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[READ])
ACTION_ERRORS = error_responses(409, 413, 415, 429, 503)
LOCATION = {"headers": {"Location": {"description": "The sweep.", "schema": {"type": "string"}}}}
EVENTS: Responses = {
    200: {
        "model": SweepProgress,
        "description": "Events `progress`, and `end` as the last one; the data of each is this object. Comments keep a "
        "quiet connection open.",
    },
    204: {"description": "The client has the last event."},
    **error_responses(429),
}
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="The same key with the same request means the same sweep, for 7 days. With another request it is "
        "an error.",
    ),
]
LastEventId = Annotated[str | None, Header(max_length=100, description="The id of the last event that was received.")]


@router.post("", status_code=202, dependencies=[RequireJson], responses={202: LOCATION, **ACTION_ERRORS})
def submit_sweep(
    body: SweepRequest,
    request: Request,
    response: Response,
    components: ComponentsDep,
    idempotency_key: IdempotencyKey = None,
) -> SweepState:
    """Execute an ablation as a job of the Ray cluster: one of this service, or one in the request."""
    key: ApiKey | None = request.scope.get("cope_key")
    # Clients choose their keys independently of each other.
    once = None if idempotency_key is None else f"{key.name if key else ''}/{idempotency_key}"
    return _located(components.sweeps.submit(body, once), response)


@router.post("/{sweep_id}/stop", status_code=202)
def stop_sweep(sweep_id: str, components: ComponentsDep) -> SweepState:
    """Stop a sweep: its runs write checkpoints first. Has no effect on one that has ended."""
    return components.sweeps.stop(sweep_id)


@router.post(
    "/{sweep_id}/retry",
    status_code=202,
    responses={202: LOCATION, **error_responses(409, 429, 503)},
)
def retry_sweep(sweep_id: str, response: Response, components: ComponentsDep) -> SweepState:
    """Train again what a submitted sweep has not finished, failed runs included: another sweep with the same runs."""
    return _located(components.sweeps.retry(sweep_id), response)


@followed.get("/{sweep_id}/events", response_class=EventStream, responses=EVENTS)
def follow_sweep(sweep_id: str, components: ComponentsDep, last_event_id: LastEventId = None) -> Response:
    """Follow the progress of a sweep by server-sent events, from now or after the last event that was received."""
    components.sweeps.require(sweep_id)
    if last_event_id == END_ID:
        return Response(status_code=204)
    components.watchers.require_place()
    return EventStream(components.watchers.events(sweep_id, last_event_id), ping=HEARTBEAT_S, send_timeout=SEND_S)


def _located(state: SweepState, response: Response) -> SweepState:
    response.headers["location"] = state.url
    return state
