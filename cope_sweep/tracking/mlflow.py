"""MLflow as an experiment tracker. Only this module imports mlflow, on first use.

Importing mlflow takes seconds. A SQLite store is the file `<store>/mlflow.db`; its artifacts are beside it in
`mlartifacts/<experiment>/`. MLflow stores their absolute paths, so that `mlflow ui` finds them from any directory. An
MLflow server keeps its own artifacts.

On a local disk, the SQLite file has a write-ahead log. A request then takes a third of the time, because none waits for
the disk; `settle` does so for all requests before it.

Beside the files of a checkpoint is `MLmodel`, its description, with two flavours. With `python_function`,
`mlflow.pyfunc.load_model("models:/<model id>")` loads it on any machine where cope_sweep is installed: it scores token
ids, see `Predictor.log_probabilities`. `cope_sweep` names the files. Nothing is pickled: the weights are safetensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import logging
import os
import platform
import shutil
import socket
import sqlite3
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from cachetools import TTLCache, cachedmethod

from cope_sweep.store.index.database import on_network, redacted
from cope_sweep.tracking.translate import Dataset, Model, Point, TrackedRun, TrackedStatus, TrackingError
from cope_sweep.tracking.uri import sqlite_path

if TYPE_CHECKING:
    from mlflow.entities import Experiment, LoggedModel, Metric, Param, Run, RunTag
    from mlflow.models import ModelSignature

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

EXPERIMENTS_S = 10.0
"""How long a list of the experiments is used before it is read again."""
EXPERIMENTS_PER_PAGE = 1000

ACCESS_REFUSED = ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED")
"""MLflow's error codes for the HTTP statuses 401 and 403."""
REQUEST_TIMEOUT_S = 20
UPLOAD_TIMEOUT_S = 300
CHECK_CONNECTION_S, CHECK_REQUEST_S = 2, 3
"""How long a server may take to answer before a sweep starts. MLflow's client takes whole seconds."""

LOADER = "cope_sweep.inference"
"""The module whose `_load_pyfunc` MLflow calls."""
PREDICT = "log_probabilities"
DESCRIPTION, REQUIREMENTS = "MLmodel", "requirements.txt"

