"""Sweeps that clients submit, stop, retry and follow: jobs of a Ray cluster, with their records in the store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from inspect import getdoc
from typing import Annotated, TypeVar, cast

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from cachetools import TTLCache
from fastapi import APIRouter, Header, Query, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from cope_services.http.access import READ, SUBMIT
from cope_services.http.caching import SharedTasks, cached
from cope_services.http.components import ComponentsDep, RequireJson, WithETag
from cope_services.http.errors import BusyError, ConflictError, InvalidError, NoClusterError, Responses, error_responses
from cope_services.http.middleware import ORIGINAL_METHOD
from cope_services.http.reading import answer
from cope_services.http.settings import Settings
from cope_services.http.work import limited
from cope_sweep.api.answers import PlanCost, SweepDetail, SweepState
from cope_sweep.api.questions import GetSweep, ListSweeps, SweepId
from cope_sweep.api.requests import SweepRequest
from cope_sweep.config import LoadedAblation, Plan, SpecError, expand, with_overrides
from cope_sweep.config.source import TOO_LARGE
from cope_sweep.errors import NotFoundError
from cope_sweep.read.queries import Queries, recorded_plan
from cope_sweep.read.queries.plans import ENDED, plan_cost
from cope_sweep.read.queries.progress import RATE_WINDOW_S, ProgressTracker
from cope_sweep.store import ACTIVE, SWEEP_ID, Budget, Store, Submission, SweepPage, SweepProgress, read_submission
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.store import INDEX_VARIABLE
from cope_sweep.sweep.jobs import (
    Cluster,
    check_cluster,
    check_paths,
    job_outcome,
    new_submission,
    package_cluster,
    parsed_spec,
    record_submission,
    retried,
    settle_submission,
    start_submission,
    stop_job,
    submitted_plan,
)

T = TypeVar("T")

# -- submission, stop and retry ----------------------------------------------------------------------------------------

LOG = logging.getLogger("cope_services.sweeps")
RETRY_AFTER_S = 30
RECONCILE_S = 5.0
"""Time between two checks of the jobs of active sweeps."""
START_TIMEOUT_S = 300.0
"""A sweep without a job counts as lost after this time."""


class SweepJobs:
    """Starts, stops and retries sweeps. Thread-safe; its methods block."""

    def __init__(self, queries: Queries, settings: Settings) -> None:
        self.queries, self.settings = queries, settings
        self._lock = threading.Lock()
        """Held while a sweep is admitted and recorded, so that the limit of active sweeps holds."""

    def preview(self, request: SweepRequest) -> PlanCost:
        """The cost of a sweep. Raises InvalidError, NotFoundError."""
        _, _, plan = self._planned(request)
        left_out = {*ENDED, *request.leave_out}
        return plan_cost(plan, self.queries.store, leave_out=left_out, max_runs=request.max_runs)

    def submit(self, sweep_id: str, request: SweepRequest) -> SweepState:
        """Submit a sweep with an id that the client has chosen; if the same request has submitted it, return it.

        Raises:
            NoClusterError: The service has no cluster.
            ClusterError: The cluster does not answer.
            BusyError: Too many sweeps are active.
            InvalidError: The ablation or a value of the request is invalid.
            ConflictError: There is another sweep with this id.
            NotFoundError: The ablation does not exist.
        """
        try:
            digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:32]
        except ValueError as error:  # pydantic writes at most 255 levels
            raise InvalidError(f"spec: {TOO_LARGE}", code="too_large") from error
        if (previous := self._previous(sweep_id, digest)) is not None:
            return previous
        loaded, text, plan = self._planned(request)
        cluster = self._cluster()
        submission = new_submission(
            loaded,
            sweep_id=sweep_id,
            file_text=text,
            scale=request.scale,
            sets=request.set,
            leave_out=request.leave_out,
            **request.model_dump(include=set(Budget.model_fields)),
            request=digest,
        )
        return self._start(submission, plan, cluster, lambda: self._previous(sweep_id, digest))

    def retry(self, sweep_id: str) -> SweepState:
        """Start a new sweep that trains the unfinished runs of a submitted sweep; if one is active, return that.

        Raises:
            NotFoundError: The sweep does not exist.
            ConflictError: The sweep is active, has nothing left to train, or was not submitted.
            NoClusterError, ClusterError, BusyError: The new sweep cannot start, see `submit`.
        """
        summary = self.queries.sweep_summary(sweep_id)
        if summary.status in ACTIVE:
            raise ConflictError(
                f"sweep {sweep_id} is {summary.status}; stop it first, or wait until it ends",
                code="not_ended",
                sweep_id=sweep_id,
                status=summary.status,
            )
        store = self.queries.store
        try:
            before = read_submission(store, sweep_id)
        except NotFoundError:
            raise ConflictError(
                f"sweep {sweep_id} was not submitted; continue it with the command that started it",
                code="not_submitted",
                sweep_id=sweep_id,
            ) from None
        if (active := self._active_retry(sweep_id)) is not None:
            return active
        counts = store.index.sweep_counts([sweep_id]).get(sweep_id, {})
        if not sum(number for status, number in counts.items() if status not in ("finished", "stopped")):
            raise ConflictError(
                f"sweep {sweep_id} has no run left to train: all are finished or were stopped early",
                code="nothing_left",
                sweep_id=sweep_id,
            )
        cluster = self._cluster()
        again = retried(before, request=f"retry {sweep_id}")
        return self._start(again, submitted_plan(again), cluster, lambda: self._active_retry(sweep_id))

    def stop(self, sweep_id: str) -> SweepState:
        """Stop a sweep: its runs write checkpoints first. If it has not started, its job is stopped.

        No effect if the sweep has ended. Raises NotFoundError, ClusterError.
        """
        if self.queries.sweep_summary(sweep_id).status in ACTIVE:
            self.queries.store.index.request_stop(sweep_id)
        if self.queries.sweep_summary(sweep_id).status == "pending" and self.settings.ray_address:
            stop_job(self.settings.ray_address, sweep_id)
            self.reconcile(sweep_id)
        return self._state(sweep_id)

    async def keep_reconciled(self) -> None:
        """Record the end of jobs that have died, until this task is cancelled."""
        logged = ""
        while self.settings.ray_address:
            await asyncio.sleep(RECONCILE_S)
            try:
                await run_in_threadpool(self.reconcile_all)
                logged = ""
            except Exception as error:  # the cluster or the store does not answer: try again next time
                if str(error) != logged:
                    LOG.warning("cannot check the jobs of active sweeps: %s", error)
                logged = str(error)

    def reconcile_all(self) -> None:
        """Reconcile all active sweeps. Raises the first error, after all sweeps."""
        errors = []
        for active in self.queries.store.index.sweeps(ACTIVE):
            try:
                self.reconcile(active.sweep_id)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def reconcile(self, sweep_id: str) -> None:
        """Record the end of a submitted sweep whose job has died. Raises ClusterError."""
        store = self.queries.store
        try:
            submission = read_submission(store, sweep_id)
        except NotFoundError:
            return
        outcome = job_outcome(self.settings.ray_address, sweep_id)
        if outcome is None:
            # A sweep of the command line may be on another cluster.
            if submission.request and time.time() - submission.submitted_ms / 1000 > START_TIMEOUT_S:
                settle_submission(store, sweep_id, "the cluster has no such job")
        elif outcome.status in ("SUCCEEDED", "FAILED", "STOPPED"):
            settle_submission(store, sweep_id, "it was stopped" if outcome.status == "STOPPED" else outcome.message)

    def _cluster(self) -> Cluster:
        """The cluster, once it answers. Raises NoClusterError, ClusterError."""
        if not self.settings.ray_address:
            raise NoClusterError(
                "this service has no Ray cluster to train on; its operator names one with "
                "`cope-sweep serve --ray-address http://HOST:8265` or COPE_SWEEP_RAY_ADDRESS"
            )
        index = self.settings.index or os.environ.get(INDEX_VARIABLE)
        cluster = package_cluster(self.settings.ray_address, {INDEX_VARIABLE: index} if index else {})
        check_cluster(cluster)
        return cluster

    def _planned(self, request: SweepRequest) -> tuple[LoadedAblation, str, Plan]:
        """The ablation of a request, its text, and its plan. Raises InvalidError, NotFoundError, SpecError."""
        file_plan: Plan | None = None
        files = self.queries.files
        if request.ablation is not None:
            file_plan = self.queries.planned(request.ablation, request.scale)
            loaded = self.queries.planned(request.ablation).ablation
            text = self.queries.text(request.ablation)
        try:
            if request.spec is not None:
                name = request.name or ""
                if name in files.files():
                    raise InvalidError(
                        f"name: this service has an ablation file {name!r}; choose another name",
                        code="name_taken",
                        name=name,
                    )
                loaded = parsed_spec(request.spec, name, files.folder)
                text = request.spec if isinstance(request.spec, str) else _as_text(request.spec)
            overridden = with_overrides(loaded, scale=request.scale, assignments=request.set)
            plan = expand(overridden, max_runs=self.settings.max_sweep_runs)
            check_paths(plan, file_plan)
        except SpecError as error:
            raise InvalidError(str(error), code=error.code, **error.data) from error
        return loaded, text, plan

    def _previous(self, sweep_id: str, digest: str) -> SweepState | None:
        """The sweep with an id, which the same request has submitted; None if no sweep has this id.

        Raises ConflictError if another request has submitted it, or a command has started it.
        """
        store = self.queries.store
        if store.index.sweep(sweep_id) is None:
            return None
        with suppress(NotFoundError):
            if read_submission(store, sweep_id).request == digest:
                return self._state(sweep_id)
        raise ConflictError(
            f"there is another sweep {sweep_id}; choose a new id for this request", code="used_id", sweep_id=sweep_id
        )

    def _active_retry(self, sweep_id: str) -> SweepState | None:
        """The active sweep that retries a sweep."""
        for active in self._active(self.queries.store):
            if active.retry_of == sweep_id:
                return self._state(active.sweep_id)
        return None

    def _start(
        self, submission: Submission, plan: Plan, cluster: Cluster, previous: Callable[[], SweepState | None]
    ) -> SweepState:
        """Record a submission and start its job, unless there is a `previous` one: return that.

        A request whose answer was lost is sent again, maybe to another service on the same store, while this one is
        still at work. So `previous` is asked again where no other process can record a submission.
        """
        Store(self.settings.store, index=self.settings.index or None, create=True)  # makes the folder
        store = self.queries.store
        known: SweepState | None = None

        def is_known() -> bool:
            nonlocal known
            known = previous()
            return known is not None

        with self._lock:
            if is_known():  # before it counts as one sweep too many
                return cast(SweepState, known)
            self._admit(store)
            is_new = record_submission(submission, recorded_plan(plan, store), store, is_known=is_known)
        if is_new:
            start_submission(submission, store, cluster)
        return known or self._state(submission.sweep_id)

    def _admit(self, store: Store) -> None:
        """Raise BusyError if too many submitted sweeps are active."""
        limit = self.settings.max_sweeps
        active = self._active(store)
        if len(active) >= limit:
            for submission in active:
                self.reconcile(submission.sweep_id)
            active = self._active(store)
        if len(active) >= limit:
            raise BusyError(f"{len(active)} sweeps are active; the limit is {limit}: wait, or stop one", RETRY_AFTER_S)

    @staticmethod
    def _active(store: Store) -> list[Submission]:
        """The active sweeps that clients of services have submitted."""
        submissions = []
        for sweep in store.index.sweeps(ACTIVE):
            try:
                submission = read_submission(store, sweep.sweep_id)
            except NotFoundError:
                continue
            if submission.request:
                submissions.append(submission)
        return submissions

    def _state(self, sweep_id: str) -> SweepState:
        summary, store = self.queries.sweep_summary(sweep_id), self.queries.store
        try:
            retry_of = read_submission(store, sweep_id).retry_of
        except NotFoundError:
            retry_of = None
        url = f"/api/v1/sweeps/{sweep_id}"
        return SweepState(
            sweep_id=sweep_id,
            ablation=summary.ablation,
            status=summary.status,
            runs=summary.runs,
            stop_requested=summary.status in ACTIVE and store.index.stop_requested(sweep_id),
            retry_of=retry_of,
            url=url,
            events=f"{url}/events",
        )


def _as_text(spec: object) -> str:
    """The text of a file for a spec that was sent as an object."""
    return json.dumps(spec, indent=2, ensure_ascii=False) + "\n"


# -- progress ----------------------------------------------------------------------------------------------------------

TICK_S = 1.0
"""Time between two reads of the index."""
HEARTBEAT_S = 15
"""Time between two comments on a quiet connection."""
SEND_S = 10.0
"""A client that has not received an event after this time is disconnected; it may connect again."""
END_ID = "end"
"""The id of the last event. A client that has received it has received all events."""
LOOKS = 4
"""Looks at the index for listeners at a time."""
MAX_FOLLOWED = 1000
"""Maximum number of sweeps with progress in memory."""


class Watchers:
    """Sends the progress of sweeps to the clients that follow them.

    All listeners of a sweep share one read of the index per TICK_S. Nothing is queued: a slow listener misses events.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self.store = store
        self.threads = CapacityLimiter(LOOKS)
        """Threads that look at the index, so that listeners take none from other requests."""
        self._looking: SharedTasks[str, tuple[int, SweepProgress]] = SharedTasks()
        self._latest: TTLCache[str, tuple[int, SweepProgress]] = TTLCache(MAX_FOLLOWED, TICK_S / 2)
        self._trackers: TTLCache[str, ProgressTracker] = TTLCache(MAX_FOLLOWED, RATE_WINDOW_S)

    async def events(self, sweep_id: str, last_id: str | None) -> AsyncIterator[ServerSentEvent]:
        """The events of a sweep after the event `last_id`, until the sweep ends."""
        shown: SweepProgress | None = None
        while last_id != END_ID:
            try:
                revision, progress = await self._look(sweep_id)
            except IndexUnavailable:  # listeners get heartbeats until the index answers again
                await asyncio.sleep(TICK_S)
                continue
            ended = progress.status not in ACTIVE
            # A change of the remaining time alone is not sent: it changes every second.
            is_news = shown is None or _without_eta(progress) != _without_eta(shown)
            shown = progress
            if ended or (is_news and str(revision) != last_id):
                last_id = END_ID if ended else str(revision)
                data = json.dumps(progress.model_dump(mode="json"), separators=(",", ":"))  # ASCII, in one line
                yield ServerSentEvent(data, event="end" if ended else "progress", id=last_id)
            await asyncio.sleep(0 if ended else TICK_S)

    async def _look(self, sweep_id: str) -> tuple[int, SweepProgress]:
        """The revision of the index and the progress of a sweep."""
        latest = self._latest.get(sweep_id)
        if latest is None:
            latest = await self._looking.get(sweep_id, lambda: self.in_thread(self._poll, sweep_id))
            self._latest[sweep_id] = latest
        return latest

    async def in_thread(self, look: Callable[[str], T], sweep_id: str) -> T:
        """The result of `look`, from a thread of the listeners."""
        return await run_sync(look, sweep_id, limiter=self.threads)

    def _poll(self, sweep_id: str) -> tuple[int, SweepProgress]:
        store, tracker = self.store(), self._trackers.get(sweep_id)
        if tracker is None or tracker.store is not store:
            tracker = ProgressTracker(store, sweep_id)
        progress = tracker.poll()
        self._trackers[sweep_id] = tracker
        return tracker.revision, progress


