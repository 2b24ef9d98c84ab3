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
from typing import Annotated

from cachetools import TTLCache
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from cope_services.http.access import READ, SUBMIT, ApiKey
from cope_services.http.caching import CachedRoute, Shared
from cope_services.http.components import ComponentsDep, RequireJson, WithETag
from cope_services.http.errors import BusyError, ConflictError, InvalidError, NoClusterError, Responses, error_responses
from cope_services.http.middleware import ASKED
from cope_services.http.reading import answer
from cope_services.http.settings import Settings
from cope_sweep.api.answers import PlanCost, SweepDetail, SweepState
from cope_sweep.api.questions import GetSweep, ListSweeps, SweepId
from cope_sweep.api.requests import SweepRequest
from cope_sweep.config import LoadedAblation, Plan, SpecError, expand, with_overrides
from cope_sweep.config.source import TOO_LARGE
from cope_sweep.errors import NotFoundError
from cope_sweep.read.queries import Queries, recorded_plan
from cope_sweep.read.queries.plans import ENDED, plan_cost
from cope_sweep.read.queries.progress import RATE_WINDOW_S, ProgressTracker
from cope_sweep.store import ACTIVE, Budget, Store, Submission, SweepPage, SweepProgress, read_submission
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

# -- submission, stop and retry ----------------------------------------------------------------------------------------

LOG = logging.getLogger("cope_services.sweeps")
KEY_TTL_S = 7 * 86_400.0
"""Time for which an idempotency key is remembered."""
RETRY_AFTER_S = 30
RECONCILE_S = 5.0
"""Time between two checks of the jobs of the sweeps that have not ended."""
START_TIMEOUT_S = 300.0
"""A sweep without a job is taken for lost when it was submitted so long ago."""


