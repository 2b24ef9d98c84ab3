"""Submitted sweeps: their jobs on the Ray cluster, and what becomes of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from fastapi.concurrency import run_in_threadpool

from cope_services.http.errors import BusyError, ConflictError, InvalidError, NoClusterError
from cope_services.http.settings import Settings
from cope_sweep.api.ablations import PlanCost
from cope_sweep.api.requests import SweepRequest
from cope_sweep.api.sweeps import SweepState
from cope_sweep.config import LoadedAblation, Plan, SpecError, expand, with_overrides
from cope_sweep.config.paths import check_paths
from cope_sweep.config.source import TOO_LARGE
from cope_sweep.errors import NotFoundError
from cope_sweep.read.queries import Queries, recorded_plan
from cope_sweep.read.queries.plans import plan_cost
from cope_sweep.store import ACTIVE, Budget, Store, Submission, open_store, read_submission
from cope_sweep.store.store import INDEX_VARIABLE
from cope_sweep.sweep.jobs import (
    Cluster,
    check_cluster,
    end_submission,
    job_outcome,
    new_submission,
    package_cluster,
    parsed_spec,
    record_submission,
    retried,
    settle_submission,
    start_submission,
    stop_job,
    stop_sweep,
    submitted_plan,
)

LOG = logging.getLogger("cope_services.sweeps")
RETRY_AFTER_S = 30
RECONCILE_S = 5.0
"""Time between two checks of the jobs of active sweeps."""
START_TIMEOUT_S = 300.0
"""A sweep that has not started, and has no job, counts as lost after this time."""


class SweepJobs:
    """Starts, stops and retries sweeps. Thread-safe; its methods block."""

    def __init__(self, queries: Queries, settings: Settings) -> None:
        self.queries, self.settings = queries, settings
        self._lock = threading.Lock()
        """Held while a sweep is admitted and recorded, so that the limit of active sweeps holds."""

    def preview(self, request: SweepRequest) -> PlanCost:
        """The cost of a sweep. Raises InvalidError, NotFoundError."""
        _, _, plan = self.planned(request)
        return plan_cost(plan, self.queries.store, leave_out=request.leave_out, max_runs=request.max_runs)

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
        loaded, text, plan = self.planned(request)
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
        """Start a new sweep that trains the unfinished runs of a submitted sweep, and rows that its search has still to
        choose; if one is active, return that.

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
        again = retried(before, request=f"retry {sweep_id}")
        plan = submitted_plan(again)
        counts = store.index.sweep_counts([sweep_id]).get(sweep_id, {})
        is_over = summary.status == "finished" or not recorded_plan(plan, store).open_samples
        if is_over and not counts.keys() - {*plan.done_statuses}:
            raise ConflictError(
                f"sweep {sweep_id} has no run left to train: all are finished or were stopped early",
                code="nothing_left",
                sweep_id=sweep_id,
            )
        return self._start(again, plan, self._cluster(), lambda: self._active_retry(sweep_id))

    def stop(self, sweep_id: str) -> SweepState:
        """Stop a sweep: its runs write checkpoints first. If it has not started, it ends, and its job is stopped.

        No effect if the sweep has ended. Raises NotFoundError, ClusterError.
        """
        is_active = self.queries.sweep_summary(sweep_id).status in ACTIVE
        if is_active and stop_sweep(self.queries.store, sweep_id) and self.settings.ray_address:
            stop_job(self.settings.ray_address, sweep_id)
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
                # Once for each reason, and not every few seconds.
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
            # A sweep of the command line may be on another cluster. So may a running one: if that dies, its lease ends.
            if submission.request and time.time() - submission.submitted_ms / 1000 > START_TIMEOUT_S:
                end_submission(store, sweep_id, "the cluster has no job of this sweep", ("pending",))
        elif outcome.has_ended:
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

    def planned(self, request: SweepRequest, *, is_new: bool = True) -> tuple[LoadedAblation, str, Plan]:
        """The ablation of a request, its text, and its plan. One that `is_new` may not have the name of a file.

        Raises InvalidError, NotFoundError, SpecError.
        """
        file_plan: Plan | None = None
        files = self.queries.files
        if request.ablation is not None:
            file_plan = self.queries.planned(request.ablation, request.scale)
            loaded = self.queries.planned(request.ablation).ablation
            text = self.queries.text(request.ablation)
        try:
            if request.spec is not None:
                name = request.name or ""
                if is_new and name in files.files():
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
        # A sweep that a command has started has no submission.
        with suppress(NotFoundError):
            if read_submission(store, sweep_id).request == digest:
                return self._state(sweep_id)
        raise ConflictError(
            f"there is another sweep {sweep_id}; choose a new id for this request", code="used_id", sweep_id=sweep_id
        )

    def _active_retry(self, sweep_id: str) -> SweepState | None:
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
        open_store(self.settings.store, index=self.settings.index or None, create=True)  # makes the folder
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
            # Sweeps whose jobs have died count as active until that is recorded.
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
    return json.dumps(spec, indent=2, ensure_ascii=False) + "\n"
