"""Sends runs of a store to a tracker. One run of the store is one run of the tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.mirroring import Membership, Mirrored
from cope_sweep.store.mirror_sweeps import SweepMirror
from cope_sweep.store.store import Store
from cope_sweep.store.tracking import Model, TrackedRun, Tracking
from cope_sweep.store.translate import (
    TAG,
    TRACKED_STATUS,
    curve_points,
    datasets,
    final_points,
    flat,
    identity_tags,
    points_after,
    state_tags,
    sweep_tags,
)

NO_SWEEP = "cope_sweep"
"""The experiment of runs that no sweep of the store contains."""

Stamp = tuple[int, int]


class RunMirror:
    """Sends runs. Every method raises StoreError and TrackingError; the run can be sent again then."""

    def __init__(self, store: Store, mirrored: Mirrored, tracking: Tracking, sweeps: SweepMirror) -> None:
        self._store, self._mirrored, self._tracking, self._sweeps = store, mirrored, tracking, sweeps
        self._running: dict[str, tuple[TrackedRun, Stamp]] = {}
        """The runs that are trained, and what their curve was like when it was last sent."""

    def send_running(self, run_id: str) -> bool:
        """Send what a run that is trained has logged since the last time; whether there was anything."""
        record = self._store.index.records([run_id]).get(run_id)
        if record is None or record.status != "running":
            return False
        folder = self._store.run(run_id)
        stamp = _curve_stamp(folder, record)
        if run_id in self._running and self._running[run_id][1] == stamp:
            return False
        self._running[run_id] = (self._send(record, folder), stamp)
        return True

    def send(self, run_id: str) -> None:
        """Send a run that has ended, and note that the tracker has it as it is now."""
        record = self._store.index.records([run_id]).get(run_id)
        if record is None or record.status == "running":  # deleted, or leased again since the backlog was read
            return
        tracked = self._send(record, self._store.run(run_id))
        self._running.pop(run_id, None)
        self._mirrored.mark(run_id, record.revision, tracked.id)

    def forget(self, run_id: str) -> None:
        """Read the tracker's run again before the next time: nobody knows what a request that failed has changed."""
        self._running.pop(run_id, None)

    def _send(self, record: RunRecord, folder: RunFolder) -> TrackedRun:
        places = self._mirrored.memberships(record.run_id)
        begun = _spec(folder, record.status)
        created_ms = int(begun.get("created_ms") or record.created_ms or record.updated_ms or record.ended_ms or 0)
        known = self._running.get(record.run_id)
        tracked = known[0] if known else self._find_or_create(record, places, created_ms)
        if tracked.deleted:
            return tracked
        tags = sweep_tags(places)
        # The status is sent last: a run that is finished in the tracker is complete there, except for later sweeps.
        if tracked.status == "finished":
            self._log_tags(tracked, tags)
            return tracked
        if record.status == "running" and tracked.status != "running":
            self._tracking.set_status(tracked, "running")
        curve = _curve(folder, record.status)
        points = curve_points(tracked.latest, curve, created_ms)
        final = final_points(record, curve, created_ms) if record.status == "finished" else []
        have = tracked.latest | {point.key: point for point in points}
        self._tracking.log(
            tracked,
            points=points + points_after(have, final),
            params=changed(flat(begun.get("spec", {})), tracked.params),
            tags=changed(state_tags(record) | tags, tracked.tags),
        )
        if record.status == "finished":
            self._send_inputs_and_model(record, begun, folder, tracked, curve, created_ms)
        if record.status in ("failed", "damaged"):
            self._tracking.put_text(tracked, "error.txt", _reason(record, folder))
        if record.status != "running":
            ended_ms = record.ended_ms or record.updated_ms
            self._tracking.set_status(tracked, TRACKED_STATUS[record.status], ended_ms)
        return tracked

    def _log_tags(self, tracked: TrackedRun, tags: Mapping[str, str]) -> None:
        if new := changed(tags, tracked.tags):
            self._tracking.log(tracked, tags=new)

    def _send_inputs_and_model(
        self,
        record: RunRecord,
        begun: Mapping[str, Any],
        folder: RunFolder,
        tracked: TrackedRun,
        curve: Sequence[Mapping[str, float]],
        created_ms: int,
    ) -> None:
        """Send the data that a finished run read, and its checkpoint with the final metrics."""
        self._tracking.log_datasets(tracked, datasets(record, begun.get("spec", {})))
        checkpoint = folder.fetch_checkpoint()
        if not checkpoint.is_dir():
            return
        model = Model(
            name=f"{tracked.tags.get(f'{TAG}row', 'run')} seed {record.seed}",
            folder=checkpoint,
            step=record.step,
            params=flat({"model": begun.get("spec", {}).get("model", {})}),
            tags={key: value for key, value in tracked.tags.items() if key.startswith(f"{TAG}axis.")}
            | {f"{TAG}run_id": record.run_id},
        )
        # The tracker's own points, where they were sent before the run was resumed: then a metric has one point.
        final = [tracked.latest.get(point.key, point) for point in final_points(record, curve, created_ms)]
        self._tracking.put_model(tracked, model, final)

    def _find_or_create(self, record: RunRecord, places: Sequence[Membership], created_ms: int) -> TrackedRun:
        """The tracker's run. If there is none, it is created in the experiment of the sweep that first trained it."""
        run_id = record.run_id
        tracked_id = self._mirrored.tracked_ids([run_id]).get(run_id)
        tracked = self._tracking.get(tracked_id) if tracked_id else None
        tracked = tracked or self._tracking.find({f"{TAG}run_id": run_id})
        if tracked is None:
            place = trained_by(places, record.sweep_id, created_ms)
            tags = identity_tags(run_id, place)
            experiment, note = NO_SWEEP, ""
            if place is not None:
                parent, origin = self._sweeps.parent(place.sweep_id)
                tags = {**origin.tags, **tags} | ({"mlflow.parentRunId": parent.id} if parent else {})
                experiment, note = place.ablation, origin.note
            tracked = self._tracking.create(
                experiment,
                f"{place.row} · seed {place.seed}" if place else run_id,
                tags=tags,
                started_ms=created_ms,
                note=note,
            )
        if tracked.id != tracked_id:
            self._mirrored.mark(run_id, 0, tracked.id)
        return tracked