_databases: set[str] = set()
"""The SQLite files that this process opens with a write-ahead log."""


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
        """Name → id, of the experiments that runs were created in."""
        self._listed: TTLCache[Any, list[str]] = TTLCache(1, EXPERIMENTS_S)
        database = sqlite_path(uri)
        self._artifact_root = database.parent / "mlartifacts" if database else None
        self._database = database if database and not on_network(database) else None
        with self._errors("opened"), _migration_lock(database):
            if database is not None:
                _check(database) if database.exists() else _create(database)
            if self._database is not None:
                _use_write_ahead_log(self._database)
            self._client = MlflowClient(tracking_uri=uri)
            # The client opens its store on first use. MLflow then creates the tables of a new one.
            self._all_experiments()

    def find(self, tags: Mapping[str, str]) -> TrackedRun | None:
        """The run that has all these tags, in any experiment; the oldest one if there are several."""
        condition = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with self._errors("searched"):
            experiments = [*{*self._all_experiments(), *self._experiments.values()}]
            runs = self._client.search_runs(
                experiments, condition, max_results=1, order_by=["attributes.start_time ASC"]
            )
        return _tracked(runs[0]) if runs else None

    def settle(self) -> None:
        """Return when what was written survives a power failure."""
        if self._database is not None:
            with contextlib.suppress(OSError), self._database.with_name(self._database.name + "-wal").open("rb") as log:
                os.fsync(log.fileno())

    def close(self) -> None:
        """Release what the client holds."""
        if self._database is not None:
            # Afterwards the file alone has everything, and can be copied.
            with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self._database)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def get(self, tracked_id: str) -> TrackedRun | None:
        """The run with the tracker's id `tracked_id`, or None."""
        from mlflow.exceptions import MlflowException

        with self._errors("read"):
            try:
                return _tracked(self._client.get_run(tracked_id))
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise

    def create(
        self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, note: str = ""
    ) -> TrackedRun:
        """Create a run with the status running. The experiment is created, with `note`, if it does not exist."""
        with self._errors("written"):
            run = self._client.create_run(
                self._experiment(experiment, note), started_ms, _cut(tags, "tag"), run_name=name
            )
        return replace(_tracked(run), created_now=True)

    def log(
        self,
        run: TrackedRun,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        model: Model | None = None,
    ) -> None:
        """Log points, parameters and tags. Logging an entry again changes nothing; a parameter cannot change.

        With a model, upload it and link it to the run, unless the run has one. Its metrics are also the run's. A metric
        belongs to the dataset of the run whose context is the metric's prefix.
        """
        from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag

        points, params, tags = list(points), _cut(params or {}, "param"), _cut(tags or {}, "tag")
        with self._errors("written"):
            logged = self._put_model(run, model) if model is not None and not run.models else None
            metrics = []
            if logged is not None and model is not None:
                datasets = {each.context: each for each in run.datasets}
                for point in model.points:
                    data = datasets.get(point.key.partition("/")[0])
                    metrics.append(
                        Metric(
                            _mlflow_key(point.key), point.value, point.timestamp_ms, point.step,
                            model_id=logged.model_id,
                            dataset_name=data.name if data else None, dataset_digest=data.digest if data else None,
                        )
                    )  # fmt: skip
                known = set(model.points)
                points = [point for point in points if point not in known]
            metrics += [Metric(_mlflow_key(point.key), point.value, point.timestamp_ms, point.step) for point in points]
            if metrics or params or tags:
                self._log_batch(
                    run.id,
                    metrics,
                    [Param(key, value) for key, value in params.items()],
                    [RunTag(key, value) for key, value in tags.items()],
                )
            if logged is not None and model is not None:
                self._client.finalize_logged_model(logged.model_id, "READY")
                # The link is made last: a run that has a model has a complete one.
                self._client.log_outputs(run.id, [LoggedModelOutput(logged.model_id, model.step)])
                run.models.append(logged.model_id)
                points += model.points
        run.params |= params
        run.tags |= tags
        for point in points:
            run.update_latest(point)

    def _log_batch(self, run_id: str, metrics: list[Metric], params: list[Param], tags: list[RunTag]) -> None:
        """Log entries; the client splits them into requests of 1000."""
        from mlflow.exceptions import MlflowException

        for tries_left in reversed(range(MAX_LOG_TRIES)):
            try:
                self._client.log_batch(run_id, metrics, params, tags)
                return
            except MlflowException as error:
                # MLflow checks for existing entries before it inserts its own. If another process inserts the same ones
                # in between, the database refuses them, which MLflow reports as BAD_REQUEST. Logging equal entries
                # again is allowed.
                if error.error_code != "BAD_REQUEST" or not tries_left:
                    raise

    def set_status(self, run: TrackedRun, status: TrackedStatus, ended_ms: int | None = None) -> None:
        """Set the status of a run and, unless it is running, when it ended."""
        with self._errors("written"):
            if status == "running":
                self._client.update_run(run.id, MLFLOW_STATUS[status])
            else:
                self._client.set_terminated(run.id, MLFLOW_STATUS[status], ended_ms)
        run.status = status

    def put_text(self, run: TrackedRun, path: str, text: str) -> None:
        """Write `text` to the artifact `path`."""
        with self._errors("written"):
            self._client.log_text(run.id, text, path)

    def log_datasets(self, run: TrackedRun, datasets: Sequence[Dataset]) -> None:
        """Note the data that a run read. Logging them again changes nothing."""
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

    def _put_model(self, run: TrackedRun, model: Model) -> LoggedModel:
        """The model of a run, with its files, still without a link from the run."""
        logged = self._find_or_create_model(run, model)
        self._put_files(logged, model.folder)
        return logged

    def _put_files(self, logged: LoggedModel, checkpoint: Path) -> None:
        """Upload a checkpoint and its description."""
        description = describe(logged, checkpoint)
        if folder := _local(logged.artifact_location):
            shutil.copytree(checkpoint, folder, copy_function=_link_or_copy, dirs_exist_ok=True)
            for name, text in description.items():
                (folder / name).write_text(text)
            return
        self._client.log_model_artifacts(logged.model_id, str(checkpoint))
        with tempfile.TemporaryDirectory() as temporary:
            for name, text in description.items():
                (Path(temporary) / name).write_text(text)
            self._client.log_model_artifacts(logged.model_id, temporary)

    def _find_or_create_model(self, run: TrackedRun, model: Model) -> LoggedModel:
        """The model of a run. It exists if an earlier process ended between its creation and its link to the run."""
        if not run.created_now:
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

    @cachedmethod(lambda self: self._listed)
    def _all_experiments(self) -> list[str]:
        from mlflow.utils import get_results_from_paginated_fn

        def page(size: int, token: str | None) -> Sequence[Experiment]:
            return self._client.search_experiments(max_results=size, page_token=token)

        found = get_results_from_paginated_fn(page, EXPERIMENTS_PER_PAGE)  # type: ignore[no-untyped-call]
        return [experiment.experiment_id for experiment in found]

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

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Turn errors into TrackingError with a message of one line. `action` says what failed: "opened", "read"."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            # MLflow passes on errors of database drivers, the network and the disk, so that any class is possible.
            if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
                # One error for each file of a folder.
                error = OSError("; ".join(str(reason) for _, _, reason in error.args[0]))
            reason = one_line(error, self.uri)
            raise TrackingError(f"MLflow at {redacted(self.uri)} could not be {action}: {reason}") from error


