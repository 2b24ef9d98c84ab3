"""MLflow as an experiment tracker. Only the modules `mlflow*` of this package import mlflow, on first use.

Importing mlflow takes seconds. A SQLite store is the file `<store>/mlflow.db`; its artifacts are beside it in
`mlartifacts/<experiment>/`. MLflow stores their absolute paths, so that `mlflow ui` finds them from any directory. An
MLflow server keeps its own artifacts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from cope_sweep.store.files import write_bytes
from cope_sweep.store.mlflow_connection import import_mlflow, tracking_errors
from cope_sweep.store.mlflow_model import describe
from cope_sweep.store.preflight import redacted, sqlite_path
from cope_sweep.store.tracking import Dataset, Model, Point, TrackedRun, TrackedStatus, TrackingError, update_latest

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Run

MLFLOW_STATUS: dict[TrackedStatus, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
}
_STATUS_OF: dict[str, TrackedStatus] = {name: status for status, name in MLFLOW_STATUS.items()} | {
    "SCHEDULED": "running"
}

MAX_LOG_TRIES = 10
"""How often a batch is sent while other processes write the same entries."""

MAX_CHARACTERS = {"tag": 8000, "param": 6000, "note": 20000}
"""The lengths that MLflow accepts."""

NOT_IN_MODEL_NAMES = str.maketrans(dict.fromkeys("/:.%\"'", "-"))
"""Characters that MLflow does not allow in the name of a model."""

CONTEXT_TAG = "mlflow.data.context"


class MlflowTracking:
    """An MLflow tracking store, given as `sqlite:///PATH` or as the URL of a server.

    A SQLite store is created if it does not exist; several processes may do so at once.

    Raises:
        TrackingError: The store cannot be opened.
    """

    def __init__(self, uri: str) -> None:
        import_mlflow()
        from mlflow.tracking import MlflowClient

        self.uri = uri
        self._experiments: dict[str, str] = {}
        database = sqlite_path(uri)
        self._artifact_root = database.parent / "mlartifacts" if database else None
        with self._errors("opened"), _migration_lock(database):
            if database is not None and not database.exists():
                _create(database)
            self._client = MlflowClient(tracking_uri=uri)
            # The client opens its store on first use. MLflow then creates the tables of a new one.
            self._known_experiments = self._all_experiments()

    def find(self, tags: Mapping[str, str]) -> TrackedRun | None:
        condition = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with self._errors("searched"):
            run = self._search(condition)
            if run is None and (experiments := self._all_experiments()) != self._known_experiments:
                self._known_experiments = experiments
                run = self._search(condition)
        return _tracked(run) if run else None

    def get(self, tracked_id: str) -> TrackedRun | None:
        from mlflow.exceptions import MlflowException

        with self._errors("read"):
            try:
                return _tracked(self._client.get_run(tracked_id))
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise

    def _search(self, condition: str) -> Run | None:
        order = ["attributes.start_time ASC"]
        runs = self._client.search_runs(self._known_experiments, condition, max_results=1, order_by=order)
        return runs[0] if runs else None

    def create(
        self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, note: str = ""
    ) -> TrackedRun:
        with self._errors("written"):
            return _tracked(
                self._client.create_run(
                    self._experiment(experiment, note), started_ms, _cut(tags, "tag"), run_name=name
                )
            )

    def log(
        self,
        run: TrackedRun,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        points, params, tags = list(points), _cut(params or {}, "param"), _cut(tags or {}, "tag")
        entries = (
            [Metric(_mlflow_key(point.key), point.value, point.timestamp_ms, point.step) for point in points],
            [Param(key, value) for key, value in params.items()],
            [RunTag(key, value) for key, value in tags.items()],
        )
        with self._errors("written"):
            for tries_left in reversed(range(MAX_LOG_TRIES)):
                try:
                    # The client splits this into requests of 1000 entries.
                    self._client.log_batch(run.id, *entries)
                    break
                except MlflowException as error:
                    # MLflow checks for existing entries before it inserts its own. If another process inserts the
                    # same ones in between, the database refuses them, which MLflow reports as BAD_REQUEST. Logging
                    # equal entries again is allowed.
                    if error.error_code != "BAD_REQUEST" or not tries_left:
                        raise
        run.params |= params
        run.tags |= tags
        for point in points:
            update_latest(run, point)

    def set_status(self, run: TrackedRun, status: TrackedStatus, ended_ms: int | None = None) -> None:
        with self._errors("written"):
            if status == "running":
                self._client.update_run(run.id, MLFLOW_STATUS[status])
            else:
                self._client.set_terminated(run.id, MLFLOW_STATUS[status], ended_ms)
        run.status = status

    def put_text(self, run: TrackedRun, path: str, text: str) -> None:
        with self._errors("written"):
            if folder := _local(run.artifacts):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
            else:
                self._client.log_text(run.id, text, path)

    def log_datasets(self, run: TrackedRun, datasets: Sequence[Dataset]) -> None:
        from mlflow.entities import Dataset as MlflowDataset
        from mlflow.entities import DatasetInput, InputTag

        inputs = [
            DatasetInput(
                MlflowDataset(each.name, each.digest, source_type="cope_sweep", source=each.source),
                [InputTag(CONTEXT_TAG, each.context)],
            )
            for each in datasets
        ]
        with self._errors("written"):
            self._client.log_inputs(run.id, inputs)
        run.datasets += [dataset for dataset in datasets if dataset not in run.datasets]

    def put_model(self, run: TrackedRun, model: Model, points: Sequence[Point]) -> None:
        from mlflow.entities import LoggedModelOutput, Metric

        if run.models:
            return
        datasets = {each.context: each for each in run.datasets}
        with self._errors("written"):
            logged = self._find_or_create_model(run, model)
            self._put_files(logged, model.folder)
            metrics = []
            for point in points:
                data = datasets.get(point.key.partition("/")[0])
                metrics.append(
                    Metric(
                        _mlflow_key(point.key), point.value, point.timestamp_ms, point.step, model_id=logged.model_id,
                        dataset_name=data.name if data else None, dataset_digest=data.digest if data else None,
                    )
                )  # fmt: skip
            self._client.log_batch(run.id, metrics)
            self._client.finalize_logged_model(logged.model_id, "READY")
            # The link is made last: a run that has a model has a complete one.
            self._client.log_outputs(run.id, [LoggedModelOutput(logged.model_id, model.step)])
        run.models.append(logged.model_id)

    def _put_files(self, logged: LoggedModel, checkpoint: Path) -> None:
        """Upload a checkpoint and its description."""
        description = describe(logged, checkpoint)
        if folder := _local(logged.artifact_location):
            shutil.copytree(checkpoint, folder, copy_function=_link_or_copy, dirs_exist_ok=True)
            for name, text in description.items():
                write_bytes(folder / name, text.encode())
            return
        self._client.log_model_artifacts(logged.model_id, str(checkpoint))
        with tempfile.TemporaryDirectory() as temporary:
            for name, text in description.items():
                (Path(temporary) / name).write_text(text)
            self._client.log_model_artifacts(logged.model_id, temporary)

    def _find_or_create_model(self, run: TrackedRun, model: Model) -> LoggedModel:
        """The model of a run. It exists if an earlier process ended between its creation and its link to the run."""
        found = self._client.search_logged_models([run.experiment], f"source_run_id = '{run.id}'", max_results=1)
        if found:
            return found[0]
        return self._client.create_logged_model(
            run.experiment,
            name=model.name.translate(NOT_IN_MODEL_NAMES),
            source_run_id=run.id,
            params=_cut(model.params, "param"),
            tags=_cut(model.tags, "tag"),
            model_type="cope_sweep",
        )

    def artifacts(self, run: TrackedRun, path: str = "") -> list[str]:
        with self._errors("read"):
            return sorted(entry.path for entry in self._client.list_artifacts(run.id, path or None))

    def _all_experiments(self) -> list[str]:
        ids: list[str] = []
        token = None
        while True:
            page = self._client.search_experiments(page_token=token)
            ids += [experiment.experiment_id for experiment in page]
            token = page.token
            if not token:
                return ids

    def _experiment(self, name: str, note: str) -> str:
        """The id of the experiment `name`. It is created, with the description `note`, if it does not exist."""
        from mlflow.exceptions import MlflowException

        if name in self._experiments:
            return self._experiments[name]
        found = self._client.get_experiment_by_name(name)
        if found is None:
            location = (self._artifact_root / name).as_uri() if self._artifact_root else None
            # With this tag, MLflow's UI shows runs and charts instead of traces of agents.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            tags |= {"mlflow.note.content": note[: MAX_CHARACTERS["note"]]} if note else {}
            try:
                self._experiments[name] = self._client.create_experiment(name, location, tags)
                return self._experiments[name]
            except MlflowException:
                # Another process may have created it.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise TrackingError(
                f"{redacted(self.uri)}: the experiment {name!r} is in MLflow's trash; restore it with "
                f"`mlflow experiments restore -x {found.experiment_id}`, or empty the trash with `mlflow gc`"
            )
        self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def _errors(self, action: str) -> contextlib.AbstractContextManager[None]:
        return tracking_errors(self.uri, action)


@contextlib.contextmanager
def _migration_lock(database: Path | None) -> Iterator[None]:
    """One process at a time: if several create the tables of a SQLite store at once, all of them fail."""
    if database is None:
        yield
        return
    with database.with_name(database.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _create(database: Path) -> None:
    """Create a SQLite store under another name first: MLflow refuses one that a process was killed while creating."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    new = database.with_name(database.name + ".new")
    new.unlink(missing_ok=True)
    engine = create_sqlalchemy_engine(f"sqlite:///{new}")  # type: ignore[no-untyped-call]
    _initialize_tables(engine)  # type: ignore[no-untyped-call]
    engine.dispose()
    new.replace(database)


