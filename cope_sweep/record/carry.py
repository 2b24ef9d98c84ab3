"""Carry a sweep and its runs from the ledger to a tracker: one run here is one run there, however often it is carried.

A run is looked up by its id, over all experiments, before it is made; of its curve only what the tracker lacks is sent.
So everything may be done again: after a kill of whoever, from the ledger alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import get_args

from cope_sweep.record.describe import about, note
from cope_sweep.record.event import Status
from cope_sweep.record.ledger import Ledger, RunFolder, StoreError, read_json
from cope_sweep.record.tracking import Standing, Tracked, Tracking, TrackingError
from cope_sweep.record.translate import (
    TAG,
    Record,
    ended_ms,
    flat,
    identity_tags,
    origin_tags,
    points_after,
    state_tags,
)

PATIENCE = 2
"""Runs of a sync that may fail before it is rather the tracker than a run; the rest then wait for the next sync."""


class Carrier:
    """Keeps a tracker level with one sweep of a ledger, `sync` after `sync`."""

    def __init__(self, ledger: Ledger, sweep_id: str, tracking: Tracking) -> None:
        self.ledger, self.sweep_id, self.tracking = ledger, sweep_id, tracking
        self.written: set[str] = set()
        """Ids of the runs that something was sent of."""
        self.errors: dict[str, str] = {}
        """What could not be carried yet: run or sweep id → why."""
        self._tracked: dict[str, Tracked] = {}
        self._sweeps: dict[str, Tracked] = {}
        self._owners: dict[str, Record] = {}
        self._seen: dict[str, object] = {}

    def sync(self, *, abandoned: bool = False) -> None:
        """Carry whatever changed since the last time. What fails is kept in `errors`, and tried again next time.

        `abandoned`: the sweep's process died, so its record cannot say how it ended.
        """
        record = self._record()
        if abandoned and record["status"] == "running":
            record = {**record, "status": "interrupted"}
        failures = 0
        # What failed before comes last, so that it keeps nothing else back.
        for run in sorted(record["runs"], key=lambda run: run["run_id"] in self.errors):
            run_id: str = run["run_id"]
            with self._noting(run_id):
                self._carry_run(record, run)
            failures += run_id in self.errors
            if failures == PATIENCE:
                break
        with self._noting(self.sweep_id):
            self._carry_sweep(record)
        for owner in list(self._owners.values()):
            with self._noting(owner["sweep_id"]):
                self._carry_sweep(owner)
                del self._owners[owner["sweep_id"]]

    def _status(self, run_id: str) -> Status:
        """What is finished stays so, and need not be looked at again."""
        return "finished" if self._seen.get(run_id) == "finished" else self.ledger.run(run_id).status

    def _record(self) -> Record:
        record: Record | None = read_json(self.ledger.root / "sweeps" / f"{self.sweep_id}.json")
        if record is None:
            raise StoreError(f"{self.ledger.root} has no sweep {self.sweep_id}")
        return record

    @contextlib.contextmanager
    def _noting(self, key: str) -> Iterator[None]:
        try:
            yield
        except (TrackingError, StoreError, OSError) as error:
            self.errors[key] = str(error)
        else:
            self.errors.pop(key, None)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Between looking something up and making it, nobody else on this store makes it."""
        with (self.ledger.root / "mlflow.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # -- runs ----------------------------------------------------------------------------------------------------

    def _carry_run(self, record: Record, run: Record) -> None:
        run_id: str = run["run_id"]
        folder = self.ledger.run(run_id)
        status = self._status(run_id)
        look = "finished" if status == "finished" else (status, *_stamps(folder))
        if status == "pending" or self._seen.get(run_id) == look:
            return
        begun = folder.spec
        if begun is None:
            raise StoreError(f"{folder.path} has no spec.json; delete the folder to have the run trained again")
        tracked = self._tracked.get(run_id) or self._found(record, run, begun["created_ms"])
        # A run's standing is set last: finished there means that all of it is there.
        if tracked.standing != "finished":
            self._send(folder, status, begun, tracked)
            self.written.add(run_id)
        self._seen[run_id] = look

    def _found(self, record: Record, run: Record, created_ms: int) -> Tracked:
        """The tracker's run, made where it has none, in the experiment of the sweep that first trained it."""
        run_id: str = run["run_id"]
        with self._alone():
            tracked = self.tracking.find({f"{TAG}run_id": run_id})
            if tracked is None:
                owner = self._owner(record, run_id, created_ms)
                own = next(each for each in owner["runs"] if each["run_id"] == run_id)
                tracked = self.tracking.create(
                    owner["ablation"],
                    f"{own['row']} · seed {own['seed']}",
                    tags={"mlflow.parentRunId": self._sweep(owner).id, **identity_tags(own), **origin_tags(owner)},
                    started_ms=created_ms,
                    about=about(owner),
                )
        self._tracked[run_id] = tracked
        return tracked

    def _owner(self, record: Record, run_id: str, created_ms: int) -> Record:
        """The sweep that first trained a run: the last one with it that had started when the run was begun."""
        if record["started_ms"] <= created_ms:
            return record
        earlier = [
            sweep
            for sweep in self.ledger.sweeps()
            if sweep["started_ms"] <= created_ms and any(run["run_id"] == run_id for run in sweep["runs"])
        ]
        return max(earlier, key=lambda sweep: sweep["started_ms"], default=record)

    def _send(self, folder: RunFolder, status: Status, begun: Record, tracked: Tracked) -> None:
        tracking = self.tracking
        if status == "running" and tracked.standing != "running":
            tracking.set_standing(tracked, "running")
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
            tracking.set_standing(tracked, status, ended_ms(folder, status, state))

    # -- sweeps --------------------------------------------------------------------------------------------------

    def _sweep(self, record: Record) -> Tracked:
        """The tracker's run of a sweep, made where it has none. For the holder of `_alone`."""
        sweep_id: str = record["sweep_id"]
        if sweep_id not in self._sweeps:
            tags = {f"{TAG}kind": "sweep", f"{TAG}sweep_id": sweep_id}
            self._sweeps[sweep_id] = self.tracking.find(tags) or self.tracking.create(
                record["ablation"],
                sweep_id,
                tags=tags | origin_tags(record),
                started_ms=record["started_ms"],
                about=about(record),
            )
            if sweep_id != self.sweep_id:
                # A run of it was not there, so the rest of it may be missing too.
                self._owners[sweep_id] = record
        return self._sweeps[sweep_id]

    def _carry_sweep(self, record: Record) -> None:
        with self._alone():
            parent = self._sweep(record)
        runs = record["runs"]
        counts: Counter[Status] = Counter()
        for run in runs:
            # One whose files are not whole is told of as an error of its own.
            with contextlib.suppress(StoreError):
                counts[self._status(run["run_id"])] += 1
        reused = {run_id: self._tracked[run_id] for run_id in record["reused"] if run_id in self._tracked}
        text = note(record, counts, {run_id: tracked.link for run_id, tracked in reused.items()})
        params = {
            "executor": record["executor"],
            "rows": str(len({run["row"] for run in runs})),
            "seeds": json.dumps(sorted({run["seed"] for run in runs})),
            "runs": str(len(runs)),
            "metrics": ", ".join(metric["name"] for metric in record["metrics"]),
        }
        tags = {
            "mlflow.note.content": text,
            f"{TAG}status": record["status"],
            f"{TAG}reused": str(len(record["reused"])),
        }
        tags |= {f"{TAG}runs.{status}": str(counts[status]) for status in get_args(Status)}
        changed = _changed(tags, parent.tags)
        if changed:
            self.tracking.log(parent, params=_changed(params, parent.params), tags=changed)
        look = (record["status"], record["ended_ms"], record["table"] is not None)
        if self._seen.get(record["sweep_id"]) == look:
            return
        self.tracking.put_text(parent, "ablation.yaml", record["file_text"])
        if reused:
            ids = {run_id: tracked.id for run_id, tracked in reused.items()}
            self.tracking.put_text(parent, "reused.json", json.dumps(ids, indent=1) + "\n")
        if table := record["table"]:
            self.tracking.put_text(parent, "table.md", table["markdown"])
            self.tracking.put_text(parent, "table.csv", table["csv"])
            self.tracking.put_text(parent, "table.json", json.dumps(table["json"], indent=1) + "\n")
        standing: Standing = record["status"]
        if standing != "running" or parent.standing != "running":
            self.tracking.set_standing(parent, standing, record["ended_ms"])
        self._seen[record["sweep_id"]] = look


def _changed(values: Mapping[str, str], have: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if have.get(key, "") != value}


def _stamps(folder: RunFolder) -> list[int]:
    """What tells that a run's files changed."""
    stamps = []
    for name in ("spec.json", "state.json", "curve.jsonl", "result.json"):
        try:
            stat = (folder.path / name).stat()
        except FileNotFoundError:
            continue
        stamps += [stat.st_mtime_ns, stat.st_size]
    return stamps
