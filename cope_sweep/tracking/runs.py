"""Sends runs of a store to a tracker. One run of the store is one run of the tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.mirroring import Membership, Mirrored
from cope_sweep.store.store import Store
from cope_sweep.tracking.port import Model, Point, TrackedRun, Tracking
from cope_sweep.tracking.sweeps import SweepMirror
from cope_sweep.tracking.translate import (
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


MAX_LISTED = 1_000
"""A tracker with so many runs is listed once; of one with more, each run is searched for, which takes 10 ms."""


@dataclass(frozen=True)
class _Item:
    """Record of a run in the index."""

    record: RunRecord
    places: Sequence[Membership]
    tracked_id: str | None


class RunMirror:
    """Sends runs. Every method raises StoreError and TrackingError; the run can be sent again then."""

    def __init__(
        self, store: Store, mirrored: Mirrored, tracking: Tracking, sweeps: SweepMirror, *, own: bool = False
    ) -> None:
        """`own`: nobody but this store's only sender creates runs in the tracker."""
        self._store, self._mirrored, self._tracking, self._sweeps = store, mirrored, tracking, sweeps
        self._own = own
        self._listed: dict[str, str] | None = None
        """Run id → the tracker's id, of all runs that it had when they were listed."""
        self._running: dict[str, tuple[TrackedRun, Stamp]] = {}
        """The runs that are trained, and what their curve was like when it was last sent."""

    def send_running(self, run_id: str) -> bool:
        """Send what a run that is trained has logged since the last time; whether there was anything."""
        item = self.read([run_id]).get(run_id)
        if item is None or item.record.status != "running":
            return False
        folder = self._store.run(run_id)
        stamp = _curve_stamp(folder, item.record)
        if run_id in self._running and self._running[run_id][1] == stamp:
            return False
        self._running[run_id] = (self._send(item, folder), stamp)
        return True

    def read(self, run_ids: Sequence[str]) -> dict[str, _Item]:
        """Records of runs in the index."""
        records, tracked_ids = self._store.index.records(run_ids), self._mirrored.tracked_ids(run_ids)
        places = self._mirrored.memberships(run_ids)
        return {
            run_id: _Item(record, places.get(run_id, []), tracked_ids.get(run_id)) for run_id, record in records.items()
        }

    def send(self, item: _Item | None) -> str | None:
        """Send a run that has ended. Returns the tracker's id of it; None if there is nothing to send any more."""
        if item is None or item.record.status == "running":  # deleted, or leased again since the backlog was read
            return None
        tracked = self._send(item, self._store.run(item.record.run_id))
        self._running.pop(item.record.run_id, None)
        return tracked.id

    def forget(self, run_id: str) -> None:
        """Read the tracker's run again before the next time: nobody knows what a request that failed has changed."""
        self._running.pop(run_id, None)
        self._listed = None

    def _send(self, item: _Item, folder: RunFolder) -> TrackedRun:
        record, running = item.record, item.record.status == "running"
        begun = _spec(folder, record.status)
        created_ms = int(begun.get("created_ms") or record.created_ms or record.updated_ms or record.ended_ms or 0)
        known = self._running.get(record.run_id)
        tracked = known[0] if known else self._find_or_create(item, created_ms)
        if tracked.deleted:
            return tracked
        tags = sweep_tags(item.places)
        # The status is sent last: a run that is finished in the tracker is complete there, except for later sweeps.
        if tracked.status == "finished":
            self._log(tracked, tags=changed(tags, tracked.tags))
            return tracked
        if running and not known:
            if tracked.status != "running":
                self._tracking.set_status(tracked, "running")
            self._mirrored.mark(record.run_id, 0, tracked.id)
        curve = _curve(folder, record.status)
        points = curve_points(tracked.latest, curve, created_ms)
        model = None
        if record.status == "finished":
            final = final_points(record, curve, created_ms)
            points += points_after(tracked.latest | {point.key: point for point in points}, final)
            self._tracking.log_datasets(tracked, datasets(record, begun.get("spec", {})))
            # The tracker's own points, where they were sent before the run was resumed: then a metric has one point.
            model = self._model(
                record, begun, folder, tracked, [tracked.latest.get(point.key, point) for point in final]
            )
        self._log(
            tracked,
            points=points,
            params=changed(flat(begun.get("spec", {})), tracked.params),
            tags=changed(state_tags(record) | tags, tracked.tags),
            model=model,
        )
        if record.status in ("failed", "damaged"):
            self._tracking.put_text(tracked, "error.txt", _reason(record, folder))
        if not running:
            ended_ms = record.ended_ms or record.updated_ms
            self._tracking.set_status(tracked, TRACKED_STATUS[record.status], ended_ms)
        return tracked

    def _log(self, tracked: TrackedRun, **entries: Any) -> None:
        if any(entries.values()):
            self._tracking.log(tracked, **entries)

    def _model(
        self,
        record: RunRecord,
        begun: Mapping[str, Any],
        folder: RunFolder,
        tracked: TrackedRun,
        points: Sequence[Point],
    ) -> Model | None:
        """The checkpoint of a finished run with the final metrics; None if it has none."""
        checkpoint = folder.fetch_checkpoint()
        if not checkpoint.is_dir():
            return None
        return Model(
            name=f"{tracked.tags.get(f'{TAG}row', 'run')} seed {record.seed}",
            folder=checkpoint,
            step=record.step,
            params=flat({"model": begun.get("spec", {}).get("model", {})}),
            tags={key: value for key, value in tracked.tags.items() if key.startswith(f"{TAG}axis.")}
            | {f"{TAG}run_id": record.run_id},
            points=points,
        )

    def _find_or_create(self, item: _Item, created_ms: int) -> TrackedRun:
        """The tracker's run. If there is none, it is created in the experiment of the sweep that first trained it."""
        record = item.record
        tracked = self._tracking.get(item.tracked_id) if item.tracked_id else None
        if found := tracked or self._find(record.run_id):
            return found
        place = trained_by(item.places, record.sweep_id, created_ms)
        tags = changed(state_tags(record), {}) | sweep_tags(item.places) | identity_tags(record.run_id, place)
        experiment, note = NO_SWEEP, ""
        if place is not None:
            parent, origin = self._sweeps.parent(place.sweep_id)
            tags = {**origin.tags, **tags} | ({"mlflow.parentRunId": parent.id} if parent else {})
            experiment, note = place.ablation, origin.note
        return self._tracking.create(
            experiment,
            f"{place.row} · seed {place.seed}" if place else record.run_id,
            tags=tags,
            started_ms=created_ms,
            note=note,
        )

    def _find(self, run_id: str) -> TrackedRun | None:
        """The tracker's run of which the index has no note: a sender was killed, or the index was made again."""
        tag = f"{TAG}run_id"
        if self._own and self._listed is None:
            self._listed = self._tracking.find_all(tag, MAX_LISTED)
            self._own = self._listed is not None
        if self._listed is None:
            return self._tracking.find({tag: run_id})
        return self._tracking.get(self._listed[run_id]) if run_id in self._listed else None


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
    """Mark of a curve's version: modification time and size.

    In an object store, the revision of the record, which changes with every heartbeat.
    """
    if folder.objects:
        return record.revision, 0
    try:
        stat = (folder.path / "curve.jsonl").stat()
    except OSError:
        return record.revision, 0
    return stat.st_mtime_ns, stat.st_size
