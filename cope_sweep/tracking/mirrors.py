"""Sends sweeps and runs of a store to a tracker.

One run of the store is one run of the tracker. A sweep is one, too: the parent of the runs that it trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.mirroring import Membership, Mirrored
from cope_sweep.store.index.summaries import sweep_counts
from cope_sweep.store.store import Store
from cope_sweep.store.sweeps import SweepRecord
from cope_sweep.tracking.mlflow import MlflowTracking
from cope_sweep.tracking.translate import (
    TAG,
    TRACKED_STATUS,
    Model,
    Point,
    TrackedRun,
    curve_points,
    datasets,
    final_points,
    flat,
    identity_tags,
    origin_tags,
    points_after,
    state_tags,
    sweep_tag,
    sweep_tags,
)

MAX_NOTE_CHARACTERS = 7800
"""MLflow cuts the note of a run at 8000 characters."""
MAX_LINKS = 40
"""Reused runs that a note links. The artifact reused.json lists all of them."""
ORDER: tuple[Status, ...] = ("finished", "running", "failed", "stopped", "damaged", "interrupted", "pending")
PROGRESS_INTERVAL_S = 10.0
"""Between two notes about the progress of a sweep."""
NO_SWEEP = "cope_sweep"
"""The experiment of runs that no sweep of the store contains."""

T = TypeVar("T")
Stamp = tuple[int, int]


@dataclass(frozen=True)
class Origin:
    """Part of a sweep's record that its runs show."""

    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """The note of the experiment."""


