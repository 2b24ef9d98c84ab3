"""Brings MLflow up to date with a store. One run of the store is one run there, and so is a sweep, their parent.

Everything can be sent again, also after the process was killed, and by several processes at once. A run is looked up by
its tag `cope_sweep.run_id` before it is created. Of its curve only the points after those that MLflow has are sent. A
run that has ended gets MLflow's status first, so that it does not stay running there, and the tag `cope_sweep.status`
last: with both, it is complete.

A point has the time when its row was written. Rows of older versions have none: there it is the time when the run
started, plus 1 ms per step.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag

from cope_sweep.config import NUMERIC_FACTS
from cope_sweep.config.keys import leaves
from cope_sweep.redaction import redacted
from cope_sweep.store import STATUSES, RunFolder, RunQuery, RunRecord, Status, Store, SweepRecord
from cope_sweep.store.curve import TIME_KEY
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index.model import QueryError, SweepPlace
from cope_sweep.tracking.mlflow import Tracker, age, cut
from cope_sweep.tracking.uri import RUN_ID_TAG

TAG = "cope_sweep."
MLFLOW_STATUS: dict[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "damaged": "FAILED",
    "interrupted": "SCHEDULED",
    "stopped": "KILLED",
}
"""Only what is finished in the store is finished in MLflow: a filter on its status gives the runs of the table. An
interrupted run waits to be continued, which MLflow's pages show by a clock; one that a scheduler ended was killed,
which they show in red. Pending runs are not sent."""
SWEEP_STATUS: dict[Status, str] = MLFLOW_STATUS | {"interrupted": "KILLED", "pending": "SCHEDULED"}
"""An interrupted sweep is not continued: another one trains the rest. A pending one was submitted."""
MAX_NOTE_CHARACTERS = 7800
"""MLflow cuts the note of a run at 8000 characters."""
MAX_LINKS = 40
"""Reused runs that a note links."""
NO_SWEEP = "cope_sweep"
"""The experiment of runs that no sweep of the store contains."""
OMITTED_FACTS = {*NUMERIC_FACTS, "steps", "data"}
"""Facts that are not tags: metrics, a parameter, and the digest of the dataset."""

T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """What MLflow shows of a run or sweep."""

    tracked_id: str
    """Its id in MLflow."""
    status: str
    is_deleted: bool
    """Whether somebody has put it into MLflow's trash, where it stays."""
    parent_id: str
    sent: tuple[str, str]
    """Status and attempt in the store that it is complete with; of a sweep, the attempt is empty."""

    @classmethod
    def of(cls, run: Run) -> Self:
        tags = run.data.tags
        sent = tags.get(f"{TAG}status", ""), tags.get(f"{TAG}attempt", "")
        is_deleted = run.info.lifecycle_stage == "deleted"
        return cls(run.info.run_id, run.info.status, is_deleted, tags.get("mlflow.parentRunId", ""), sent)

    def has_run(self, record: RunRecord, parent_id: str | None) -> bool:
        """Whether all of a run that has ended is here, below its sweep's `parent_id`, where that is known."""
        is_same = (self.status, *self.sent) == (MLFLOW_STATUS[record.status], record.status, str(record.attempt))
        return self.is_deleted or (is_same and parent_id in (None, self.parent_id))

    def has_sweep(self, status: Status) -> bool:
        """Whether all of a sweep that has ended with this status is here."""
        return self.is_deleted or (self.status, self.sent[0]) == (SWEEP_STATUS[status], status)


class _Sweep(NamedTuple):
    """A sweep's record and its id in MLflow."""

    record: SweepRecord
    tracked_id: str