def trained_by(places: Sequence[Membership], last_sweep: str | None, created_ms: int) -> Membership | None:
    """The sweep that first trained a run: the last one with this run that started before the run was begun.

    Where the run is older than all of them: the one that trained it last, else the first one.
    """
    before = [place for place in places if place.started_ms <= created_ms]
    last = [place for place in places if place.sweep_id == last_sweep]
    return next(iter([*before[-1:], *last, *places]), None)


def changed(values: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The entries of `values` that differ from `known`; a missing entry counts as empty."""
    return {key: value for key, value in values.items() if known.get(key, "") != value}


def _spec(folder: RunFolder, status: Status) -> Mapping[str, Any]:
    """The content of a run's spec.json; of a damaged run whatever can be read."""
    try:
        return folder.spec or {}
    except DamagedError:
        if status != "damaged":
            raise
        return {}


def _curve(folder: RunFolder, status: Status) -> list[dict[str, float]]:
    try:
        return folder.curve(times=True)
    except DamagedError:
        if status != "damaged":
            raise
        return []


def _reason(record: RunRecord, folder: RunFolder) -> str:
    """Why a run failed: its traceback where there is one."""
    try:
        return str(folder.state.get("traceback") or record.message or "")
    except DamagedError as error:
        return record.message or str(error)


def _curve_stamp(folder: RunFolder, record: RunRecord) -> Stamp:
    """What differs if a run's curve has changed: modification time and size.

    In an object store, the revision of the record, which changes with every heartbeat.
    """
    if folder.objects:
        return record.revision, 0
    try:
        stat = (folder.path / "curve.jsonl").stat()
    except OSError:
        return record.revision, 0
    return stat.st_mtime_ns, stat.st_size