class SweepMirror:
    """Sends sweeps. Every method raises StoreError and TrackingError; the sweep can be sent again then."""

    def __init__(self, store: Store, mirrored: Mirrored, tracking: MlflowTracking) -> None:
        self._store, self._mirrored, self._tracking = store, mirrored, tracking
        self._tracked: dict[str, TrackedRun] = {}
        self._origins: dict[str, Origin] = {}
        self._linked: set[str] = set()
        """Sweeps whose reused runs have been tagged."""
        self._noted_s: dict[str, float] = {}
        """Sweep id → when its progress was last sent."""
        self.ended: set[str] = set()
        """Sweeps that have ended. Their runs in the tracker end when they are created."""

    def parent(self, sweep_id: str) -> tuple[TrackedRun | None, Origin]:
        """The tracker's run of a sweep, created if there is none, and what its runs take from it.

        A sweep whose record is missing or damaged has neither; its runs are sent without.
        """
        if sweep_id not in self._origins:
            try:
                record = self._store.sweep(sweep_id)
            except DamagedError:
                record = None
            if record is not None:
                self._find_or_create(record)
            self._origins[sweep_id] = Origin(origin_tags(record), experiment_note(record)) if record else Origin()
        return self._tracked.get(sweep_id), self._origins[sweep_id]

    def settle(self, sweep_id: str) -> None:
        """End the tracker's run of a sweep that has ended, if there is one. The rest is sent after the sweep's runs."""
        known = self._tracked.get(sweep_id)
        if known and known.status != "running":
            return
        if known or self._mirrored.tracked_ids([sweep_id]):
            record = self._store.sweep(sweep_id)
            if record is not None:
                self._end(self._find_or_create(record), record)

    def send_running(self, sweep_id: str) -> None:
        """Send the progress of a sweep that is executed, every PROGRESS_INTERVAL_S at most."""
        now_s = time.monotonic()
        if now_s - self._noted_s.get(sweep_id, -PROGRESS_INTERVAL_S) < PROGRESS_INTERVAL_S:
            return
        record = self._store.sweep(sweep_id)
        if record is not None:
            self._send(record, "running")
            self._noted_s[sweep_id] = now_s

    def send(self, sweep_id: str) -> str | None:
        """Send a sweep that has ended. Returns the tracker's id of it; None if its record was deleted."""
        record, summary = self._store.sweep(sweep_id), self._store.index.sweep(sweep_id)
        if record is None or summary is None:
            return None
        tracked = self._send(record, _ended_as(summary.status))
        self.forget(sweep_id)
        return tracked.id

    def forget(self, sweep_id: str) -> None:
        """Read the sweep's record and the tracker's run again before the next time."""
        for known in (self._tracked, self._origins, self._noted_s):
            known.pop(sweep_id, None)

    def _find_or_create(self, record: SweepRecord) -> TrackedRun:
        sweep_id = record.sweep_id
        if sweep_id not in self._tracked:
            tags = {f"{TAG}kind": "sweep", f"{TAG}sweep_id": sweep_id}
            tracked_id = self._mirrored.tracked_ids([sweep_id]).get(sweep_id)
            tracked = self._tracking.get(tracked_id) if tracked_id else None
            tracked = tracked or self._tracking.find(tags)
            if tracked is None:
                tracked = self._tracking.create(
                    record.ablation,
                    sweep_id,
                    tags=tags | origin_tags(record),
                    started_ms=record.started_ms,
                    note=experiment_note(record),
                )
            if tracked.id != tracked_id:
                self._mirrored.mark({sweep_id: (0, tracked.id)})
            self._tracked[sweep_id] = tracked
            if sweep_id in self.ended:
                self._end(tracked, record)
        return self._tracked[sweep_id]

    def _end(self, tracked: TrackedRun, record: SweepRecord) -> None:
        """Set the status of the tracker's run of a sweep that has ended."""
        summary = self._store.index.sweep(record.sweep_id)
        status = TRACKED_STATUS[_ended_as(summary.status if summary else record.status)]
        if tracked.status != status and not tracked.deleted:
            ended_ms = record.ended_ms or self._mirrored.last_ms(record.sweep_id) or record.started_ms
            self._tracking.set_status(tracked, status, ended_ms)

    def _send(self, record: SweepRecord, status: Status) -> TrackedRun:
        tracked = self._find_or_create(record)
        if tracked.deleted:
            return tracked
        reused = self._mirrored.tracked_ids(record.reused)
        if record.sweep_id not in self._linked:
            self._tag_reused(record, reused)
        links = {}
        for run_id in [run_id for run_id in record.reused if run_id in reused][:MAX_LINKS]:
            if run := self._tracking.get(reused[run_id]):
                links[run_id] = run.link
        counts = sweep_counts(self._store.index, [record.sweep_id]).get(record.sweep_id, {})
        tags = {
            "mlflow.note.content": sweep_note(record, counts, links),
            f"{TAG}status": status,
            f"{TAG}reused": str(len(record.reused)),
            **{f"{TAG}runs.{each}": str(counts.get(each, 0)) for each in get_args(Status)},
        }
        # Parameters cannot change, and a search adds runs until its end.
        params = {} if status == "running" else _params(record)
        params = {key: value for key, value in params.items() if key not in tracked.params}
        self._tracking.log(tracked, params=params, tags=changed(tags, tracked.tags))
        if status == "running":
            if tracked.status != "running":
                self._tracking.set_status(tracked, "running")
            return tracked
        self._put_artifacts(record, reused, tracked)
        self._log_datasets(record, tracked)
        self._tracking.log(tracked, points=points_after(tracked.latest, self._progress(record)))
        self._end(tracked, record)
        return tracked

    def _progress(self, record: SweepRecord) -> list[Point]:
        """The number of finished runs over time; a step is a second since the start of the sweep."""
        points = {}
        for number, ended_ms in enumerate(self._mirrored.finished_ms(record.sweep_id), start=1):
            second = max(0, ended_ms - record.started_ms) // 1000
            points[second] = Point("runs/finished", float(number), second, ended_ms)
        return list(points.values())

    def _put_artifacts(self, record: SweepRecord, reused: Mapping[str, str], tracked: TrackedRun) -> None:
        texts = {"ablation.yaml": record.file_text}
        if reused:
            texts["reused.json"] = json.dumps(reused, indent=1) + "\n"
        if table := record.table:
            texts |= {"table.md": table["markdown"], "table.csv": table["csv"]}
            texts["table.json"] = json.dumps(table["json"], indent=1) + "\n"
        for path, text in texts.items():
            self._tracking.put_text(tracked, path, text)

    def _log_datasets(self, record: SweepRecord, tracked: TrackedRun) -> None:
        """Give a sweep the data of one of its finished runs: MLflow lists runs by their sweep, with its data."""
        tracked_ids = self._mirrored.tracked_ids(run.run_id for run in record.runs[:MAX_LINKS])
        for tracked_id in tracked_ids.values():
            run = self._tracking.get(tracked_id)
            if run is not None and run.datasets:
                self._tracking.log_datasets(tracked, run.datasets)
                return

    def _tag_reused(self, record: SweepRecord, reused: Mapping[str, str]) -> None:
        """Give the runs that a sweep reused its tag. Those that the tracker does not have get it when they are sent."""
        rows = {run.run_id: run.row for run in record.runs}
        tag = sweep_tag(record.sweep_id)
        for run_id, tracked_id in reused.items():
            run = self._tracking.get(tracked_id)
            if run is not None and not run.deleted and run.tags.get(tag) != rows[run_id]:
                self._tracking.log(run, tags={tag: rows[run_id]})
        self._linked.add(record.sweep_id)