def _tracked(run: Run) -> TrackedRun:
    # RunData.metrics has no steps, but the protocol buffer has them.
    metrics = run.data.to_proto().metrics
    points = [Point(_key(metric.key), metric.value, metric.step, metric.timestamp) for metric in metrics]
    inputs = run.inputs.dataset_inputs if run.inputs else []
    outputs = run.outputs.model_outputs if run.outputs else []
    return TrackedRun(
        id=run.info.run_id,
        experiment=run.info.experiment_id,
        artifacts=run.info.artifact_uri,
        status=_STATUS_OF[run.info.status],
        tags=dict(run.data.tags),
        params=dict(run.data.params),
        latest={point.key: point for point in points},
        datasets=[
            Dataset(
                each.dataset.name,
                each.dataset.digest,
                next((tag.value for tag in each.tags if tag.key == CONTEXT_TAG), ""),
                each.dataset.source,
            )
            for each in inputs
        ],
        models=[output.model_id for output in outputs],
        deleted=run.info.lifecycle_stage == "deleted",
    )


def _mlflow_key(key: str) -> str:
    """The name of a metric in MLflow, which does not allow `@`: `test/perplexity at 2048`."""
    return key.replace("@", " at ")


def _key(mlflow_key: str) -> str:
    """The inverse of `_mlflow_key`."""
    return mlflow_key.replace(" at ", "@")


def _cut(values: Mapping[str, str], kind: str) -> dict[str, str]:
    """`values` with texts cut to the length that MLflow accepts for `kind`."""
    limit = MAX_CHARACTERS[kind]
    return {key: value if len(value) <= limit else value[: limit - 2] + " …" for key, value in values.items()}


def _local(artifacts: str) -> Path | None:
    """The folder of an artifact URI if it is on this machine, else None."""
    parts = urlsplit(artifacts)
    return Path(unquote(parts.path)) if parts.scheme in ("file", "") and not parts.netloc else None


def _link_or_copy(source: str, target: str) -> None:
    """Put a hard link to `source` at `target`, or a copy where links are impossible.

    A finished checkpoint never changes, so a link is enough; it takes neither time nor disk space. If several
    processes write the same target at once, each of them replaces it atomically.
    """
    temporary = f"{target}.{uuid.uuid4().hex}"
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        Path(temporary).replace(target)
    finally:
        # Renaming a hard link to another link of the same file does nothing and leaves both.
        Path(temporary).unlink(missing_ok=True)