@contextlib.contextmanager
def _migration_lock(database: Path | None) -> Iterator[None]:
    """One process at a time: if several create the tables of a SQLite store at once, all of them fail."""
    if database is None:
        yield
        return
    with database.with_name(database.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check(database: Path) -> None:
    """Raise sqlite3.DatabaseError for a file that is no database: MLflow would try it again for 100 s."""
    with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master")


def _create(database: Path) -> None:
    """Create a SQLite store under another name first: MLflow refuses one that a process was killed while creating."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    new = database.with_name(database.name + ".new")
    new.unlink(missing_ok=True)
    engine = create_sqlalchemy_engine(f"sqlite:///{new}")  # type: ignore[no-untyped-call]
    _initialize_tables(engine)  # type: ignore[no-untyped-call]
    engine.dispose()
    new.replace(database)


def _use_write_ahead_log(database: Path) -> None:
    """Make the connections that this process opens to a SQLite file use a write-ahead log."""
    from sqlalchemy import Engine, event

    if not _databases:
        event.listen(Engine, "connect", _configure)
    _databases.add(os.path.realpath(database))


def _configure(connection: object, _: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        files = {os.path.realpath(row[2]) for row in connection.execute("PRAGMA database_list") if row[2]}
        if files & _databases:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")


def _tracked(run: Run) -> TrackedRun:
    # RunData.metrics has no steps, but the protocol buffer has them.
    metrics = run.data.to_proto().metrics
    points = [Point(_key(metric.key), metric.value, metric.step, metric.timestamp) for metric in metrics]
    inputs = run.inputs.dataset_inputs if run.inputs else []
    outputs = run.outputs.model_outputs if run.outputs else []
    return TrackedRun(
        id=run.info.run_id,
        experiment=run.info.experiment_id,
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


def describe(logged: LoggedModel, checkpoint: Path) -> dict[str, str]:
    """File → content, of the files that MLflow expects beside those of a checkpoint. Equal models give equal files."""
    from mlflow.models import Model

    version, signature = _version(), _signature()
    files = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    created = datetime.fromtimestamp(logged.creation_timestamp / 1000, UTC).replace(tzinfo=None)
    model = Model(
        artifact_path=logged.artifact_location,
        run_id=logged.source_run_id,
        model_id=logged.model_id,
        model_uuid=logged.model_id,
        utc_time_created=str(created),
        model_size_bytes=sum((checkpoint / name).stat().st_size for name in files),
        signature=signature,
    )
    model.add_flavor(
        "python_function", loader_module=LOADER, predict_fn=PREDICT, python_version=platform.python_version()
    )
    model.add_flavor("cope_sweep", version=version, files=files)
    return {DESCRIPTION: model.to_yaml(), REQUIREMENTS: f"cope-sweep=={version}\n"}


@functools.cache
def _version() -> str:
    return importlib.metadata.version("cope-sweep")


@functools.cache
def _signature() -> ModelSignature:
    """Token ids in, log-probabilities out."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("int64"), (-1, -1))]),
        outputs=Schema([TensorSpec(np.dtype("float64"), (-1, -1))]),
    )


def import_mlflow() -> None:
    """Import mlflow without its log messages and telemetry, unless the environment enables them."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow  # noqa: F401 - the import configures the loggers that are set below

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def limit_requests() -> None:
    """Make every request of this process's MLflow client end after a while, and never be repeated by the client.

    MLflow's defaults repeat a request for four minutes. The client also repeats requests that create a run, which gives
    two runs where the server did answer, too late. A mirror looks a run up before it tries again.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_TIMEOUT_S))
    os.environ.setdefault("MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT", str(UPLOAD_TIMEOUT_S))
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"


def check_server(uri: str) -> None:
    """Return if an MLflow server at the http(s) URL `uri` accepts requests.

    A plain connection comes first, so that a wrong address fails before mlflow is imported. Then MLflow's own client
    sends a request, so that credentials, TLS settings and proxies are those that runs are sent with.

    Raises:
        TrackingError: Nothing answers, the server refuses access, or it is no MLflow server.
    """
    parts = urlsplit(uri)
    try:
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        # Behind a proxy, the server itself may be out of reach.
        if parts.scheme not in getproxies() or proxy_bypass(address[0]):
            socket.create_connection(address, timeout=CHECK_CONNECTION_S).close()
    except (OSError, ValueError) as error:
        raise TrackingError(_no_server(uri, error)) from error
    import_mlflow()
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    limits = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(CHECK_REQUEST_S), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    try:
        with _environment(limits):
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except Exception as error:  # the answer of another service can fail anywhere in the client
        url, reason = redacted(uri), one_line(error, uri)
        if isinstance(error, MlflowException) and error.error_code in ACCESS_REFUSED:
            raise TrackingError(
                f"the MLflow server at {url} refuses access ({reason}); "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            ) from error
        # The client turns errors of the connection into MlflowException.
        if isinstance(error, MlflowException) and isinstance(error.__cause__ or error.__context__, OSError):
            raise TrackingError(_no_server(uri, reason)) from error
        raise TrackingError(
            f"{url} answers, but not as an MLflow server does ({reason}); check the URL's port and path"
        ) from error


def _no_server(uri: str, reason: object) -> str:
    """The error message where no MLflow server can be reached."""
    return (
        f"no MLflow server answers at {redacted(uri)} ({reason}); start it (`mlflow server --port …`), correct "
        "--mlflow or MLFLOW_TRACKING_URI, or leave both out to keep runs in the store"
    )


def one_line(error: Exception, uri: str) -> str:
    """The message of an error in one line, without the password in `uri`."""
    return " ".join(str(error).split()).replace(uri, redacted(uri))[:500]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that are set while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