def _ended_as(status: Status) -> Status:
    """The status of a sweep whose process is gone."""
    return "interrupted" if status == "running" else status


def _params(record: SweepRecord) -> dict[str, str]:
    return {
        "executor": record.executor,
        "rows": str(len({run.row for run in record.runs})),
        "seeds": json.dumps(sorted({run.seed for run in record.runs})),
        "runs": str(len(record.runs)),
        "metrics": ", ".join(metric["name"] for metric in record.metrics),
    }


def experiment_note(record: SweepRecord) -> str:
    """The note of an experiment: title and hypothesis of the ablation in a sweep's record."""
    return "\n\n".join(part for part in (f"**{record.title}**", record.hypothesis.strip()) if part)


def sweep_note(record: SweepRecord, counts: Mapping[Status, int], links: Mapping[str, str]) -> str:
    """The note of a sweep: its progress, its table once there is one, and links to the runs that it reused.

    `counts` is the number of runs by status; `links` maps the ids of at most MAX_LINKS reused runs to their pages.
    """
    progress = ", ".join(f"{counts[status]} {status}" for status in ORDER if counts.get(status))
    head = f"{experiment_note(record)}\n\n{len(record.runs)} runs: {progress}."
    head += "".join(f"\n\n{note}" for note in record.notes)
    tail = f"\n\nAll runs of this sweep, in any experiment: tags.`{sweep_tag(record.sweep_id)}` != ''"
    if links:
        names = {run.run_id: f"{run.row} · seed {run.seed}" for run in record.runs}
        tail += f"\n\n{len(record.reused)} runs were trained by earlier sweeps and are listed there:\n\n"
        tail += "\n".join(f"- [{names[run_id]}]({link})" for run_id, link in links.items())
        if len(record.reused) > len(links):
            tail += f"\n- {len(record.reused) - len(links)} more: see the artifact reused.json"
    table = f"\n\n{record.table['markdown']}" if record.table else ""
    if len(head + table + tail) > MAX_NOTE_CHARACTERS:
        table = "\n\nThe table is too long for a note: see the artifact table.md."
    return (head + table + tail)[:MAX_NOTE_CHARACTERS]


@dataclass(frozen=True)
class _Item:
    """Record of a run in the index."""

    record: RunRecord
    places: Sequence[Membership]
    tracked_id: str | None


class RunMirror:
    """Sends runs. Every method raises StoreError and TrackingError; the run can be sent again then."""

    def __init__(self, store: Store, mirrored: Mirrored, tracking: MlflowTracking, sweeps: SweepMirror) -> None:
        self._store, self._mirrored, self._tracking, self._sweeps = store, mirrored, tracking, sweeps
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

    def _send(self, item: _Item, folder: RunFolder) -> TrackedRun:
        record, running = item.record, item.record.status == "running"
        begun: dict[str, Any] = _readable(lambda: folder.spec, record.status, {})
        created_ms = int(begun.get("created_ms") or record.created_ms or record.updated_ms or record.ended_ms or 0)
        known = self._running.get(record.run_id)
        tracked = known[0] if known else self._find_or_create(item, created_ms)
        if tracked.deleted:
            return tracked
        tags = sweep_tags(item.places)
        # The status is sent last: a run that is finished in the tracker is complete there, except for later sweeps.
        if tracked.status == "finished":
            self._tracking.log(tracked, tags=changed(tags, tracked.tags))
            return tracked
        if running and not known:
            if tracked.status != "running":
                self._tracking.set_status(tracked, "running")
            self._mirrored.mark({record.run_id: (0, tracked.id)})
        curve: list[dict[str, float]] = _readable(lambda: folder.curve(times=True), record.status, [])
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
        self._tracking.log(
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
        # Also where the index has no note of it: a sender was killed, or the index was made again.
        if found := tracked or self._tracking.find({f"{TAG}run_id": record.run_id}):
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


def _readable(read: Callable[[], T | None], status: Status, empty: T) -> T:
    """The content of a run's file; of a damaged run, `empty` for what cannot be read."""
    try:
        return read() or empty
    except DamagedError:
        if status != "damaged":
            raise
        return empty


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