class Sender:
    """Sends runs and sweeps to one tracker. Every method raises StoreError and TrackingError; call it again then."""

    def __init__(self, store: Store, uri: str) -> None:
        self.tracker = Tracker(uri)
        self._store, self._client = store, self.tracker.client
        self._ids: dict[str, str] = {}
        """Run or sweep → its id in MLflow."""
        self._sweeps: dict[str, _Sweep | None] = {}
        """None where the record is missing or damaged."""

    # -- what MLflow has -----------------------------------------------------------------------------------------

    def seen_runs(self, *, experiment: str | None = None, sweep_id: str | None = None) -> dict[str, Seen]:
        """Run id → what MLflow shows of it: of all runs of one experiment, of one sweep, or of all."""
        condition = f"tags.`{TAG}kind` = 'run'" + (f" AND tags.`{TAG}sweep_id` = '{sweep_id}'" if sweep_id else "")
        return self._seen(self.tracker.search(condition, experiment=experiment), RUN_ID_TAG)

    def seen_sweeps(self, *, experiment: str | None = None) -> dict[str, Seen]:
        """Sweep id → what MLflow shows of it."""
        return self._seen(self.tracker.search(f"tags.`{TAG}kind` = 'sweep'", experiment=experiment), f"{TAG}sweep_id")

    def _seen(self, runs: Iterable[Run], tag: str) -> dict[str, Seen]:
        """The value of a tag → what MLflow shows of the run that has it; of several, the one that `find` keeps."""
        sent_before: dict[str, tuple[tuple[bool, int, str], Seen]] = {}
        for run in runs:
            key, rank = run.data.tags.get(tag, ""), age(run)
            if key not in sent_before or rank < sent_before[key][0]:
                sent_before[key] = rank, Seen.of(run)
        return {key: seen for key, (_, seen) in sent_before.items()}

    def end_run(self, seen: Seen, record: RunRecord) -> None:
        """Show a run as ended that has ended in the store. Its rest is sent later."""
        if seen.status == "RUNNING" and not seen.is_deleted:
            ended_ms = record.ended_ms or record.updated_ms
            self._client.set_terminated(seen.tracked_id, MLFLOW_STATUS[record.status], ended_ms)

    def end_sweep(self, sweep_id: str) -> None:
        """Show a sweep as ended if it has ended in the store. Its rest is sent later."""
        with suppress(DamagedError):
            record = self._store.sweep(sweep_id)
            if record is not None:
                self._sweep_run(record)

    def end_shown(self, runs: Mapping[str, RunRecord], deadline_s: float) -> None:
        """Show runs as ended that this sender has shown as running, until `deadline_s` on the monotonic clock."""
        for run_id, record in runs.items():
            if run_id in self._ids and time.monotonic() < deadline_s:
                ended_ms = record.ended_ms or record.updated_ms
                self._client.set_terminated(self._ids[run_id], MLFLOW_STATUS[record.status], ended_ms)

    # -- runs ----------------------------------------------------------------------------------------------------

    def send_run(self, run_id: str, *, is_new: bool = False) -> RunRecord | None:
        """Bring MLflow up to date with a run, which is trained or has ended; `is_new`: MLflow did not have it just now.

        Returns the record that was sent; None if there is none, or if the run has not started.
        """
        record, folder = self._store.index.records([run_id]).get(run_id), self._store.run(run_id)
        if record is None or record.status == "pending":
            return None
        existing = None if is_new else self._find(run_id, {RUN_ID_TAG: run_id})
        sweep, place = self._place(record)
        if (
            existing
            and record.status != "running"
            and Seen.of(existing).has_run(record, sweep.tracked_id if sweep else None)
        ):
            return record
        run_spec: dict[str, Any] = _readable(lambda: folder.spec, record.status, {})
        created_ms, tags = _created_ms(record, run_spec), run_tags(record, sweep, place)
        run = existing or self._create_run(record, sweep, place, tags, created_ms)
        if run.info.lifecycle_stage == "deleted":
            return record
        ended_ms = None if record.status == "running" else record.ended_ms or record.updated_ms or record.created_ms
        self._set_status(run, MLFLOW_STATUS[record.status], ended_ms)
        curve: list[dict[str, float]] = _readable(lambda: folder.curve(times=True), record.status, [])
        latest = {
            metric.key: Metric(metric.key, metric.value, metric.timestamp, metric.step)
            for metric in run.data.to_proto().metrics
        }
        points, spec = curve_points(latest, curve, created_ms), run_spec.get("spec", {})
        if record.status == "finished":
            points = self._finish(run, record, folder, spec, points, latest, tags)
        if record.status in ("failed", "damaged"):
            self._client.log_text(run.info.run_id, _reason(record, folder), "error.txt")
        # MLflow writes the tags of a batch last: what has these two is complete.
        complete = {f"{TAG}status": record.status, f"{TAG}attempt": str(record.attempt)}
        self._log(run, points, flat(spec), tags | complete)
        return record

    def _create_run(
        self,
        record: RunRecord,
        sweep: _Sweep | None,
        place: SweepPlace | None,
        run_tags: Mapping[str, str],
        started_ms: int,
    ) -> Run:
        """Create a run in the experiment of its sweep, unless another process does so."""
        tags = {**run_tags, f"{TAG}kind": "run", RUN_ID_TAG: record.run_id}

        def create() -> Run:
            return self.tracker.create(
                sweep.record.ablation if sweep else NO_SWEEP,
                f"{place.row} · seed {place.seed}" if place else record.run_id,
                tags={key: value for key, value in tags.items() if value},
                started_ms=started_ms,
                note=experiment_note(sweep.record) if sweep else "",
            )

        return self._create(record.run_id, {RUN_ID_TAG: record.run_id}, create)

    def _place(self, record: RunRecord) -> tuple[_Sweep | None, SweepPlace | None]:
        """The sweep that trained a run last, and the run's place in it; where it is not known, the oldest with the run.

        A damaged record of a sweep keeps no run from being sent: it is None.
        """
        places = self._store.index.places([record.run_id]).get(record.run_id, [])
        oldest = places[0] if places else None
        place = next((place for place in places if place.sweep_id == record.sweep_id), oldest)
        return self._sweep(place.sweep_id) if place else None, place

    def _finish(
        self,
        run: Run,
        record: RunRecord,
        folder: RunFolder,
        spec: Mapping[str, Any],
        points: Sequence[Metric],
        latest: Mapping[str, Metric],
        tags: Mapping[str, str],
    ) -> list[Metric]:
        """Log the data and the model of a finished run. The points that are left, with the final ones of the model."""
        final = {
            point.key: point for point in final_points(record, {**latest, **{point.key: point for point in points}})
        }
        data = datasets(record, spec)
        # The data is logged before a model is made: a run without data cannot have one.
        new = not (run.inputs and run.inputs.dataset_inputs)
        self._client.log_inputs(run.info.run_id, data)
        linked = [output.model_id for output in run.outputs.model_outputs] if run.outputs else []
        model_id, checkpoint = next(iter(linked), None), folder.fetch_checkpoint()
        if model_id is None and checkpoint.is_dir():
            axes = {key: value for key, value in tags.items() if key.startswith(f"{TAG}axis.")}
            model_id = self.tracker.put_model(
                run,
                checkpoint,
                f"{tags.get(f'{TAG}row', 'run')} seed {record.seed}",
                flat({"model": spec.get("model", {})}),
                axes | {RUN_ID_TAG: record.run_id},
                new=new,
            ).model_id
            self.tracker.link_model(run.info.run_id, model_id, record.step)
        if model_id is not None:
            by_split = {dataset.tags[0].value: dataset.dataset for dataset in data}
            final = {key: _of_model(point, model_id, by_split) for key, point in final.items()}
        earlier = [point for point in points if point.key not in final or final[point.key].step != point.step]
        return [*earlier, *final.values()]

    # -- sweeps --------------------------------------------------------------------------------------------------

    def send_sweep(self, sweep_id: str) -> None:
        """Bring MLflow up to date with a sweep. One that has ended is complete then: send its runs before."""
        record = self._store.sweep(sweep_id)
        if record is None:
            return
        run, status = self._sweep_run(record)
        self._sweeps[sweep_id] = _Sweep(record, run.info.run_id)
        if run.info.lifecycle_stage == "deleted":
            return
        if status in ("running", "pending"):
            statuses = self._store.index.statuses(member.run_id for member in record.runs)
            self._log(run, tags={"mlflow.note.content": sweep_note(record, statuses, self._best(record), {})})
            return
        records = self._store.index.records(member.run_id for member in record.runs)
        reused_ids = set(record.reused)
        trained_here = [run_record for run_id, run_record in records.items() if run_id not in reused_ids]
        reused = self._links(record)
        statuses = {run_id: run_record.status for run_id, run_record in records.items()}
        note = sweep_note(record, statuses, self._best(record), reused)
        sent_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        points = [point for point in sweep_points(record, trained_here) if point.step > sent_steps.get(point.key, -1)]
        self._log(run, points, sweep_params(record), {"mlflow.note.content": note})
        self._client.log_text(run.info.run_id, record.file_text, "ablation.yaml")
        # MLflow lists runs by their sweep, with its data: any finished run has it.
        for finished in [run_record for run_record in records.values() if run_record.status == "finished"][:1]:
            spec = (self._store.run(finished.run_id).spec or {}).get("spec", {})
            self._client.log_inputs(run.info.run_id, datasets(finished, spec))
        self._log(run, tags={f"{TAG}status": status})

    def _sweep(self, sweep_id: str) -> _Sweep | None:
        """A sweep and its run in MLflow, which is created if there is none."""
        if sweep_id not in self._sweeps:
            try:
                record = self._store.sweep(sweep_id)
            except DamagedError:  # its runs are sent without it
                record = None
            self._sweeps[sweep_id] = _Sweep(record, self._sweep_run(record)[0].info.run_id) if record else None
        return self._sweeps[sweep_id]

    def _sweep_run(self, record: SweepRecord) -> tuple[Run, Status]:
        """MLflow's run of a sweep, created if it is not there, with the present status of the sweep, and this."""
        tags = {f"{TAG}kind": "sweep", f"{TAG}sweep_id": record.sweep_id}
        origin = flat({"versions": record.versions, "machine": record.machine})

        def create() -> Run:
            return self.tracker.create(
                record.ablation,
                f"{record.ablation} · {time.strftime('%Y-%m-%d %H:%M', time.gmtime(record.started_ms / 1000))}",
                tags=tags | source_tags(record) | {f"{TAG}{key}": value for key, value in origin.items()},
                started_ms=record.started_ms,
                note=experiment_note(record),
            )

        run = self._find(record.sweep_id, tags) or self._create(record.sweep_id, tags, create)
        summary = self._store.index.sweep(record.sweep_id)
        status: Status = summary.status if summary else record.status
        ended_ms = record.ended_ms
        if status not in ("running", "pending") and ended_ms is None:  # its process died: when it was last heard of
            runs = self._store.index.records((member.run_id for member in record.runs), values=False).values()
            ends = [run.ended_ms or run.updated_ms or 0 for run in runs if run.sweep_id == record.sweep_id]
            ended_ms = max([record.started_ms, *ends])
        if run.info.lifecycle_stage != "deleted":
            self._set_status(run, SWEEP_STATUS[status], ended_ms)
        return run, status

    def _best(self, record: SweepRecord) -> RunRecord | None:
        """The finished run of a sweep with the best value of its primary metric, also if another sweep trained it."""
        name, goal = primary_metric(record)
        query = RunQuery(("finished",), sweep_id=record.sweep_id, sort=name, descending=goal == "max", limit=1)
        with suppress(QueryError):  # no run has it
            for run in self._store.index.page(query).runs:
                return run if run.value(name) is not None else None
        return None

    def _links(self, record: SweepRecord) -> dict[str, str]:
        """Run id → id in MLflow, of the runs that a sweep has reused and that MLflow has; MAX_LINKS at most."""
        links = {}
        for run_id in record.reused[:MAX_LINKS]:
            run = self._find(run_id, {RUN_ID_TAG: run_id})
            if run is not None and run.info.lifecycle_stage != "deleted":
                links[run_id] = run.info.run_id
        return links

    # -- both ----------------------------------------------------------------------------------------------------

    def _find(self, item: str, tags: Mapping[str, str]) -> Run | None:
        """MLflow's run of a run or sweep of the store."""
        if item in self._ids:
            run = self._client.get_run(self._ids[item])
            if run.info.lifecycle_stage != "deleted":
                return run
        existing = self.tracker.find(tags)
        if existing is not None:
            self._ids[item] = existing.info.run_id
        return existing

    def _create(self, item: str, tags: Mapping[str, str], create: Callable[[], Run]) -> Run:
        """Create MLflow's run of a run or sweep that it does not have, or take the one that another process created."""
        existing = None
        while existing is None:
            made = create()
            existing = made if self.tracker.keeps(made, tags) else self._find(item, tags)
        self._ids[item] = existing.info.run_id
        return existing

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

    def _set_status(self, run: Run, status: str, ended_ms: int | None = None) -> None:
        if run.info.status == status:
            return
        if ended_ms is None:
            self._client.update_run(run.info.run_id, status)
        else:
            self._client.set_terminated(run.info.run_id, status, ended_ms)


