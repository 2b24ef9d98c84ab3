"""`MLflowLogger` logs a store's runs and sweeps to MLflow. Importing this module takes seconds.

A SQLite store is the file `<store>/mlflow.db`; its artifacts are beside it in `mlartifacts/<experiment>/`. A server
keeps its own artifacts.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from cachetools import TTLCache, cachedmethod
from mlflow.entities import Experiment, LoggedModel, LoggedModelOutput, Metric, Param, Run, RunTag, ViewType

from cope_sweep.redaction import redacted, redacted_url
from cope_sweep.store import RunFolder, RunQuery, RunRecord, Status, Store, SweepRecord
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index.database import sqlite_file
from cope_sweep.store.index.model import QueryError, SweepPlace
from cope_sweep.tracking import content
from cope_sweep.tracking.client import connect, write_log
from cope_sweep.tracking.content import MAX_LINKS, TAG
from cope_sweep.tracking.model import described
from cope_sweep.tracking.tracker import IN_TRASH, run_state
from cope_sweep.tracking.uri import RUN_ID_TAG, TrackingError

RUN_STATUS: dict[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "SCHEDULED",
    "stopped": "KILLED",
}
"""Only what is finished in the store is finished in MLflow: a filter on its status gives the runs of the table. An
interrupted run waits to be continued, which MLflow's pages show by a clock; one that a scheduler ended was killed,
which they show in red. Pending runs are not sent."""
SWEEP_STATUS: dict[Status, str] = RUN_STATUS | {"interrupted": "KILLED", "pending": "SCHEDULED"}
"""An interrupted sweep is not continued: another one trains the rest. A pending one was submitted."""
NO_SWEEP = "cope_sweep"
"""The experiment of runs that no sweep of the store contains."""
ARTIFACTS = "mlartifacts"
ID_TAG = {"run": RUN_ID_TAG, "sweep": f"{TAG}sweep_id"}
"""Kind → the tag by which a run or sweep is looked up."""
OLDEST_FIRST = ["attributes.start_time ASC", "attributes.run_id ASC"]
PARENT_TAG = "mlflow.parentRunId"
MAX_CHARACTERS = {"tag": 8000, "param": 6000, "note": 20000}
"""The lengths that MLflow accepts."""
NOT_IN_MODEL_NAMES = str.maketrans(dict.fromkeys("/:.%\"'", "-"))
"""Characters that MLflow does not allow in the name of a model."""
EXPERIMENTS_S = 10.0
"""The time for which a list of the experiments is used before it is read again: other processes create some, too."""
MAX_EXPERIMENTS = 50_000
"""The longest list that MLflow gives at once."""
PAGE = 1000
"""Runs that are read at once."""


class MLflowLogger:
    """Logs the runs and sweeps of a store to MLflow: `log_run`, `log_sweep`, `close`. It is a `Tracker`.

    One run of the store is one run there, and so is a sweep, their parent. Each is looked up by its tag before it is
    created, and has the tag `cope_sweep.status`, which is written last, when it is complete. Two processes that log one
    run at the same moment may create it twice, or its model: the next call keeps the oldest, and `logged` leaves out
    what is there twice, so that `sync` makes that call.

    Raises:
        TrackingError: Every method.
    """

    def __init__(self, store: Store, uri: str) -> None:
        """Connect to the SQLite file or server at `uri`. The file is created if it does not exist."""
        self._store, self._uri, self._client = store, uri, connect(uri)
        self._listed: TTLCache[Any, dict[str, Experiment]] = TTLCache(1, EXPERIMENTS_S)
        self._ids: dict[str, str] = {}
        """Run or sweep → its id in MLflow."""
        database = sqlite_file(uri)
        if database is not None and database.resolve().parent == store.root.resolve():
            self._check_place(database)

    def log_run(self, run_id: str) -> None:
        """Create a run that has started, or log what MLflow lacks of it: the points after its own, and the end."""
        record, folder = self._store.index.records([run_id]).get(run_id), self._store.run(run_id)
        if record is None or record.status == "pending":
            return
        sweep, place = self._place(record)
        parent_id = self._parent_id(sweep) if sweep else ""
        run = self._find(run_id, "run")
        is_running = record.status == "running"  # then it may have new points
        if run is not None and (_is_in_trash(run) or (_state(run, parent_id) == run_state(record) and not is_running)):
            return
        document: dict[str, Any] = folder.spec or {}
        spec: dict[str, Any] = document.get("spec", {})
        created_ms = int(document.get("created_ms") or record.created_ms or record.updated_ms or record.ended_ms or 0)
        tags = content.run_tags(record, sweep, place) | ({PARENT_TAG: parent_id} if sweep else {})
        is_new = run is None
        if run is None:
            name = f"{place.row} · seed {place.seed}" if place else run_id
            kind = {f"{TAG}kind": "run", RUN_ID_TAG: run_id}
            run = self._create(run_id, sweep, name, {key: tag for key, tag in tags.items() if tag} | kind, created_ms)
        # The status first, so that nothing stays running there if this process is killed before the rest.
        ended_ms = record.ended_ms or record.updated_ms or record.created_ms
        self._set_status(run, RUN_STATUS[record.status], None if is_running else ended_ms)
        latest = {
            point.key: Metric(point.key, point.value, point.timestamp, point.step)
            for point in run.data.to_proto().metrics
        }
        points = content.curve_points(latest, folder.curve(times=True), created_ms)
        if record.status == "finished":
            points = self._log_result(run, record, folder, spec, points, latest, tags, is_new=is_new)
        if record.status == "failed":
            reason = redacted(str(folder.state.get("traceback") or record.message or ""))
            self._client.log_text(run.info.run_id, reason, "error.txt")
        # MLflow writes the tags of a batch last: what has these two is complete.
        tags |= {f"{TAG}status": record.status, f"{TAG}attempt": str(record.attempt)}
        self._log(run, points, content.flat(spec), tags)

    def log_sweep(self, sweep_id: str) -> None:
        """Create a sweep, or log its progress, or its end."""
        record = self._store.sweep(sweep_id)
        if record is None:
            return
        run, status = self._sweep_run(record)
        if _is_in_trash(run):
            return
        records = self._store.index.records(member.run_id for member in record.runs)
        statuses = {run_id: row.status for run_id, row in records.items()}
        has_ended = status not in ("running", "pending")
        reused = self._links(record) if has_ended else {}
        note = {"mlflow.note.content": content.sweep_note(record, statuses, self._best(record), reused)}
        if not has_ended:
            self._log(run, tags=note)
            return
        trained_here = [row for run_id, row in records.items() if run_id not in set(record.reused)]
        sent_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        points = [
            each for each in content.sweep_points(record, trained_here) if each.step > sent_steps.get(each.key, -1)
        ]
        self._client.log_text(run.info.run_id, record.file_text, "ablation.yaml")
        # MLflow lists runs by their sweep, with its data: any finished run has it.
        for finished in [row for row in records.values() if row.status == "finished"][:1]:
            spec = (self._store.run(finished.run_id).spec or {}).get("spec", {})
            self._client.log_inputs(run.info.run_id, content.datasets(finished, spec))
        self._log(run, points, content.sweep_params(record), note | {f"{TAG}status": status})

    def logged(self) -> dict[str, str]:
        """Run or sweep → the state in which it is complete; "" if it is there twice, or below another parent."""
        states: dict[str, str] = {}
        parents: dict[str, str] = {}
        for kind in ("sweep", "run"):
            for run in self._search(kind):
                tags, item = run.data.tags, run.data.tags.get(ID_TAG[kind])
                if item is None:  # it was discarded
                    continue
                parent_id = parents.get(tags.get(ID_TAG["sweep"], ""), tags.get(PARENT_TAG, ""))
                if _is_in_trash(run):
                    states.setdefault(item, IN_TRASH)
                elif item in states or len(_models(run)) > 1:
                    states[item] = ""
                else:
                    states[item] = tags.get(f"{TAG}status", "") if kind == "sweep" else _state(run, parent_id)
                if kind == "sweep":
                    parents.setdefault(item, run.info.run_id)
        return states

    def delete_run(self, run_id: str) -> None:
        """Put a run into MLflow's trash, without its tag and its model: trained again, it is another one there."""
        for run in list(self._search("run", run_id)):
            if _is_in_trash(run):
                self._client.restore_run(run.info.run_id)
            self._discard(run, "run")

    def close(self) -> None:
        """Leave a SQLite file whole, without a write-ahead log."""
        write_log(self._uri)

    # -- runs and sweeps in MLflow ---------------------------------------------------------------------------------

    def _search(self, kind: str, item: str | None = None) -> Iterator[Run]:
        """All runs or sweeps in MLflow, or those of one, the oldest first, then those in its trash.

        They are read in pages, which takes a server 2 ms for each.
        """
        condition = f"tags.`{TAG}kind` = '{kind}'" + (f" AND tags.`{ID_TAG[kind]}` = '{item}'" if item else "")
        ids = [experiment.experiment_id for experiment in self._experiments().values()]
        for view in (ViewType.ACTIVE_ONLY, ViewType.DELETED_ONLY):
            token: str | None = None if ids else ""
            while token != "":
                page = self._client.search_runs(ids, condition, view, PAGE, OLDEST_FIRST, token)
                yield from page
                token = page.token or ""

    def _find(self, item: str, kind: str) -> Run | None:
        """MLflow's run of a run or sweep; one in the trash only where there is no other. Duplicates are discarded."""
        if item in self._ids:
            return self._client.get_run(self._ids[item])
        found = None
        for run in list(self._search(kind, item)):
            if found is None and len(_models(run)) < 2:
                found = run
            elif not _is_in_trash(run):  # a duplicate, or a run with two models, which is logged again
                self._discard(run, kind)
        if found is not None:
            self._ids[item] = found.info.run_id
        return found

    def _discard(self, run: Run, kind: str) -> None:
        """Put a run into the trash, without the tag by which it is found, and delete its models."""
        for model in self._models_of(run):
            self._client.delete_logged_model(model.model_id)
        self._client.delete_tag(run.info.run_id, ID_TAG[kind])
        self._client.delete_run(run.info.run_id)

    def _models_of(self, run: Run) -> Sequence[LoggedModel]:
        """The models that were made for a run, the oldest first, also those that were not linked to it."""
        found = self._client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
        return sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))

    def _create(self, item: str, sweep: SweepRecord | None, name: str, tags: Mapping[str, str], started_ms: int) -> Run:
        """Create a run with the status running, in the experiment of a sweep."""
        experiment_id = self._experiment(sweep.ablation if sweep else NO_SWEEP, sweep)
        run: Run = self._client.create_run(experiment_id, started_ms, _cut(tags, "tag"), run_name=name)
        self._ids[item] = run.info.run_id
        return run

    def _log(
        self,
        run: Run,
        points: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log points, and the parameters and tags that are not in `run`, in one request for each 1,000 values."""
        new_params, new_tags = (
            [(key, value) for key, value in _cut(values or {}, kind).items() if known.get(key, "") != value]
            for values, known, kind in ((params, run.data.params, "param"), (tags, run.data.tags, "tag"))
        )
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

    # -- a finished run ------------------------------------------------------------------------------------------

    def _log_result(
        self,
        run: Run,
        record: RunRecord,
        folder: RunFolder,
        spec: Mapping[str, Any],
        points: Sequence[Metric],
        latest: Mapping[str, Metric],
        tags: Mapping[str, str],
        *,
        is_new: bool,
    ) -> list[Metric]:
        """Log the data and the model of a finished run. Returns the points to log, the final ones also of the model."""
        known = {**latest, **{point.key: point for point in points}}
        final = {point.key: point for point in content.final_points(record, known)}
        data = content.datasets(record, spec)
        self._client.log_inputs(run.info.run_id, data)
        model_id, checkpoint = next(iter(_models(run)), None), folder.fetch_checkpoint()
        if model_id is None and checkpoint.is_dir():
            axes = {key: value for key, value in tags.items() if key.startswith(f"{TAG}axis.")}
            model_id = self._log_model(
                run,
                checkpoint,
                f"{tags.get(f'{TAG}row', 'run')} seed {record.seed}",
                params=content.flat({"model": spec.get("model", {})}),
                tags=axes | {RUN_ID_TAG: record.run_id},
                step=record.step,
                is_new=is_new,
            )
        if model_id is not None:
            by_split = {dataset.tags[0].value: dataset.dataset for dataset in data}
            final = {key: content.of_model(point, model_id, by_split) for key, point in final.items()}
        earlier = [point for point in points if point.key not in final or final[point.key].step != point.step]
        return [*earlier, *final.values()]

    def _log_model(
        self,
        run: Run,
        checkpoint: Path,
        name: str,
        *,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        step: int,
        is_new: bool,
    ) -> str:
        """Log a checkpoint as the model of a run, and link it at last: a run that has a model has a complete one."""
        # A process that was killed before it had linked its model may have left one.
        model = next(iter([] if is_new else self._models_of(run)), None) or self._client.create_logged_model(
            run.info.experiment_id,
            name=name.translate(NOT_IN_MODEL_NAMES),
            source_run_id=run.info.run_id,
            params=_cut(params, "param"),
            tags=_cut(tags, "tag"),
            model_type="cope_sweep",
        )
        with described(model, checkpoint) as folder:
            self._client.log_model_artifacts(model.model_id, str(folder))
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step)])
        return str(model.model_id)

    # -- sweeps --------------------------------------------------------------------------------------------------

    def _place(self, record: RunRecord) -> tuple[SweepRecord | None, SweepPlace | None]:
        """The sweep that trained a run last, and the run's place in it; where it is not known, the oldest with the run.

        A damaged record of a sweep keeps no run from being sent: it is None.
        """
        places = self._store.index.places([record.run_id]).get(record.run_id, [])
        oldest = places[0] if places else None
        place = next((place for place in places if place.sweep_id == record.sweep_id), oldest)
        with suppress(DamagedError):
            return self._store.sweep(place.sweep_id) if place else None, place
        return None, place

    def _parent_id(self, record: SweepRecord) -> str:
        return self._ids.get(record.sweep_id) or str(self._sweep_run(record)[0].info.run_id)

    def _sweep_run(self, record: SweepRecord) -> tuple[Run, Status]:
        """MLflow's run of a sweep, created if it is not there, with the present status of the sweep, and this."""
        run = self._find(record.sweep_id, "sweep")
        if run is None:
            origin = content.flat({"versions": record.versions, "machine": record.machine})
            tags = {f"{TAG}kind": "sweep", ID_TAG["sweep"]: record.sweep_id} | content.source_tags(record)
            name = f"{record.ablation} · {time.strftime('%Y-%m-%d %H:%M', time.gmtime(record.started_ms / 1000))}"
            tags |= {f"{TAG}{key}": value for key, value in origin.items()}
            run = self._create(record.sweep_id, record, name, tags, record.started_ms)
        summary = self._store.index.sweep(record.sweep_id)
        status: Status = summary.status if summary else record.status
        ended_ms = record.ended_ms
        if status not in ("running", "pending") and ended_ms is None:  # its process died: when it was last heard of
            rows = self._store.index.records((member.run_id for member in record.runs), values=False).values()
            ends = [row.ended_ms or row.updated_ms or 0 for row in rows if row.sweep_id == record.sweep_id]
            ended_ms = max([record.started_ms, *ends])
        if not _is_in_trash(run):
            self._set_status(run, SWEEP_STATUS[status], ended_ms)
        return run, status

    def _best(self, record: SweepRecord) -> RunRecord | None:
        """The finished run of a sweep with the best value of its primary metric, also if another sweep trained it."""
        name, goal = content.primary_metric(record)
        query = RunQuery(("finished",), sweep_id=record.sweep_id, sort=name, descending=goal == "max", limit=1)
        with suppress(QueryError):  # no run has it
            for run in self._store.index.page(query).runs:
                return run if run.value(name) is not None else None
        return None

    def _links(self, record: SweepRecord) -> dict[str, str]:
        """Run id → id in MLflow, of the runs that a sweep has reused and that MLflow has; MAX_LINKS at most."""
        found = {run_id: self._find(run_id, "run") for run_id in record.reused[:MAX_LINKS]}
        return {key: run.info.run_id for key, run in found.items() if run is not None and not _is_in_trash(run)}

    # -- experiments ---------------------------------------------------------------------------------------------

    @cachedmethod(lambda self: self._listed)
    def _experiments(self) -> dict[str, Experiment]:
        found = self._client.search_experiments(max_results=MAX_EXPERIMENTS)
        return {experiment.name: experiment for experiment in found}

    def _experiment(self, name: str, sweep: SweepRecord | None) -> str:
        """The id of an experiment, which is created if it does not exist."""
        experiments, database = self._experiments(), sqlite_file(self._uri)
        if name not in experiments:
            location = (database.parent / ARTIFACTS / name).as_uri() if database else None
            # With this tag, MLflow's UI shows runs and charts instead of traces of agents.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            tags |= _cut({"mlflow.note.content": content.experiment_note(sweep)}, "note") if sweep else {}
            try:
                self._client.create_experiment(name, location, tags)
            except TrackingError:
                # Another process may have created it just now, or it is in the trash.
                if self._client.get_experiment_by_name(name) is None:
                    raise
            experiments[name] = cast(Experiment, self._client.get_experiment_by_name(name))
        experiment = experiments[name]
        if experiment.lifecycle_stage == "deleted":
            del experiments[name]
            raise TrackingError(
                f"{redacted_url(self._uri)}: the experiment {name!r} is in MLflow's trash; restore it with `mlflow "
                f"experiments restore -x {experiment.experiment_id}`, or empty the trash with `mlflow gc`",
                code="deleted_experiment",
                uri=redacted_url(self._uri),
                experiment=name,
                experiment_id=experiment.experiment_id,
            )
        return str(experiment.experiment_id)

    def _check_place(self, database: Path) -> None:
        """Refuse the database of a store that was moved or copied, to write nothing into the old place.

        MLflow keeps absolute paths of artifacts, and has no request that changes them.
        """
        artifacts = database.parent / ARTIFACTS
        for name, experiment in self._experiments().items():
            parts = urlsplit(experiment.artifact_location)
            folder = Path(unquote(parts.path))
            # Other experiments of the same database may have their files anywhere.
            is_ours = parts.scheme == "file" and folder.name == name and folder.parent.name == ARTIFACTS
            if is_ours and folder.parent.resolve() != artifacts.resolve():
                again = f"rm -r {shlex.quote(str(database))}* {shlex.quote(str(artifacts))}"
                sync = shlex.join(["cope-sweep", "sync", *self._store.option])
                raise TrackingError(
                    f"{database} keeps its files in {folder.parent}, from where the store was moved or copied. MLflow "
                    f"only has a copy of the store; make it again: {again}; {sync}",
                    code="moved_store",
                    file=str(database),
                    artifacts=str(folder.parent),
                )


def _state(run: Run, parent_id: str) -> str:
    """The `run_state` in which a run is complete below a parent."""
    tags = run.data.tags
    is_below = tags.get(PARENT_TAG, "") == parent_id
    return f"{tags.get(f'{TAG}status')} {tags.get(f'{TAG}attempt')}" if is_below else ""


def _is_in_trash(run: Run) -> bool:
    return bool(run.info.lifecycle_stage == "deleted")


def _models(run: Run) -> set[str]:
    """The ids of the models that are linked to a run."""
    return {output.model_id for output in run.outputs.model_outputs} if run.outputs else set()


def _cut(values: Mapping[str, str], kind: str) -> dict[str, str]:
    """`values` with texts cut to the length that MLflow accepts for `kind`."""
    limit = MAX_CHARACTERS[kind]
    return {key: value if len(value) <= limit else value[: limit - 2] + " …" for key, value in values.items()}