class SweepJobs:
    """Starts, stops and retries sweeps. It is thread-safe; its methods block."""

    def __init__(self, queries: Queries, settings: Settings) -> None:
        self.queries, self.settings = queries, settings
        self._lock = threading.Lock()
        """Held while a sweep is admitted and recorded, so that the limit holds."""

    def preview(self, request: SweepRequest) -> PlanCost:
        """The cost of a sweep. Raises InvalidError, NotFoundError as `submit`."""
        _, _, plan = self._planned(request)
        left_out = {*ENDED, *request.leave_out}
        return plan_cost(plan, self.queries.store, leave_out=left_out, max_runs=request.max_runs)

    def submit(self, request: SweepRequest, key: str | None) -> SweepState:
        """Submit a sweep. The same `key` with the same request means the same sweep.

        Raises:
            NoClusterError: The service has no cluster.
            ClusterError: It does not answer.
            BusyError: Too many sweeps are active.
            InvalidError: The ablation, or a value of the request, is not valid; or the key means another request.
            NotFoundError: There is no such ablation.
        """
        try:
            digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:32]
        except ValueError as error:  # pydantic writes at most 255 levels
            raise InvalidError(f"spec: {TOO_LARGE}", code="too_large") from error
        name = None if key is None else _request_key(f"submit {key}")
        if name is not None:
            known = self.queries.store.index.sweep_of_request(name, since_ms=_remembered_since_ms())
            if known is not None:
                return self._known(known, digest)
        loaded, text, plan = self._planned(request)
        cluster = self._cluster()
        submission = new_submission(
            loaded,
            file_text=text,
            scale=request.scale,
            sets=request.set,
            leave_out=request.leave_out,
            **request.model_dump(include=set(Budget.model_fields)),
            request=digest,
        )
        return self._start(submission, plan, cluster, name)

    def retry(self, sweep_id: str) -> SweepState:
        """Train again what a submitted sweep has not finished, as another sweep; while that is active, it is meant.

        Raises:
            NotFoundError: There is no such sweep.
            ConflictError: The sweep is active, has nothing left to train, or was not submitted.
            NoClusterError, ClusterError, BusyError: As `submit`.
        """
        summary = self.queries.sweep_summary(sweep_id)
        if summary.status in ACTIVE:
            raise ConflictError(
                f"sweep {sweep_id} is {summary.status}; stop it first, or wait for its end",
                code="not_ended",
                sweep_id=sweep_id,
                status=summary.status,
            )
        store = self.queries.store
        try:
            before = read_submission(store, sweep_id)
        except NotFoundError:
            raise ConflictError(
                f"sweep {sweep_id} was not submitted; the command that started it trains on",
                code="not_submitted",
                sweep_id=sweep_id,
            ) from None
        for each in self._active(store):
            if each.retry_of == sweep_id:
                return self._state(each.sweep_id)
        counts = store.index.sweep_counts([sweep_id]).get(sweep_id, {})
        if not sum(number for status, number in counts.items() if status not in ("finished", "stopped")):
            raise ConflictError(
                f"no run of sweep {sweep_id} is left to train: all have ended as planned",
                code="nothing_left",
                sweep_id=sweep_id,
            )
        cluster = self._cluster()
        again = retried(before, request=f"retry {sweep_id}")
        return self._start(again, submitted_plan(again), cluster, _request_key(f"retry {sweep_id}"), while_active=True)

    def stop(self, sweep_id: str) -> SweepState:
        """Ask a sweep to end: its runs write checkpoints. The job of one that has not begun is stopped.

        Has no effect on one that has ended. Raises NotFoundError, ClusterError.
        """
        if self.queries.sweep_summary(sweep_id).status in ACTIVE:
            self.queries.store.index.request_stop(sweep_id)
        if self.queries.sweep_summary(sweep_id).status == "pending" and self.settings.ray_address:
            stop_job(self.settings.ray_address, sweep_id)
            self.reconcile(sweep_id)
        return self._state(sweep_id)

    async def keep_reconciled(self) -> None:
        """Record the ends of jobs that have ended without doing so, until this task is cancelled."""
        logged = ""
        while self.settings.ray_address:
            await asyncio.sleep(RECONCILE_S)
            try:
                await run_in_threadpool(self.reconcile_all)
                logged = ""
            except Exception as error:  # the cluster or the store does not answer: next time
                if str(error) != logged:
                    LOG.warning("the jobs of active sweeps could not be checked: %s", error)
                logged = str(error)

    def reconcile_all(self) -> None:
        """`reconcile` for all sweeps that have not ended. Raises the first error, after it has looked at all."""
        errors = []
        for each in self.queries.store.index.sweeps(ACTIVE):
            try:
                self.reconcile(each.sweep_id)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def reconcile(self, sweep_id: str) -> None:
        """Record the end of a submitted sweep whose job has ended without doing so. Raises ClusterError."""
        store = self.queries.store
        try:
            submission = read_submission(store, sweep_id)
        except NotFoundError:
            return
        outcome = job_outcome(self.settings.ray_address, sweep_id)
        if outcome is None:
            # A sweep of the command line may be on another cluster.
            if submission.request and time.time() - submission.submitted_ms / 1000 > START_TIMEOUT_S:
                settle_submission(store, sweep_id, "the cluster does not know it (any more)")
        elif outcome.status in ("SUCCEEDED", "FAILED", "STOPPED"):
            settle_submission(store, sweep_id, "it was stopped" if outcome.status == "STOPPED" else outcome.message)

    def _cluster(self) -> Cluster:
        """The cluster, which answers. Raises NoClusterError, ClusterError."""
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
        own: Plan | None = None
        files = self.queries.files
        if request.ablation is not None:
            own = self.queries.planned(request.ablation, request.scale)
            loaded = self.queries.planned(request.ablation).ablation
            text = self.queries.text(request.ablation)
        try:
            if request.spec is not None:
                name = request.name or ""
                if name in files.files():
                    raise InvalidError(
                        f"name: an ablation file of this service has the name {name!r}; choose another",
                        code="name_taken",
                        name=name,
                    )
                loaded = parsed_spec(request.spec, name, files.folder)
                text = request.spec if isinstance(request.spec, str) else _as_text(request.spec)
            overridden = with_overrides(loaded, scale=request.scale, assignments=request.set)
            plan = expand(overridden, max_runs=self.settings.max_sweep_runs)
            check_paths(plan, own)
        except SpecError as error:
            raise InvalidError(str(error), code=error.code, **error.data) from error
        return loaded, text, plan

    def _known(self, sweep_id: str, digest: str) -> SweepState:
        """The sweep that an idempotency key means. Raises InvalidError where that is of another request."""
        if read_submission(self.queries.store, sweep_id).request != digest:
            raise InvalidError(
                "Idempotency-Key: the key was used with another request; choose a new one", code="used_key"
            )
        return self._state(sweep_id)

    def _start(
        self, submission: Submission, plan: Plan, cluster: Cluster, key: str | None, *, while_active: bool = False
    ) -> SweepState:
        """Record a submission and start its job, unless the key means another one.

        With `while_active`, a key means a sweep only until that has ended.
        """
        Store(self.settings.store, index=self.settings.index or None, create=True)  # makes the folder
        store = self.queries.store
        with self._lock:
            self._admit(store)
            record_submission(submission, recorded_plan(plan, store), store)
            if key is not None:
                meant = store.index.claim_request(
                    submission.sweep_id, key, since_ms=_remembered_since_ms(), active=while_active
                )
                if meant != submission.sweep_id:  # another service was faster: nothing of this one has begun
                    store.delete_sweep(submission.sweep_id)
                    return self._known(meant, submission.request)
        try:
            start_submission(submission, store, cluster)
        except BaseException:
            store.index.forget_request(submission.sweep_id)
            raise
        return self._state(submission.sweep_id)

    def _admit(self, store: Store) -> None:
        """Raise BusyError where too many submitted sweeps are active."""
        limit = self.settings.max_sweeps
        active = self._active(store)
        if len(active) >= limit:
            for each in active:
                self.reconcile(each.sweep_id)
            active = self._active(store)
        if len(active) >= limit:
            raise BusyError(f"{len(active)} sweeps are active, and {limit} may be; wait or stop one", RETRY_AFTER_S)

    @staticmethod
    def _active(store: Store) -> list[Submission]:
        """The sweeps that clients of services have submitted and that have not ended."""
        found = []
        for each in store.index.sweeps(ACTIVE):
            try:
                submission = read_submission(store, each.sweep_id)
            except NotFoundError:
                continue
            if submission.request:
                found.append(submission)
        return found

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