def mlflow_key(key: str) -> str:
    """The name of a metric in MLflow, which does not allow `@`: `test/perplexity at 2048`."""
    return key.replace("@", " at ")


def curve_points(latest: Mapping[str, Metric], curve: Sequence[Mapping[str, float]], created_ms: int) -> list[Metric]:
    """The points of each metric after its last step in `latest`, each (metric, step) once.

    A run that resumes from a checkpoint trains some steps again. The points that were sent first stay.

    Args:
        latest: Metric → the last point that MLflow has.
        curve: The logged rows of the run, each with its `step` and, unless it is old, its time of day.
        created_ms: When the run first started.
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

    MLflow shows metrics under `system/` on a separate page, so that a chart of one point is not among the learning
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

    The digest is the fingerprint of the text that the task reads, or, if it generates its sequences, of its spec. Its
    context is its use: `train`, or the name of the test set.
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
        return redacted(str(folder.state.get("traceback") or record.message or ""))
    except DamagedError as error:
        return record.message or str(error)


def _created_ms(record: RunRecord, run_spec: Mapping[str, Any]) -> int:
    """When a run first started."""
    return int(run_spec.get("created_ms") or record.created_ms or record.updated_ms or record.ended_ms or 0)


# -- the texts that MLflow shows: tags, parameters and notes -----------------------------------------------------------


def flat(value: Mapping[str, Any]) -> dict[str, str]:
    """A spec under dotted names, see `leaves`; what is not a text is JSON."""
    return {name: _text(leaf) for name, leaf in leaves(value)}


def run_tags(record: RunRecord, sweep: _Sweep | None, place: SweepPlace | None) -> dict[str, str]:
    """The tags of a run that may change while it is trained, and by the sweep that trains it again."""
    tags = {f"{TAG}message": record.message or "", f"{TAG}worker_id": record.worker_id or ""}
    tags |= {f"{TAG}{key}": _text(value) for key, value in record.facts.items() if key not in OMITTED_FACTS}
    if sweep is not None:
        tags |= source_tags(sweep.record) | {"mlflow.parentRunId": sweep.tracked_id}
    if place is not None:
        tags[f"{TAG}row"] = place.row
        tags |= {f"{TAG}axis.{key}": label for key, label in place.labels.items()}
    return {key: value for key, value in tags.items() if value or key == f"{TAG}message"}


def source_tags(record: SweepRecord) -> dict[str, str]:
    """Tags of a sweep and of each of its runs: ablation, command and commit."""
    tags = {
        f"{TAG}sweep_id": record.sweep_id,
        f"{TAG}ablation": record.ablation,
        "mlflow.source.name": " ".join(record.command),
        "mlflow.source.type": "JOB",
    }
    return tags | ({"mlflow.source.git.commit": record.git_commit} if record.git_commit else {})


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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


def primary_metric(record: SweepRecord) -> tuple[str, str]:
    """Name and goal (`min` or `max`) of the primary metric of a sweep's ablation."""
    first = [*record.metrics, {"name": "train/loss", "goal": "min"}][0]
    metric = next((metric for metric in record.metrics if metric["name"] == record.primary), first)
    return metric["name"], metric["goal"]


