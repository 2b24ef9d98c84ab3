"""Sends sweeps and runs of a store to MLflow. One run of the store is one run there, and so is a sweep: their parent.

Everything can be sent again, also after the process was killed. A run is looked up by its id before it is created. Of
its curve only the points after those that MLflow has are sent, and its status is sent last. A point has the time when
its row was written. Rows of older versions have none: there it is the time when the run was begun, plus 1 ms per step.

A run has the tags `cope_sweep.run_id`, `.sweep_id`, `.ablation`, `.row`, `.axis.<key>`, `.device`, …, and
`cope_sweep.sweep.<sweep id>` = row for every sweep that contains it. Its parameters are the resolved spec under dotted
names.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag

from cope_sweep.config import NUMERIC_FACTS
from cope_sweep.store.artifacts import CURVE_FILE, TIME_KEY, RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunQuery, RunRecord
from cope_sweep.store.index.mirroring import Membership
from cope_sweep.store.index.model import leaves
from cope_sweep.store.index.summaries import sweep_counts
from cope_sweep.store.store import Store
from cope_sweep.store.sweeps import SweepRecord
from cope_sweep.tracking.mlflow import Tracker, cut
from cope_sweep.tracking.uri import mirrored_of

TAG = "cope_sweep."
FACTS = f"{TAG}facts"
MLFLOW_STATUS: dict[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "damaged": "FAILED",
    "interrupted": "KILLED",
    "stopped": "KILLED",
}
"""Only what is finished in the store is finished in MLflow: a filter on its status gives the runs of the table.
The tag `cope_sweep.status` tells a run that a scheduler stopped from one that was interrupted. Pending runs are not
sent."""
MAX_NOTE_CHARACTERS = 7800
"""MLflow cuts the note of a run at 8000 characters."""
MAX_LINKS = 40
"""Reused runs that a note links. The artifact reused.json lists all of them."""
STATUSES: tuple[Status, ...] = ("finished", "running", "failed", "stopped", "damaged", "interrupted", "pending")
PROGRESS_INTERVAL_S = 10.0
"""Between two notes about the progress of a sweep."""
NO_SWEEP = "cope_sweep"
"""The experiment of runs that no sweep of the store contains."""

T = TypeVar("T")
Stamp = tuple[int, int]


class Sender:
    """Sends runs and sweeps to one tracker. Every method raises StoreError and TrackingError; call it again then."""

    def __init__(self, store: Store, uri: str) -> None:
        self.tracker = Tracker(uri)
        self._store, self._client, self._mirrored = store, self.tracker.client, mirrored_of(store, uri)
        newest = self._mirrored.newest_tracked_id()
        if newest is not None and self.tracker.get(newest) is None:
            self._mirrored.forget()  # another database is in its place
        self._curves: dict[str, Stamp] = {}
        """Runs that are trained → what their curve was like when it was last sent."""
        self._parents: dict[str, tuple[str, SweepRecord] | None] = {}
        """Sweep → its id in MLflow and its record; None where the record is missing or damaged."""
        self._noted_s: dict[str, float] = {}
        """Sweep → when its progress was last sent."""
        self._linked: set[str] = set()
        """Sweeps whose reused runs have been tagged."""

    def forget(self, item: str) -> None:
        """Send all of a run or sweep the next time: nobody knows what a request that failed has changed."""
        for known in (self._curves, self._parents, self._noted_s):
            known.pop(item, None)

    # -- runs ----------------------------------------------------------------------------------------------------

    def send_run(self, run_id: str, *, running: bool = False) -> str | None:
        """Send a run that has ended, or what a `running` one has logged since the last time.

        Returns its id in MLflow; None if there is nothing to send: it was deleted, leased or ended, or has no new rows.
        """
        record, folder = self._store.index.records([run_id]).get(run_id), self._store.run(run_id)
        if record is None or (record.status == "running") != running:
            return None
        stamp = _curve_stamp(folder, record)
        if running and self._curves.get(run_id) == stamp:
            return None
        begun: dict[str, Any] = _readable(lambda: folder.spec, record.status, {})
        created_ms = int(begun.get("created_ms") or record.created_ms or record.updated_ms or record.ended_ms or 0)
        places = self._mirrored.memberships([run_id]).get(run_id, [])
        known_id = self._mirrored.tracked_ids([run_id]).get(run_id)
        run = self._find(known_id, {f"{TAG}run_id": run_id}) or self._create_run(record, places, created_ms)
        tracked_id: str = run.info.run_id
        tags = sweep_tags(places)
        if run.info.lifecycle_stage == "deleted":  # somebody has put it into MLflow's trash
            return tracked_id
        if run.info.status == "FINISHED":  # it is complete, except for later sweeps
            self._log(run, tags=tags)
            return tracked_id
        if running and run_id not in self._curves:
            self._set_status(run, "running")
            self._mirrored.mark({run_id: (0, tracked_id)})
        curve: list[dict[str, float]] = _readable(lambda: folder.curve(times=True), record.status, [])
        spec, tags = begun.get("spec", {}), tags | state_tags(record)
        latest = {
            each.key: Metric(each.key, each.value, each.timestamp, each.step) for each in run.data.to_proto().metrics
        }
        points = curve_points(latest, curve, created_ms)
        if record.status == "finished":
            self._finish(run, record, folder, spec, points, latest, tags)
        else:
            self._log(run, points, flat(spec), tags)
        if record.status in ("failed", "damaged"):
            self._client.log_text(tracked_id, _reason(record, folder), "error.txt")
        if running:
            self._curves[run_id] = stamp
        else:  # at last: a run that has ended in MLflow is complete there
            self._set_status(run, record.status, record.ended_ms or record.updated_ms)
            self._curves.pop(run_id, None)
        return tracked_id

    def _create_run(self, record: RunRecord, places: Sequence[Membership], created_ms: int) -> Run:
        """Create a run, in the experiment of the sweep that first trained it."""
        place = trained_by(places, record.sweep_id, created_ms)
        tags = state_tags(record) | sweep_tags(places) | identity_tags(record.run_id, place)
        experiment, note = NO_SWEEP, ""
        if place is not None:
            experiment = place.ablation
            if (parent := self._parent(place.sweep_id)) is not None:
                tags = origin_tags(parent[1]) | tags | {"mlflow.parentRunId": parent[0]}
                note = experiment_note(parent[1])
        name = f"{place.row} · seed {place.seed}" if place else record.run_id
        return self.tracker.create(experiment, name, tags=tags, started_ms=created_ms, note=note)

    def _finish(
        self,
        run: Run,
        record: RunRecord,
        folder: RunFolder,
        spec: Mapping[str, Any],
        points: Sequence[Metric],
        latest: Mapping[str, Metric],
        tags: Mapping[str, str],
    ) -> None:
        """Log what only a finished run has: final metrics, data and model, to which the metrics belong."""
        final = {point.key: point for point in final_points(record, {**latest, **{each.key: each for each in points}})}
        data = datasets(record, spec)
        # The data is logged before a model is made: a run without data cannot have one.
        new = not (run.inputs and run.inputs.dataset_inputs)
        self._client.log_inputs(run.info.run_id, data)
        model, checkpoint = None, folder.fetch_checkpoint()
        if checkpoint.is_dir() and not (run.outputs and run.outputs.model_outputs):
            known = dict(run.data.tags)
            axes = {key: value for key, value in known.items() if key.startswith(f"{TAG}axis.")}
            model = self.tracker.put_model(
                run,
                checkpoint,
                f"{known.get(f'{TAG}row', 'run')} seed {record.seed}",
                flat({"model": spec.get("model", {})}),
                axes | {f"{TAG}run_id": record.run_id},
                new=new,
            )
            by_split = {each.tags[0].value: each.dataset for each in data}
            final = {key: _of_model(point, model.model_id, by_split) for key, point in final.items()}
        rest = [point for point in points if (last := final.get(point.key)) is None or last.step != point.step]
        self._log(run, [*rest, *final.values()], flat(spec), tags)
        if model is not None:
            self.tracker.link_model(run.info.run_id, model.model_id, record.step)

    # -- sweeps --------------------------------------------------------------------------------------------------

    def settle(self, sweep_id: str) -> None:
        """End a sweep that has ended in MLflow, too. The rest is sent after the sweep's runs."""
        if (record := self._store.sweep(sweep_id)) is not None:
            self._sweep(record)

    def send_sweep(self, sweep_id: str, *, running: bool = False) -> str | None:
        """Send a sweep that has ended; the progress of a `running` one every PROGRESS_INTERVAL_S at most.

        Returns its id in MLflow; None if there is nothing to send.
        """
        if running and time.monotonic() - self._noted_s.get(sweep_id, -PROGRESS_INTERVAL_S) < PROGRESS_INTERVAL_S:
            return None
        record = self._store.sweep(sweep_id)
        if record is None:
            return None
        run, status = self._sweep(record)
        tracked_id: str = run.info.run_id
        if run.info.lifecycle_stage == "deleted":
            return tracked_id
        reused = self._mirrored.tracked_ids(record.reused)
        if sweep_id not in self._linked:
            self._tag_reused(record, reused)
        counts = sweep_counts(self._store.index, [sweep_id]).get(sweep_id, {})
        tags = {
            "mlflow.note.content": sweep_note(record, counts, reused),
            f"{TAG}status": status,
            f"{TAG}reused": str(len(record.reused)),
            **{f"{TAG}runs.{each}": str(counts.get(each, 0)) for each in STATUSES},
        }
        if running:
            self._log(run, tags=tags)
            self._noted_s[sweep_id] = time.monotonic()
            return tracked_id
        last = max((each.step for each in run.data.to_proto().metrics), default=-1)
        points = [point for point in self._progress(record) if point.step > last]
        self._log(run, points, sweep_params(record), tags)
        for path, text in _sweep_files(record, reused).items():
            self._client.log_text(tracked_id, text, path)
        # MLflow lists runs by their sweep, with its data: that of any of them.
        for finished in self._store.index.page(RunQuery(("finished",), sweep_id=sweep_id, limit=1)).runs:
            spec = (self._store.run(finished.run_id).spec or {}).get("spec", {})
            self._client.log_inputs(tracked_id, datasets(finished, spec))
        self.forget(sweep_id)
        return tracked_id

    def _parent(self, sweep_id: str) -> tuple[str, SweepRecord] | None:
        if sweep_id not in self._parents:
            try:
                record = self._store.sweep(sweep_id)
            except DamagedError:  # its runs are sent without it
                record = None
            self._parents[sweep_id] = (self._sweep(record)[0].info.run_id, record) if record else None
        return self._parents[sweep_id]

    def _sweep(self, record: SweepRecord) -> tuple[Run, Status]:
        """MLflow's run of a sweep, created if there is none, with the present status of the sweep, and this."""
        sweep_id = record.sweep_id
        tags = {f"{TAG}kind": "sweep", f"{TAG}sweep_id": sweep_id}
        known_id = self._mirrored.tracked_ids([sweep_id]).get(sweep_id)
        run = self._find(known_id, tags)
        if run is None:
            note = experiment_note(record)
            run = self.tracker.create(
                record.ablation, sweep_id, tags=tags | origin_tags(record), started_ms=record.started_ms, note=note
            )
        if run.info.run_id != known_id:
            self._mirrored.mark({sweep_id: (0, run.info.run_id)})
        summary = self._store.index.sweep(sweep_id)
        status: Status = summary.status if summary else record.status
        ended_ms = None
        if status != "running":
            ended_ms = record.ended_ms or self._mirrored.last_ms(sweep_id) or record.started_ms
        self._set_status(run, status, ended_ms)
        return run, status

    def _progress(self, record: SweepRecord) -> list[Metric]:
        """The number of finished runs over time; a step is a second since the start of the sweep."""
        points = {}
        for number, ended_ms in enumerate(self._mirrored.finished_ms(record.sweep_id), start=1):
            second = max(0, ended_ms - record.started_ms) // 1000
            points[second] = Metric("runs/finished", float(number), ended_ms, second)
        return list(points.values())

    def _tag_reused(self, record: SweepRecord, reused: Mapping[str, str]) -> None:
        """Give the runs that a sweep reused its tag. Those that MLflow does not have get it when they are sent."""
        rows = {run.run_id: run.row for run in record.runs}
        for run_id, tracked_id in reused.items():
            run = self.tracker.get(tracked_id)
            if run is not None and run.info.lifecycle_stage != "deleted":
                self._log(run, tags={sweep_tag(record.sweep_id): rows[run_id]})
        self._linked.add(record.sweep_id)

    # -- both ----------------------------------------------------------------------------------------------------

    def _find(self, tracked_id: str | None, tags: Mapping[str, str]) -> Run | None:
        """MLflow's run of a run or sweep of the store, by the id in the index, else by its tags.

        The index has no id where a sender was killed, or where the index was made again.
        """
        return (self.tracker.get(tracked_id) if tracked_id else None) or self.tracker.find(tags)

    def _log(
        self,
        run: Run,
        points: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log points, and the parameters and tags that are not in `run`."""
        new_params, new_tags = (
            [(key, value) for key, value in cut(values or {}, kind).items() if known.get(key, "") != value]
            for values, known, kind in ((params, run.data.params, "param"), (tags, run.data.tags, "tag"))
        )
        if points or new_params or new_tags:
            self._client.log_batch(
                run.info.run_id,
                list(points),
                [Param(key, value) for key, value in new_params],
                [RunTag(key, value) for key, value in new_tags],
            )

    def _set_status(self, run: Run, status: Status, ended_ms: int | None = None) -> None:
        if run.info.status == MLFLOW_STATUS[status] or run.info.lifecycle_stage == "deleted":
            return
        if status == "running":
            self._client.update_run(run.info.run_id, MLFLOW_STATUS[status])
        else:
            self._client.set_terminated(run.info.run_id, MLFLOW_STATUS[status], ended_ms)


def mlflow_key(key: str) -> str:
    """The name of a metric in MLflow, which does not allow `@`: `test/perplexity at 2048`."""
    return key.replace("@", " at ")


def curve_points(latest: Mapping[str, Metric], curve: Sequence[Mapping[str, float]], created_ms: int) -> list[Metric]:
    """The points of each metric after its last step in `latest`, each (metric, step) once.

    A run that resumes from a checkpoint trains some steps again. The points that were sent first stay.

    Args:
        latest: Metric → the last point that MLflow has.
        curve: The logged rows of the run, each with its `step` and, unless it is old, its time of day.
        created_ms: When the run was first begun.
    """
    last = {key: point.step for key, point in latest.items()}
    points = []
    for row in curve:
        step = int(row["step"])
        timestamp_ms = int(row.get(TIME_KEY, created_ms + step))
        for name, value in row.items():
            key = mlflow_key(name)
            if name not in ("step", TIME_KEY) and step > last.get(key, -1):
                points.append(Metric(key, float(value), timestamp_ms, step))
                last[key] = step
    return points


def final_points(record: RunRecord, latest: Mapping[str, Metric]) -> list[Metric]:
    """The final metrics of a finished run and its measured facts, as the points in `latest` where they are there.

    MLflow shows metrics under `system/` on a page of their own, so that a chart of one point is not among the learning
    curves. Facts that say how the run was executed (threads, workers) are tags only.
    """
    ended_ms = max((point.timestamp for point in latest.values()), default=record.ended_ms or record.created_ms or 0)
    facts = {f"system/{name}": record.facts.get(name) for name in NUMERIC_FACTS}
    points = []
    for name, value in (*record.metrics.items(), *facts.items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            key = mlflow_key(name)
            known = latest.get(key)
            is_known = known is not None and (known.value == value or known.step >= record.step)
            points.append(known if is_known and known else Metric(key, float(value), ended_ms, record.step))
    return points


def _of_model(point: Metric, model_id: str, by_split: Mapping[str, Dataset]) -> Metric:
    """A point as a metric of a model, too, and of the data that its name begins with."""
    data = by_split.get(point.key.partition("/")[0])
    return Metric(
        point.key, point.value, point.timestamp, point.step, model_id=model_id,
        dataset_name=data.name if data else None, dataset_digest=data.digest if data else None,
    )  # fmt: skip


def datasets(record: RunRecord, spec: Mapping[str, Any]) -> list[DatasetInput]:
    """The data that a finished run read: the training set, and each test set that it has metrics of.

    The digest is the fingerprint of the text that the task reads, or, where the task generates its sequences, that of
    the task's spec. Its context is its use: `train`, or the name of the test set.
    """
    task = spec.get("task", {})
    source = json.dumps({"task": task}, sort_keys=True)
    digest = str(record.facts.get("data") or hashlib.sha256(source.encode()).hexdigest()[:16])[:36]
    splits = dict.fromkeys(["train", *(key.partition("/")[0] for key in record.metrics if "/" in key)])
    return [
        DatasetInput(
            Dataset(f"{task.get('kind', 'task')}/{split}", digest, source_type="cope_sweep", source=source),
            [InputTag("mlflow.data.context", split)],
        )
        for split in splits
    ]


def _sweep_files(record: SweepRecord, reused: Mapping[str, str]) -> dict[str, str]:
    """Artifact → content, of a sweep."""
    texts = {"ablation.yaml": record.file_text}
    if reused:
        texts["reused.json"] = json.dumps(reused, indent=1) + "\n"
    if table := record.table:
        texts |= {"table.md": table["markdown"], "table.csv": table["csv"]}
        texts["table.json"] = json.dumps(table["json"], indent=1) + "\n"
    return texts


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
        stat = (folder.path / CURVE_FILE).stat()
    except OSError:
        return record.revision, 0
    return stat.st_mtime_ns, stat.st_size


# -- the texts that MLflow shows: tags, parameters and notes -----------------------------------------------------------


def flat(value: Mapping[str, Any]) -> dict[str, str]:
    """A spec under dotted names, see `leaves`; what is no text is JSON."""
    return {name: _text(leaf) for name, leaf in leaves(value)}


def identity_tags(run_id: str, place: Membership | None) -> dict[str, str]:
    """Tags that identify a run: its id, and its row and the labels of its axes in the sweep that first trained it."""
    tags = {f"{TAG}kind": "run", f"{TAG}run_id": run_id}
    if place is not None:
        tags |= {f"{TAG}row": place.row, f"{TAG}sweep_id": place.sweep_id, f"{TAG}ablation": place.ablation}
        tags |= {f"{TAG}axis.{key}": label for key, label in place.labels.items()}
    return tags


def sweep_tag(sweep_id: str) -> str:
    """The tag that a run has for each sweep that contains it; its value is the run's row there."""
    return f"{TAG}sweep.{sweep_id}"


def sweep_tags(places: Iterable[Membership]) -> dict[str, str]:
    """The tags of all sweeps that contain a run."""
    return {sweep_tag(place.sweep_id): place.row for place in places}


def origin_tags(record: SweepRecord) -> dict[str, str]:
    """Tags that say where a sweep and its runs come from: ablation, commit, versions, machine."""
    tags = {f"{TAG}sweep_id": record.sweep_id, f"{TAG}ablation": record.ablation}
    origin = {"versions": record.versions, "machine": record.machine}
    tags |= {f"{TAG}{name}": value for name, value in flat(origin).items()}
    tags |= {"mlflow.source.name": " ".join(record.command), "mlflow.source.type": "JOB"}
    if record.git_commit:
        tags["mlflow.source.git.commit"] = record.git_commit
    return tags


def state_tags(record: RunRecord) -> dict[str, str]:
    """Tags with the status of a run, why it ended, and the facts that are known of it."""
    tags = {
        f"{TAG}status": record.status,
        f"{TAG}attempt": str(record.attempt),
        f"{TAG}message": record.message or "",
    }
    if record.worker_id:
        tags[f"{TAG}worker_id"] = record.worker_id
    if record.parent_id:
        tags[f"{TAG}parent_id"] = record.parent_id
    if record.facts:
        # One tag holds all facts as JSON, for programs; each fact also has a tag of its own, for people.
        tags[FACTS] = json.dumps(dict(record.facts))
        tags |= {f"{TAG}{name}": _text(value) for name, value in record.facts.items()}
    return tags


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def trained_by(places: Sequence[Membership], last_sweep: str | None, created_ms: int) -> Membership | None:
    """The sweep that first trained a run: the last one with this run that started before the run was begun.

    Where the run is older than all of them: the one that trained it last, else the first one.
    """
    before = [place for place in places if place.started_ms <= created_ms]
    last = [place for place in places if place.sweep_id == last_sweep]
    return next(iter([*before[-1:], *last, *places]), None)


def sweep_params(record: SweepRecord) -> dict[str, str]:
    """The parameters of a sweep that has ended; a search adds runs until then."""
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


def sweep_note(record: SweepRecord, counts: Mapping[Status, int], reused: Mapping[str, str]) -> str:
    """The note of a sweep: its progress, its table once there is one, and links to the runs that it reused.

    `counts` is the number of runs by status; `reused` maps the ids of reused runs to those that they have in MLflow.
    """
    progress = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts.get(status))
    head = f"{experiment_note(record)}\n\n{len(record.runs)} runs: {progress}."
    head += "".join(f"\n\n{note}" for note in record.notes)
    tail = f"\n\nAll runs of this sweep, in any experiment: tags.`{sweep_tag(record.sweep_id)}` != ''"
    if linked := [run for run in record.runs if run.run_id in reused][:MAX_LINKS]:
        tail += f"\n\n{len(record.reused)} runs were trained by earlier sweeps and are listed there:\n\n"
        tail += "\n".join(f"- [{run.row} · seed {run.seed}](#/runs/{reused[run.run_id]})" for run in linked)
        if len(record.reused) > len(linked):
            tail += f"\n- {len(record.reused) - len(linked)} more: see the artifact reused.json"
    table = f"\n\n{record.table['markdown']}" if record.table else ""
    if len(head + table + tail) > MAX_NOTE_CHARACTERS:
        table = "\n\nThe table is too long for a note: see the artifact table.md."
    return (head + table + tail)[:MAX_NOTE_CHARACTERS]