def _request_key(text: str) -> str:
    """The digest by which the index knows a request that is to have one sweep."""
    return hashlib.sha256(text.encode()).hexdigest()


def _remembered_since_ms() -> int:
    """The start of the time in which idempotency keys are remembered."""
    return int((time.time() - KEY_TTL_S) * 1000)


def _as_text(spec: object) -> str:
    """A spec that was sent as an object, as a file."""
    return json.dumps(spec, indent=2, ensure_ascii=False) + "\n"


# -- progress ----------------------------------------------------------------------------------------------------------

TICK_S = 1.0
"""Time between two reads of the index."""
HEARTBEAT_S = 15
"""Between two comments on a quiet connection."""
SEND_S = 10.0
"""A client that has not taken an event after this time is not followed any more: it may connect again."""
END_ID = "end"
"""The id of the last event: a client that has it needs no other."""
LISTENER_RETRY_S = 10
MAX_FOLLOWED = 1000
"""Sweeps whose progress is in memory."""


class Watchers:
    """Sends what is new of the sweeps that somebody follows.

    All listeners of a sweep share one read of the index in TICK_S. A slow listener misses older events, and nothing is
    queued for it.
    """

    def __init__(self, store: Callable[[], Store], max_listeners: int) -> None:
        self.store, self.max_listeners = store, max_listeners
        self.listeners = 0
        self._looking: Shared[str, tuple[int, SweepProgress]] = Shared()
        self._latest: TTLCache[str, tuple[int, SweepProgress]] = TTLCache(MAX_FOLLOWED, TICK_S / 2)
        self._trackers: TTLCache[str, ProgressTracker] = TTLCache(MAX_FOLLOWED, RATE_WINDOW_S)

    def require_place(self) -> None:
        """Raise BusyError where no more clients may follow sweeps."""
        if self.listeners >= self.max_listeners:
            raise BusyError(f"{self.listeners} clients follow sweeps, and no more may", LISTENER_RETRY_S)

    async def events(self, sweep_id: str, last_id: str | None) -> AsyncIterator[ServerSentEvent]:
        """The events of a sweep after the one with the id `last_id`, up to its end. Raises BusyError."""
        self.require_place()
        self.listeners += 1
        shown: SweepProgress | None = None
        try:
            while last_id != END_ID:
                try:
                    revision, progress = await self._look(sweep_id)
                except IndexUnavailable:  # listeners get heartbeats until it answers again
                    await asyncio.sleep(TICK_S)
                    continue
                ended = progress.status not in ACTIVE
                # The remaining time alone is no news: it would be sent every second.
                is_news = shown is None or _without_eta(progress) != _without_eta(shown)
                shown = progress
                if ended or (is_news and str(revision) != last_id):
                    last_id = END_ID if ended else str(revision)
                    data = json.dumps(progress.model_dump(mode="json"), separators=(",", ":"))  # ASCII, in one line
                    yield ServerSentEvent(data, event="end" if ended else "progress", id=last_id)
                await asyncio.sleep(0 if ended else TICK_S)
        finally:
            self.listeners -= 1

    async def _look(self, sweep_id: str) -> tuple[int, SweepProgress]:
        """The revision of the index and the progress of a sweep."""
        if (known := self._latest.get(sweep_id)) is None:
            known = await self._looking.get(sweep_id, lambda: run_in_threadpool(self._poll, sweep_id))
            self._latest[sweep_id] = known
        return known

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
        """Send the events, to HEAD none. A client that does not read them loses the connection, and its place."""
        if scope.get(ASKED) == "HEAD":  # the response would have no end, and the connection no other one
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
    route_class=CachedRoute,
)
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