def sweep_points(record: SweepRecord, runs: Sequence[RunRecord]) -> list[Metric]:
    """The number of the runs that a sweep has finished, and their best primary metric, over time.

    A step is a second since the start of the sweep.
    """
    name, goal = primary_metric(record)
    best_of = max if goal == "max" else min
    points: dict[tuple[str, int], Metric] = {}
    values: list[float] = []
    finished = sorted((run.ended_ms or 0, run.run_id, run) for run in runs if run.status == "finished")
    for number, (ended_ms, _, run) in enumerate(finished, start=1):
        second = max(0, ended_ms - record.started_ms) // 1000
        points["runs/finished", second] = Metric("runs/finished", float(number), ended_ms, second)
        value = run.value(name)
        if value is not None and value == best_of([*values[-1:], value]) and value not in values[-1:]:
            values.append(value)
            points[name, second] = Metric(mlflow_key(name), float(value), ended_ms, second)
    return list(points.values())


def sweep_note(
    record: SweepRecord, statuses: Mapping[str, Status], best: RunRecord | None, reused: Mapping[str, str]
) -> str:
    """The note of a sweep: its progress, its best run, and links to the runs that it reused.

    `statuses`: run id → status. `reused`: id of a reused run → its id in MLflow.
    """
    counts = Counter(statuses.get(run.run_id, "pending") for run in record.runs)
    progress = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    text = f"{experiment_note(record)}\n\n{len(record.runs)} runs: {progress}."
    if best is not None:
        name, _ = primary_metric(record)
        place = next((f"{run.row} · seed {run.seed}" for run in record.runs if run.run_id == best.run_id), best.run_id)
        text += f"\n\nBest {name}: {best.value(name):.6g} ({place})"
    text += "".join(f"\n\n{note}" for note in record.notes)
    if linked := [run for run in record.runs if run.run_id in reused][:MAX_LINKS]:
        text += f"\n\n{len(record.reused)} runs were trained by earlier sweeps and are listed there:\n\n"
        text += "\n".join(f"- [{run.row} · seed {run.seed}](#/runs/{reused[run.run_id]})" for run in linked)
        if len(record.reused) > len(linked):
            text += f"\n- and {len(record.reused) - len(linked)} more"
    return text[:MAX_NOTE_CHARACTERS]
