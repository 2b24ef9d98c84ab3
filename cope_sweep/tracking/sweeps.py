"""Sends sweeps of a store to a tracker. A sweep is the parent of the runs that it trained."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.index.summaries import sweep_counts
from cope_sweep.store.store import Store
from cope_sweep.store.sweeps import SweepRecord
from cope_sweep.tracking.notes import MAX_LINKS, experiment_note, sweep_note
from cope_sweep.tracking.port import Point, TrackedRun, Tracking
from cope_sweep.tracking.translate import TAG, TRACKED_STATUS, origin_tags, points_after, sweep_tag

PROGRESS_INTERVAL_S = 10.0
"""Between two notes about the progress of a sweep."""


@dataclass(frozen=True)
class Origin:
    """Part of a sweep's record that its runs show."""

    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """The note of the experiment."""


class SweepMirror:
    """Sends sweeps. Every method raises StoreError and TrackingError; the sweep can be sent again then."""

    def __init__(self, store: Store, mirrored: Mirrored, tracking: Tracking) -> None:
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
        if sweep_id not in self._origins or (self._origins[sweep_id].tags and sweep_id not in self._tracked):
            try:
                record = self._store.sweep(sweep_id)
            except DamagedError:
                record = None
            self._origins[sweep_id] = Origin(origin_tags(record), experiment_note(record)) if record else Origin()
            if record is not None:
                self._find_or_create(record)
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
        for known in (self._tracked, self._origins, self._noted_s):
            known.pop(sweep_id, None)
        return tracked.id

    def forget(self, sweep_id: str) -> None:
        """Read the tracker's run again before the next time."""
        self._tracked.pop(sweep_id, None)
        self._noted_s.pop(sweep_id, None)

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
                self._mirrored.mark(sweep_id, 0, tracked.id)
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
        new = {key: value for key, value in tags.items() if tracked.tags.get(key) != value}
        # Parameters cannot change, and a search adds runs until its end.
        params = {} if status == "running" else _params(record)
        params = {key: value for key, value in params.items() if key not in tracked.params}
        if new or params:
            self._tracking.log(tracked, params=params, tags=new)
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