@listed.get("", response_model=SweepPage, description=getdoc(ListSweeps))
def list_sweeps(query: Annotated[ListSweeps, Query()], components: ComponentsDep) -> Response:
    return answer(components, query)


@listed.get("/{sweep_id}", response_model=SweepDetail, description=getdoc(GetSweep))
def get_sweep(sweep_id: SweepId, components: ComponentsDep) -> Response:
    return answer(components, GetSweep(sweep_id=sweep_id))


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
    state = components.sweeps.submit(body, once)
    response.headers["location"] = f"sweeps/{state.sweep_id}"  # relative: a proxy may add a prefix
    return state


@router.post("/preview", dependencies=[RequireJson], responses=error_responses(409, 413, 415))
def preview_sweep(body: SweepRequest, components: ComponentsDep) -> PlanCost:
    """The runs that a sweep would train, with status, estimated time and memory. Nothing is started or recorded.

    Estimates are for the machine that answers.
    """
    return components.sweeps.preview(body)


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
    state = components.sweeps.retry(sweep_id)
    response.headers["location"] = f"../{state.sweep_id}"
    return state


@followed.get("/{sweep_id}/events", response_class=EventStream, responses=EVENTS)
def follow_sweep(sweep_id: str, components: ComponentsDep, last_event_id: LastEventId = None) -> Response:
    """Follow the progress of a sweep by server-sent events, from now or after the last event that was received."""
    components.queries.sweep_summary(sweep_id)
    if last_event_id == END_ID:
        return Response(status_code=204)
    components.watchers.require_place()
    return EventStream(components.watchers.events(sweep_id, last_event_id), ping=HEARTBEAT_S, send_timeout=SEND_S)


ROUTERS = (listed, router, followed)