def _without_eta(progress: SweepProgress) -> SweepProgress:
    return progress.model_copy(update={"eta_s": None})


# -- routes ------------------------------------------------------------------------------------------------------------


class EventStream(EventSourceResponse):
    """Server-sent events, with their media type in the documentation."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, or none to HEAD. A client that does not read them is disconnected."""
        if scope.get(ORIGINAL_METHOD) == "HEAD":  # otherwise the response would never end
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body"})
            return
        with suppress(SendTimeoutError):
            await super().__call__(scope, receive, send)


listed = APIRouter(
    prefix="/sweeps",
    tags=["sweeps"],
    dependencies=[READ, WithETag],
    responses={304: {}},
    route_class=cached("answers"),
)
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


@listed.get("", response_model=SweepPage, description=getdoc(ListSweeps))
def list_sweeps(query: Annotated[ListSweeps, Query()], components: ComponentsDep) -> Response:
    return answer(components, query)


@listed.get("/{sweep_id}", response_model=SweepDetail, description=getdoc(GetSweep))
def get_sweep(sweep_id: SweepId, components: ComponentsDep) -> Response:
    return answer(components, GetSweep(sweep_id=sweep_id))


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
    """Start a new sweep that trains the unfinished runs of a submitted sweep, including failed runs."""
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


ROUTERS = (listed, router, followed)
