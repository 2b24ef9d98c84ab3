"""Copies a sweep and its runs from the store to a tracker. One run of the store is one run of the tracker.

Before a run is created, it is looked up by its id in all experiments. Of its curve, only the points that the tracker
does not have are sent. So a sync can be repeated at any time, also after a process was killed, from the store alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import get_args

from cope_sweep.store.artifacts import RunFolder, Store, StoreError, read_json
from cope_sweep.store.event import Status
from cope_sweep.store.notes import experiment_note, sweep_note
from cope_sweep.store.tracking import TrackedRun, TrackedStatus, Tracking, TrackingError
from cope_sweep.store.translate import (
    TAG,
    Record,
    ended_ms,
    flat,
    identity_tags,
    origin_tags,
    points_after,
    state_tags,
)

MAX_FAILED_RUNS_PER_SYNC = 2
"""After this many runs of one sync have failed, the tracker is taken to be down. The next sync sends the others."""


class TrackerSync:
    """Keeps a tracker up to date with one sweep of a store. Call `sync` as often as needed."""

    def __init__(self, store: Store, sweep_id: str, tracking: Tracking) -> None:
        self.store, self.sweep_id, self.tracking = store, sweep_id, tracking
        self.written: set[str] = set()
        """Ids of the runs of which anything was sent."""
        self.errors: dict[str, str] = {}
        """What could not be sent yet: run or sweep id → the reason."""
        self._tracked_runs: dict[str, TrackedRun] = {}
        self._tracked_sweeps: dict[str, TrackedRun] = {}
        self._incomplete_sweeps: dict[str, Record] = {}
        """Earlier sweeps that the tracker does not have completely: sweep id → record."""
        self._sent: dict[str, object] = {}
        """Run or sweep id → the state of its files when it was last sent."""

    def sync(self, *, abandoned: bool = False) -> None:
        """Send what has changed since the last sync. What fails is noted in `errors` and sent by the next sync.

        Args:
            abandoned: Whether the sweep's process died. The sweep's record then still says "running".

        Raises:
            StoreError: The store has no readable record of the sweep.
        """
        record = self._record()
        if abandoned and record["status"] == "running":
            record = {**record, "status": "interrupted"}
        failures = 0
        # Runs that failed in the last sync come last, so that they do not keep others from being sent.
        for run in sorted(record["runs"], key=lambda run: run["run_id"] in self.errors):
            run_id: str = run["run_id"]
            with self._collecting_errors(run_id):
                self._sync_run(record, run)
            failures += run_id in self.errors
            if failures == MAX_FAILED_RUNS_PER_SYNC:
                break
        with self._collecting_errors(self.sweep_id):
            self._sync_sweep(record)
        for earlier in list(self._incomplete_sweeps.values()):
            with self._collecting_errors(earlier["sweep_id"]):
                self._sync_sweep(earlier)
                del self._incomplete_sweeps[earlier["sweep_id"]]

    def _status(self, run_id: str) -> Status:
        """The status of a run. A finished run stays finished, so its files are not read again."""
        return "finished" if self._sent.get(run_id) == "finished" else self.store.run(run_id).status

    def _record(self) -> Record:
        record: Record | None = read_json(self.store.root / "sweeps" / f"{self.sweep_id}.json")
        if record is None:
            raise StoreError(f"{self.store.root} has no sweep {self.sweep_id}")
        return record

    @contextlib.contextmanager
    def _collecting_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (TrackingError, StoreError, OSError) as error:
            self.errors[key] = str(error)
        else:
            self.errors.pop(key, None)

    @contextlib.contextmanager
    def _creation_lock(self) -> Iterator[None]:
        """While it is held, no other process that uses this store looks up and creates runs in the tracker."""
        with (self.store.root / "mlflow.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # -- runs ----------------------------------------------------------------------------------------------------

    def _sync_run(self, record: Record, run: Record) -> None:
        run_id: str = run["run_id"]
        folder = self.store.run(run_id)
        status = self._status(run_id)
        current = "finished" if status == "finished" else (status, *_file_stamps(folder))
        if status == "pending" or self._sent.get(run_id) == current:
            return
        begun = folder.spec
        if begun is None:
            raise StoreError(f"{folder.path} has no spec.json; delete the folder to train the run again")
        tracked = self._tracked_runs.get(run_id) or self._find_or_create(record, run, begun["created_ms"])
        # The status is sent last. So a run that is finished in the tracker is complete there.
        if tracked.status != "finished":
            self._send(folder, status, begun, tracked)
            self.written.add(run_id)
        self._sent[run_id] = current

    def _find_or_create(self, record: Record, run: Record, created_ms: int) -> TrackedRun:
        """The tracker's run. If there is none, it is created in the experiment of the sweep that first trained it."""
        run_id: str = run["run_id"]
        with self._creation_lock():
            tracked = self.tracking.find({f"{TAG}run_id": run_id})
            if tracked is None:
                owner = self._owner(record, run_id, created_ms)
                entry = next(each for each in owner["runs"] if each["run_id"] == run_id)
                parent = self._find_or_create_sweep(owner)
                tracked = self.tracking.create(
                    owner["ablation"],
                    f"{entry['row']} · seed {entry['seed']}",
                    tags={"mlflow.parentRunId": parent.id, **identity_tags(entry), **origin_tags(owner)},
                    started_ms=created_ms,
                    note=experiment_note(owner),
                )
        self._tracked_runs[run_id] = tracked
        return tracked

    def _owner(self, record: Record, run_id: str, created_ms: int) -> Record:
        """The sweep that first trained a run: the last sweep with this run that started before the run was begun."""
        if record["started_ms"] <= created_ms:
            return record
        earlier = [
            sweep
            for sweep in self.store.sweeps()
            if sweep["started_ms"] <= created_ms and any(run["run_id"] == run_id for run in sweep["runs"])
        ]
        return max(earlier, key=lambda sweep: sweep["started_ms"], default=record)

    def _send(self, folder: RunFolder, status: Status, begun: Record, tracked: TrackedRun) -> None:
        tracking = self.tracking
        if status == "running" and tracked.status != "running":
            tracking.set_status(tracked, "running")
        result = folder.result if status == "finished" else None
        state = folder.state
        tracking.log(
            tracked,
            points=points_after(tracked.latest, folder.curve(), result, begun["created_ms"]),
            params=_changed(flat(begun["spec"]), tracked.params),
            tags=_changed(state_tags(status, state, result), tracked.tags),
        )
        if status == "failed":
            tracking.put_text(tracked, "error.txt", state.get("traceback", ""))
        if result is not None and folder.checkpoint.is_dir():
            tracking.put_folder(tracked, "checkpoint", folder.checkpoint)
        if status != "running" and status != "pending":
            tracking.set_status(tracked, status, ended_ms(folder, status, state))

    # -- sweeps --------------------------------------------------------------------------------------------------

    def _find_or_create_sweep(self, record: Record) -> TrackedRun:
        """The tracker's run of a sweep, created if there is none. The caller holds the creation lock."""
        sweep_id: str = record["sweep_id"]
        if sweep_id not in self._tracked_sweeps:
            tags = {f"{TAG}kind": "sweep", f"{TAG}sweep_id": sweep_id}
            self._tracked_sweeps[sweep_id] = self.tracking.find(tags) or self.tracking.create(
                record["ablation"],
                sweep_id,
                tags=tags | origin_tags(record),
                started_ms=record["started_ms"],
                note=experiment_note(record),
            )
            if sweep_id != self.sweep_id:
                # The tracker did not have a run of this earlier sweep, so its table may be missing there, too.
                self._incomplete_sweeps[sweep_id] = record
        return self._tracked_sweeps[sweep_id]

    def _sync_sweep(self, record: Record) -> None:
        with self._creation_lock():
            parent = self._find_or_create_sweep(record)
        runs = record["runs"]
        counts: Counter[Status] = Counter()
        for run in runs:
            # `_sync_run` reports files that cannot be read.
            with contextlib.suppress(StoreError):
                counts[self._status(run["run_id"])] += 1
        reused = {run_id: self._tracked_runs[run_id] for run_id in record["reused"] if run_id in self._tracked_runs}
        params = {
            "executor": record["executor"],
            "rows": str(len({run["row"] for run in runs})),
            "seeds": json.dumps(sorted({run["seed"] for run in runs})),
            "runs": str(len(runs)),
            "metrics": ", ".join(metric["name"] for metric in record["metrics"]),
        }
        tags = {
            "mlflow.note.content": sweep_note(record, counts, {key: tracked.link for key, tracked in reused.items()}),
            f"{TAG}status": record["status"],
            f"{TAG}reused": str(len(record["reused"])),
        }
        tags |= {f"{TAG}runs.{status}": str(counts[status]) for status in get_args(Status)}
        changed = _changed(tags, parent.tags)
        if changed:
            self.tracking.log(parent, params=_changed(params, parent.params), tags=changed)
        current = (record["status"], record["ended_ms"], record["table"] is not None)
        if self._sent.get(record["sweep_id"]) == current:
            return
        self.tracking.put_text(parent, "ablation.yaml", record["file_text"])
        if reused:
            ids = {run_id: tracked.id for run_id, tracked in reused.items()}
            self.tracking.put_text(parent, "reused.json", json.dumps(ids, indent=1) + "\n")
        if table := record["table"]:
            self.tracking.put_text(parent, "table.md", table["markdown"])
            self.tracking.put_text(parent, "table.csv", table["csv"])
            self.tracking.put_text(parent, "table.json", json.dumps(table["json"], indent=1) + "\n")
        status: TrackedStatus = record["status"]
        if status != "running" or parent.status != "running":
            self.tracking.set_status(parent, status, record["ended_ms"])
        self._sent[record["sweep_id"]] = current


def _changed(values: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The entries of `values` that differ from `known`; a missing entry counts as empty."""
    return {key: value for key, value in values.items() if known.get(key, "") != value}


def _file_stamps(folder: RunFolder) -> list[int]:
    """Modification times and sizes of a run's files. They differ if a file has changed."""
    stamps = []
    for name in ("spec.json", "state.json", "curve.jsonl", "result.json"):
        try:
            stat = (folder.path / name).stat()
        except FileNotFoundError:
            continue
        stamps += [stat.st_mtime_ns, stat.st_size]
    return stamps
