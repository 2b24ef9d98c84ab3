"""`MLflowLogger` logs a store's runs and sweeps to MLflow. Importing this module takes seconds.

A SQLite store is the file `<store>/mlflow.db`; its artifacts are beside it in `mlartifacts/<experiment>/`. A server
keeps its own artifacts.
"""

from __future__ import annotations

import functools
import itertools
import logging
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from cachetools import TTLCache, cachedmethod
from mlflow.entities import Experiment, LoggedModel, LoggedModelOutput, Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException

from cope_sweep.redaction import redacted
from cope_sweep.store import ACTIVE, RunRecord, Status, Store, SweepRecord
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index.database import sqlite_file
from cope_sweep.store.index.model import SweepPlace
from cope_sweep.tracking import content
from cope_sweep.tracking.client import connect, errors, write_log
from cope_sweep.tracking.content import MAX_LINKS, TAG
from cope_sweep.tracking.files import SweepFiles, no_files
from cope_sweep.tracking.model import described
from cope_sweep.tracking.states import IN_TRASH, run_state
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
MAX_CHARACTERS = 6000
"""MLflow accepts parameters of this length; tags may be longer."""
NOT_IN_MODEL_NAMES = str.maketrans(dict.fromkeys("/:.%\"'", "-"))
"""Characters that MLflow does not allow in the name of a model."""
EXPERIMENTS_S = 10.0
"""The time for which a list of the experiments is used before it is read again: other processes create some, too."""
RECORDS_S = 10.0
"""The time for which the record of a sweep is used before it is read again: that of 500 runs takes 5 ms."""
MAX_EXPERIMENTS = 50_000
"""The longest list that MLflow gives at once."""
PAGE = 1000
"""Runs that are read at once."""

log = logging.getLogger("cope_sweep.tracking")

P = ParamSpec("P")
T = TypeVar("T")


