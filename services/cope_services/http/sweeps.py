"""Sweeps that clients submit, stop, retry and follow: jobs of a Ray cluster, with their records in the store."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi import Path as PathParameter

from cope_services.http.access import READ, SUBMIT
from cope_services.http.components import ComponentsDep, RequireJson
from cope_services.http.errors import Responses, error_responses
from cope_services.http.following import END_ID, EventStream
from cope_services.http.work import limited
from cope_sweep.api.ablations import PlanCost
from cope_sweep.api.requests import SweepRequest
from cope_sweep.api.sweeps import SweepState
from cope_sweep.store import SWEEP_ID, SweepProgress

HEARTBEAT_S = 15
"""Time between two comments on a quiet connection."""
SEND_S = 10.0
"""A client that has not received an event after this time is disconnected; it may connect again."""

router = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[SUBMIT], route_class=limited("sweeps"))
followed = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[READ], route_class=limited("listeners"))
ACTION_ERRORS = error_responses(409, 413, 415, 503)
LOCATION = {"headers": {"Location": {"description": "The sweep.", "schema": {"type": "string"}}}}
EVENTS: Responses = {
    200: {
        "model": SweepProgress,
        "description": "Events `progress`, and finally `end`; the data of each event is this object. Comments keep a "
        "quiet connection open.",
    },
    204: {"description": "The client has received the last event."},
}
NewSweepId = Annotated[
    str,
    PathParameter(
        pattern=f"^{SWEEP_ID.pattern}$",
        description="An id that you choose: the present time in UTC and random hexadecimal digits, as in "
        "`20261121-101500-3f2a`. The same request with the same id submits the sweep once.",
    ),
]
LastEventId = Annotated[str | None, Header(max_length=100, description="The id of the last event received.")]


@router.put("/{sweep_id}", status_code=202, dependencies=[RequireJson], responses=ACTION_ERRORS)
def submit_sweep(sweep_id: NewSweepId, body: SweepRequest, components: ComponentsDep) -> SweepState:
    """Execute an ablation as a job of the Ray cluster: an ablation of this service, or one in the request.

    A sweep that another request has submitted under this id is a 409.
    """
    return components.sweeps.submit(sweep_id, body)


@router.post("/preview", dependencies=[RequireJson], responses=error_responses(409, 413, 415))
def preview_sweep(body: SweepRequest, components: ComponentsDep) -> PlanCost:
    """The runs that a sweep would train, with status, estimated time and memory. Nothing is started or recorded.

    Estimates are for the machine that answers the request.
    """
    return components.sweeps.preview(body)


@router.post("/{sweep_id}/stop", status_code=202)
def stop_sweep(sweep_id: str, components: ComponentsDep) -> SweepState:
    """Stop a sweep: its runs write checkpoints first. No effect if the sweep has ended."""
    return components.sweeps.stop(sweep_id)


@router.post(
    "/{sweep_id}/retry",
    status_code=202,
    responses={202: LOCATION, **error_responses(409, 503)},
)
def retry_sweep(sweep_id: str, response: Response, components: ComponentsDep) -> SweepState:
    """Start a new sweep that trains the unfinished runs of a submitted sweep, including failed runs, and rows that its
    search has still to choose.
    """
    state = components.sweeps.retry(sweep_id)
    response.headers["location"] = f"../{state.sweep_id}"
    return state


@followed.get("/{sweep_id}/events", response_class=EventStream, responses=EVENTS)
async def follow_sweep(sweep_id: str, components: ComponentsDep, last_event_id: LastEventId = None) -> Response:
    """Follow the progress of a sweep by server-sent events, from now or after the last event received."""
    await components.watchers.in_thread(components.queries.sweep_summary, sweep_id)
    if last_event_id == END_ID:
        return Response(status_code=204)
    return EventStream(components.watchers.events(sweep_id, last_event_id), ping=HEARTBEAT_S, send_timeout=SEND_S)


ROUTERS = (router, followed)