def _with_errors(method: Callable[Concatenate[MLflowLogger, P], T]) -> Callable[Concatenate[MLflowLogger, P], T]:
    """A method that raises MLflow's errors as TrackingError."""

    @functools.wraps(method)
    def call(self: MLflowLogger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with errors(self._uri):
            return method(self, *args, **kwargs)

    return call


class MLflowLogger:
    """Logs the runs and sweeps of a store to MLflow.

    One run of the store is one run there, and so is a sweep, their parent. Each is looked up by its tag before it is
    created, and has the tag `cope_sweep.status`, which is written last, when it is complete. Two processes that log one
    run at the same moment may create it twice, or its model: the next call keeps the oldest, and `logged` leaves out
    what is there twice, so that `sync` makes that call.

    Each method may be called again, also after it has failed or its process was killed: nothing is there twice.

    Raises:
        TrackingError: Every method, where MLflow does not answer or refuses a request.
        StoreError: `log_run` and `log_sweep`.
    """

    def __init__(self, store: Store, uri: str, files: SweepFiles = no_files) -> None:
        """Connect to the SQLite file or server at `uri`. The file is created if it does not exist.

        `files` makes the files of each sweep that has ended.
        """
        self._store, self._uri, self._files = store, uri, files
        self._listed: TTLCache[Any, dict[str, Experiment]] = TTLCache(1, EXPERIMENTS_S)
        self._ids: dict[str, str] = {}
        """Run or sweep → its id in MLflow."""
        self._without_model: set[str] = set()
        """The ids in MLflow of runs that were created here, and for which nobody has made a model."""
        self._sweeps: TTLCache[str, SweepRecord | None] = TTLCache(16, RECORDS_S)
        with errors(uri):
            self._client = connect(uri)
            self._check_place()

    @_with_errors
    def log_run(self, run_id: str, *, status_only: bool = False) -> None:
        """Create a run that has started, or log what MLflow lacks of it: the points after its own, and the end.

        Args:
            run_id: The run. One that has not started is left out.
            status_only: Log only its status, which is quick.
        """
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
        if run is None:
            name = f"{place.row} · seed {place.seed}" if place else run_id
            kind = {f"{TAG}kind": "run", RUN_ID_TAG: run_id}
            run = self._create(run_id, sweep, name, {key: tag for key, tag in tags.items() if tag} | kind, created_ms)
        # The status first, so that nothing stays running there if this process is killed before the rest.
        ended_ms = record.ended_ms or record.updated_ms or record.created_ms
        self._set_status(run, RUN_STATUS[record.status], None if is_running else ended_ms)
        if status_only:
            return
        latest = {
            point.key: Metric(point.key, point.value, point.timestamp, point.step)
            for point in run.data.to_proto().metrics
        }
        points = content.curve_points(latest, folder.curve(times=True), created_ms)
        if record.status == "finished":
            data = content.datasets(record, spec)
            self._client.log_inputs(run.info.run_id, data)
            checkpoint = folder.fetch_checkpoint(record.ended_ms)
            model_id = self._log_model(run, record, checkpoint, spec.get("model", {}), tags)
            points = content.with_final_points(points, latest, record, model_id, data)
        if record.status == "failed":
            reason = redacted(str(folder.state.get("traceback") or record.message or ""))
            self._client.log_text(run.info.run_id, reason, "error.txt")
        # MLflow writes the tags of a batch last: what has these two is complete.
        tags |= {f"{TAG}status": record.status, f"{TAG}attempt": str(record.attempt)}
        self._log(run, points, content.flat(spec), tags)

    @_with_errors
    def log_sweep(self, sweep_id: str, *, status_only: bool = False) -> None:
        """Create a sweep, or log its progress, or its end. `status_only`: as for `log_run`."""
        record, summary = self._store.sweep(sweep_id), self._store.index.sweep(sweep_id)
        if record is None:
            return
        run = self._sweep_run(record)
        if _is_in_trash(run):
            return
        status = summary.status if summary else record.status
        if status in ACTIVE:
            self._set_status(run, SWEEP_STATUS[status])
            if not status_only:
                # Counts alone, every few seconds: the metrics of 20,000 runs take a second.
                counts = self._store.index.sweep_counts([sweep_id]).get(sweep_id, {})
                self._log(run, tags={"mlflow.note.content": content.sweep_note(record, counts)})
            return
        records = self._store.index.records((member.run_id for member in record.runs), values=False)
        trained_here = [row for row in records.values() if row.sweep_id == sweep_id]
        # If its process died, the sweep ended when it was last heard of.
        ends = [row.ended_ms or row.updated_ms or 0 for row in trained_here]
        self._set_status(run, SWEEP_STATUS[status], record.ended_ms or max([record.started_ms, *ends]))
        if status_only:
            return
        sent_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        points = [
            each for each in content.sweep_points(record, trained_here) if each.step > sent_steps.get(each.key, -1)
        ]
        self._client.log_text(run.info.run_id, record.file_text, "ablation.yaml")
        # MLflow lists runs by their sweep, with its data: any finished run has it.
        finished = [run_id for run_id, row in records.items() if row.status == "finished"]
        for run_id, row in self._store.index.records(finished[:1]).items():
            spec = (self._store.run(run_id).spec or {}).get("spec", {})
            self._client.log_inputs(run.info.run_id, content.datasets(row, spec))
        found = {run_id: self._find(run_id, "run") for run_id in record.reused[:MAX_LINKS]}
        linked = {key: each.info.run_id for key, each in found.items() if each and not _is_in_trash(each)}
        counts = Counter(row.status for row in records.values())
        counts["pending"] += len(record.runs) - len(records)
        note_text = content.sweep_note(record, counts, linked)
        texts = [note_text, self._log_files(run, record)]
        note = {"mlflow.note.content": "\n\n".join(filter(None, texts))}
        self._log(run, points, content.sweep_params(record), note | {f"{TAG}status": status})

    @_with_errors
    def logged(self, sweep_ids: Collection[str] | None = None) -> dict[str, str]:
        """Run or sweep → the state in which it is complete; "" if it is not, is there twice, or below another parent.

        Those of all the store, or of some sweeps.
        """
        states: dict[str, str] = {}
        parents: dict[str, str] = {}
        for kind, sweep_id in itertools.product(("sweep", "run"), (None,) if sweep_ids is None else sweep_ids):
            for run in self._search(kind, ID_TAG["sweep"], sweep_id):
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

    @_with_errors
    def delete_run(self, run_id: str) -> None:
        """Put a run into MLflow's trash, without its tag and its model: trained again, it is another one there."""
        # All pages first: each run that leaves the results of the search moves the others to earlier pages.
        for run in list(self._search("run", RUN_ID_TAG, run_id)):
            if _is_in_trash(run):
                self._client.restore_run(run.info.run_id)
            self._discard(run, "run")

    def close(self) -> None:
        """Leave a SQLite file whole, without a write-ahead log."""
        write_log(self._uri)

    # -- runs and sweeps in MLflow ---------------------------------------------------------------------------------

    def _search(self, kind: str, tag: str, value: str | None) -> Iterator[Run]:
        """All runs or sweeps in MLflow, or those with a tag, the oldest first, then those in its trash.

        They are read in pages, which takes a server 2 ms for each run.
        """
        condition = f"tags.`{TAG}kind` = '{kind}'" + (f" AND tags.`{tag}` = '{value}'" if value else "")
        ids = [experiment.experiment_id for experiment in self._experiments().values()]
        in_trash: list[Run] = []
        token: str | None = None if ids else ""
        while token != "":
            # One request for both views: each run is looked up once before it is created, and there is none of it.
            page = self._client.search_runs(ids, condition, ViewType.ALL, PAGE, OLDEST_FIRST, token)
            in_trash += filter(_is_in_trash, page)
            yield from itertools.filterfalse(_is_in_trash, page)
            token = page.token or ""
        yield from in_trash

    def _find(self, item: str, kind: str) -> Run | None:
        """MLflow's run of a run or sweep; one in the trash only where there is no other. Duplicates are discarded."""
        if item in self._ids:
            return self._client.get_run(self._ids[item])
        found = None
        # All pages first, as in `delete_run`.
        for run in list(self._search(kind, ID_TAG[kind], item)):
            if found is None and len(_models(run)) < 2:
                found = run
            elif not _is_in_trash(run):  # a duplicate, or a run with two models, which is logged again
                self._discard(run, kind)
        if found is not None:
            self._ids[item] = found.info.run_id
        return found

    def _discard(self, run: Run, kind: str) -> None:
        """Put a run into the trash, without the tag by which it is found, and delete its models."""
        self._delete_models(run)
        self._client.delete_tag(run.info.run_id, ID_TAG[kind])
        self._client.delete_run(run.info.run_id)
        # Once more: the process that made the run may have made its model since. From now on it cannot link one.
        self._delete_models(run)

    def _delete_models(self, run: Run) -> None:
        for model in self._models_of(run):
            self._client.delete_logged_model(model.model_id)

    def _models_of(self, run: Run) -> Sequence[LoggedModel]:
        """The models that were made for a run, the oldest first, also those that were not linked to it."""
        found = self._client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
        return sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))

    def _create(self, item: str, sweep: SweepRecord | None, name: str, tags: Mapping[str, str], started_ms: int) -> Run:
        """Create a run with the status running, in the experiment of a sweep."""
        experiment_id = self._experiment(sweep.ablation if sweep else NO_SWEEP, sweep)
        run: Run = self._client.create_run(experiment_id, started_ms, _cut(tags), run_name=name)
        self._ids[item] = run.info.run_id
        self._without_model.add(run.info.run_id)
        return run

    def _log(
        self,
        run: Run,
        points: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log points, and the parameters and tags that are not in `run`, in one request for each 1,000 values."""
        new_params = {key: value for key, value in _cut(params or {}).items() if run.data.params.get(key) != value}
        new_tags = {key: value for key, value in _cut(tags or {}).items() if run.data.tags.get(key, "") != value}
        self._client.log_batch(
            run.info.run_id,
            list(points),
            [Param(key, value) for key, value in new_params.items()],
            [RunTag(key, value) for key, value in new_tags.items()],
        )

    def _set_status(self, run: Run, status: str, ended_ms: int | None = None) -> None:
        if run.info.status == status:
            return
        if ended_ms is None:
            self._client.update_run(run.info.run_id, status)
        else:
            self._client.set_terminated(run.info.run_id, status, ended_ms)

    def _log_model(
        self, run: Run, record: RunRecord, checkpoint: Path, spec: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str | None:
        """Log a checkpoint as the model of a run, and link it at last: a run that has a model has a complete one."""
        if linked := _models(run):
            return next(iter(linked))
        if not checkpoint.is_dir():
            return None
        # A process that was killed before it had linked its model may have left one, or a call here that has failed.
        left = () if run.info.run_id in self._without_model else self._models_of(run)
        self._without_model.discard(run.info.run_id)
        model = next(iter(left), None) or self._client.create_logged_model(
            run.info.experiment_id,
            name=f"{tags.get(f'{TAG}row', 'run')} seed {record.seed}".translate(NOT_IN_MODEL_NAMES),
            source_run_id=run.info.run_id,
            params=_cut(content.flat({"model": spec})),
            tags=_cut({key: tag for key, tag in tags.items() if key.startswith(f"{TAG}axis.")})
            | {RUN_ID_TAG: record.run_id},
            model_type="cope_sweep",
        )
        try:
            with described(model, checkpoint) as folder:
                self._client.log_model_artifacts(model.model_id, str(folder))
            self._client.finalize_logged_model(model.model_id, "READY")
            self._client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, record.step)])
        except MlflowException:
            # Another process may have discarded the run, a duplicate, after it had looked for its models.
            if _is_in_trash(self._client.get_run(run.info.run_id)):
                self._delete_models(run)
            raise
        return str(model.model_id)

    def _log_files(self, run: Run, record: SweepRecord) -> str:
        """Log the files of a sweep that has ended; what its note says of them. Only MLflow's own errors are raised."""
        try:
            files = self._files(record)
        except (Exception, SystemExit) as error:  # of a drawing, a damaged file, a plugin: the sweep itself has ended
            log.exception("the files of sweep %s could not be made", record.sweep_id)
            return redacted(f"Its report could not be made: {error or repr(error)}")
        if not files:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            self._client.log_artifacts(run.info.run_id, folder)
        return "Its report, its table with verdicts and its figures are under **Artifacts**."

    def _place(self, record: RunRecord) -> tuple[SweepRecord | None, SweepPlace | None]:
        """The sweep that trained a run last, and the run's place in it; where it is not known, the oldest with the run.

        A damaged record of a sweep keeps no run from being sent: it is None.
        """
        places = self._store.index.places([record.run_id]).get(record.run_id, [])
        oldest = places[0] if places else None
        place = next((place for place in places if place.sweep_id == record.sweep_id), oldest)
        with suppress(DamagedError):
            return self._sweep_of(place.sweep_id) if place else None, place
        return None, place

    @cachedmethod(lambda self: self._sweeps)
    def _sweep_of(self, sweep_id: str) -> SweepRecord | None:
        """The record of a sweep. What runs show of it stays as it is from its start. Raises DamagedError."""
        return self._store.sweep(sweep_id)

    def _parent_id(self, record: SweepRecord) -> str:
        return self._ids.get(record.sweep_id) or str(self._sweep_run(record).info.run_id)

    def _sweep_run(self, record: SweepRecord) -> Run:
        """MLflow's run of a sweep, created if it is not there."""
        run = self._find(record.sweep_id, "sweep")
        if run is not None:
            return run
        origin = content.flat({"versions": record.versions, "machine": record.machine})
        tags = {f"{TAG}kind": "sweep", ID_TAG["sweep"]: record.sweep_id} | content.source_tags(record)
        tags |= {f"{TAG}{key}": value for key, value in origin.items()}
        name = f"{record.ablation} · {time.strftime('%Y-%m-%d %H:%M', time.gmtime(record.started_ms / 1000))}"
        return self._create(record.sweep_id, record, name, tags, record.started_ms)

    # -- experiments ---------------------------------------------------------------------------------------------

    @cachedmethod(lambda self: self._listed)
    def _experiments(self) -> dict[str, Experiment]:
        found = self._client.search_experiments(max_results=MAX_EXPERIMENTS)
        return {experiment.name: experiment for experiment in found}

    def _experiment(self, name: str, sweep: SweepRecord | None) -> str:
        """The id of an experiment, which is created if it does not exist."""
        found = self._experiments().get(name) or self._client.get_experiment_by_name(name)
        if found is not None:  # or in MLflow's trash: it refuses a run there, and says why
            return str(found.experiment_id)
        database = sqlite_file(self._uri)
        location = (database.parent / ARTIFACTS / name).as_uri() if database else None
        # The kind that MLflow's pages show for training; they open where their user was last: see page.OF_TRAINING.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        tags |= {"mlflow.note.content": content.experiment_note(sweep)} if sweep else {}
        try:
            return str(self._client.create_experiment(name, location, _cut(tags)))
        except MlflowException:
            found = self._client.get_experiment_by_name(name)  # another process may have created it just now
            if found is None:
                raise
            return str(found.experiment_id)
        finally:
            self._listed.clear()

    def _check_place(self) -> None:
        """Refuse the database of a store that was moved or copied, to write nothing into the old place.

        MLflow keeps absolute paths of artifacts, and has no request that changes them.
        """
        database, store = sqlite_file(self._uri), self._store.root.resolve()
        if database is None or database.resolve().parent != store:
            return
        for name, experiment in self._experiments().items():
            parts = urlsplit(experiment.artifact_location)
            folder = Path(unquote(parts.path))
            # Other experiments of the same database may have their files anywhere.
            is_ours = parts.scheme == "file" and folder.name == name and folder.parent.name == ARTIFACTS
            before = folder.parent.parent
            if is_ours and not (before.exists() and before.samefile(store)):  # the same: by a link, or mounted twice
                artifacts = store / ARTIFACTS
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
    """The ids of the models that are linked to a run. Unlike `_models_of`, this makes no request."""
    return {output.model_id for output in run.outputs.model_outputs} if run.outputs else set()


def _cut(values: Mapping[str, str]) -> dict[str, str]:
    """`values` with texts cut to a length that MLflow accepts."""
    limit = MAX_CHARACTERS
    return {key: value if len(value) <= limit else value[: limit - 2] + " …" for key, value in values.items()}
