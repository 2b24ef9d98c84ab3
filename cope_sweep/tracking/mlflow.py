"""The client of MLflow. Importing this module takes seconds; see `uri.import_mlflow`.

A SQLite store is the file `<store>/mlflow.db`; its artifacts are beside it in `mlartifacts/<experiment>/`. MLflow
stores their absolute paths, so that `mlflow ui` finds them from any directory; they are corrected where the store was
moved or copied. A server keeps its own artifacts.

On a local disk, the SQLite file has a write-ahead log: its readers and its writer do not wait for each other.

Several processes may send the same run at once. There is no lock: who has created a run looks it up again, and where it
sees another one with the same tags, gives up its own.

Beside the files of a checkpoint is `MLmodel`, its description, with two flavours. With `python_function`,
`mlflow.pyfunc.load_model("models:/<model id>")` loads it on any machine where cope_sweep is installed: it scores token
ids, see `Predictor.log_probabilities`. `cope_sweep` names the files. Nothing is pickled: the weights are safetensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import os
import platform
import random
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import numpy as np
from cachetools import TTLCache, cachedmethod
from mlflow.db import upgrade
from mlflow.entities import LoggedModel, LoggedModelOutput, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec

from cope_sweep.proxies import bypass_proxies_here, proxy_data, through_proxy
from cope_sweep.redaction import redacted, redacted_url
from cope_sweep.store.files import create_database_file
from cope_sweep.store.index.database import on_network, sqlite_file, sqlite_url
from cope_sweep.tracking.uri import TrackingError, artifact_folder, check_sqlite, follow_artifacts, no_server

MAX_CHARACTERS = {"tag": 8000, "param": 6000, "note": 20000}
"""The lengths that MLflow accepts."""
NOT_IN_MODEL_NAMES = str.maketrans(dict.fromkeys("/:.%\"'", "-"))
"""Characters that MLflow does not allow in the name of a model."""
EXPERIMENTS_S = 10.0
"""The time for which a list of the experiments is used before it is read again."""
PAGE = 1000
"""Runs that are read at once."""
CREATE_PAUSE_S = 0.05, 0.5
"""Between two tries to create a run, where another process does the same: a random time between these."""
SETTLE_PAUSES_S = (0.5, 1.0, 2.0)
"""Between looks at several runs with the same tags, until all but one of their senders have given way."""
MAX_EXPERIMENTS = 50_000
"""The longest list that MLflow gives at once."""
ACCESS_REFUSED = ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED")
"""MLflow's error codes for the HTTP statuses 401 and 403."""
REQUEST_TIMEOUT_S = 20
UPLOAD_TIMEOUT_S = 300
CHECK_REQUEST_S = 3
"""The time that a server may take to answer before a sweep starts. MLflow's client takes whole seconds."""
LOADER = "cope_sweep.inference"
"""The module whose `_load_pyfunc` MLflow calls."""
PREDICT = "log_probabilities"
DESCRIPTION, REQUIREMENTS = "MLmodel", "requirements.txt"


class _CheckedClient:
    """MLflow's client, whose methods raise TrackingError with a message of one line, and nothing else."""

    def __init__(self, client: MlflowClient, uri: str) -> None:
        self._client, self._uri = client, uri

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*words: Any, **options: Any) -> Any:
            with errors(self._uri, f"{name} failed"):
                return method(*words, **options)

        return call


class Tracker:
    """An MLflow tracking store, given as `sqlite:///PATH` or as the URL of a server. `client` is MLflow's own.

    A SQLite store is created if it does not exist; several processes may do so at once.

    Raises:
        TrackingError: Every method, and every one of `client`.
    """

    def __init__(self, uri: str) -> None:
        limit_requests()
        bypass_proxies_here(uri)
        self.uri = uri
        self._listed: TTLCache[Any, dict[str, str]] = TTLCache(1, EXPERIMENTS_S)
        database = sqlite_file(uri)
        self._artifact_root = artifact_folder(database) if database else None
        with errors(uri, "could not be opened"):
            if database is not None:
                check_sqlite(database)
                _prepare(database)
                follow_artifacts(database)
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)  # the client connects on first use
        self.client = cast(MlflowClient, _CheckedClient(client, uri))

    def search(self, condition: str, *, experiment: str | None = None) -> Iterator[Run]:
        """The runs that match a condition of MLflow's search, also those in its trash, in one experiment or in all.

        They are read in pages, which takes a server 2 ms per run.
        """
        experiments = self._experiments()
        ids = [each for name, each in experiments.items() if experiment in (None, name)]
        token: str | None = None if ids else ""
        while token != "":
            page = self.client.search_runs(ids, condition, ViewType.ALL, PAGE, page_token=token)
            yield from page
            token = page.token or ""

    def find(self, tags: Mapping[str, str]) -> Run | None:
        """The run that has all these tags, in any experiment; one in MLflow's trash where no other has them.

        Of several, all but one give way soon, see `keeps`. If several remain, a sender was killed: the oldest is kept.
        """
        for pause_s in (*SETTLE_PAUSES_S, None):
            runs = sorted(self._with(tags), key=age)
            active = [run for run in runs if run.info.lifecycle_stage != "deleted"]
            if len(active) < 2:
                break
            if pause_s is not None:
                time.sleep(pause_s)
        for run in active[1:]:
            self._discard(run, tags)
        return next(iter(runs), None)

    def create(self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, note: str = "") -> Run:
        """Create a run with the status running. The experiment is created, with `note`, if it does not exist."""
        return self.client.create_run(self._experiment(experiment, note), started_ms, cut(tags, "tag"), run_name=name)

    def keeps(self, run: Run, tags: Mapping[str, str]) -> bool:
        """Whether a run that was created just now is the only one with these tags; if not, it is given up.

        So if several processes create it at once, none deletes a run that another has started to fill. If all give up,
        they find none, and create it again after a random time.
        """
        if all(
            same.info.run_id == run.info.run_id or same.info.lifecycle_stage == "deleted" for same in self._with(tags)
        ):
            return True
        self._discard(run, tags)
        time.sleep(random.uniform(*CREATE_PAUSE_S))
        return False

    def delete(self, tags: Mapping[str, str]) -> None:
        """Put the runs with all these tags into the trash, without the tags, and delete their models.

        A run that is trained again is then another one there.
        """
        for run in list(self._with(tags)):
            if run.info.lifecycle_stage == "deleted":
                self.client.restore_run(run.info.run_id)
            self._discard(run, tags)

    def close(self) -> None:
        """Write a SQLite file's log into it: the file is whole then, and can be copied."""
        database = sqlite_file(self.uri)
        if database is not None:
            with contextlib.suppress(sqlite3.Error), _connected(database) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _with(self, tags: Mapping[str, str]) -> Iterator[Run]:
        return self.search(" AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items()))

    def _discard(self, run: Run, tags: Mapping[str, str]) -> None:
        """Put a second run of the same tags into the trash, without the tags, and delete its models."""
        for model in self._models(run):
            self.client.delete_logged_model(model.model_id)
        for key in tags:
            self.client.delete_tag(run.info.run_id, key)
        self.client.delete_run(run.info.run_id)

    def _models(self, run: Run) -> Sequence[LoggedModel]:
        """The models that were made for a run, the oldest first."""
        found = self.client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
        return sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))

    def put_model(
        self, run: Run, checkpoint: Path, name: str, params: Mapping[str, str], tags: Mapping[str, str], *, new: bool
    ) -> LoggedModel:
        """The model of a run with its files, which no run links yet.

        Args:
            run: The run.
            checkpoint: The files.
            name: Its name.
            params: Its parameters.
            tags: Its tags.
            new: Whether the run cannot have one of a process that was killed before it had linked it.
        """
        models: Sequence[LoggedModel] = [] if new else self._models(run)
        while not models:
            made = self.client.create_logged_model(
                run.info.experiment_id,
                name=name.translate(NOT_IN_MODEL_NAMES),
                source_run_id=run.info.run_id,
                params=cut(params, "param"),
                tags=cut(tags, "tag"),
                model_type="cope_sweep",
            )
            models = self._models(run)
            if [model.model_id for model in models] != [made.model_id]:  # another process also sends the run
                self.client.delete_logged_model(made.model_id)
                time.sleep(random.uniform(*CREATE_PAUSE_S))
                models = self._models(run)
        model = models[0]
        with errors(self.uri, f"could not take {checkpoint}"):
            description = describe(model, checkpoint)
            if folder := _local(model.artifact_location):
                shutil.copytree(checkpoint, folder, copy_function=_link_or_copy, dirs_exist_ok=True)
                _write_files(folder, description)
            else:
                self.client.log_model_artifacts(model.model_id, str(checkpoint))
                with tempfile.TemporaryDirectory() as temporary:
                    _write_files(Path(temporary), description)
                    self.client.log_model_artifacts(model.model_id, temporary)
        return model

    def link_model(self, run_id: str, model_id: str, step: int) -> None:
        """Link a complete model to its run, at last: a run that has a model has a complete one."""
        self.client.finalize_logged_model(model_id, "READY")
        outputs = self.client.get_run(run_id).outputs
        if not (outputs and outputs.model_outputs):
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])

    @cachedmethod(lambda self: self._listed)
    def _experiments(self) -> dict[str, str]:
        """Name → id. A new dictionary after some seconds, for other stores create experiments, too."""
        found = self.client.search_experiments(max_results=MAX_EXPERIMENTS)
        return {experiment.name: experiment.experiment_id for experiment in found}

    def _experiment(self, name: str, note: str) -> str:
        """The id of the experiment `name`. It is created, with the description `note`, if it does not exist."""
        experiments = self._experiments()
        if name not in experiments:
            location = (self._artifact_root / name).as_uri() if self._artifact_root else None
            # With this tag, MLflow's UI shows runs and charts instead of traces of agents.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            tags |= cut({"mlflow.note.content": note}, "note") if note else {}
            try:
                experiments[name] = self.client.create_experiment(name, location, tags)
            except TrackingError:
                # Another process may have created it, or it is in the trash.
                if (experiment := self.client.get_experiment_by_name(name)) is None:
                    raise
                if experiment.lifecycle_stage == "deleted":
                    raise TrackingError(
                        f"{redacted_url(self.uri)}: the experiment {name!r} is in MLflow's trash; restore it with "
                        f"`mlflow experiments restore -x {experiment.experiment_id}`, or empty the trash: `mlflow gc`",
                        code="deleted_experiment",
                        uri=redacted_url(self.uri),
                        experiment=name,
                        experiment_id=experiment.experiment_id,
                    ) from None
                experiments[name] = experiment.experiment_id
        return experiments[name]


@contextlib.contextmanager
def errors(uri: str, problem: str) -> Iterator[None]:
    """Turn every error into a TrackingError with a message of one line."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        # MLflow passes on errors of database drivers, the network and the disk, so that any class is possible.
        if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
            # One error for each file of a folder.
            error = OSError("; ".join(str(reason) for _, _, reason in error.args[0]))
        raise TrackingError(
            f"MLflow at {redacted_url(uri)} {problem}: {_one_line(error)}{through_proxy(uri)}",
            uri=redacted_url(uri),
            reason=_one_line(error),
            **proxy_data(uri),
        ) from error


def age(run: Run) -> tuple[bool, int, str]:
    """A key that sorts runs with the same tags: those first that are not in MLflow's trash, the oldest first."""
    return run.info.lifecycle_stage == "deleted", run.info.start_time, run.info.run_id


def cut(values: Mapping[str, str], kind: str) -> dict[str, str]:
    """`values` with texts cut to the length that MLflow accepts for `kind`."""
    limit = MAX_CHARACTERS[kind]
    return {key: value if len(value) <= limit else value[: limit - 2] + " …" for key, value in values.items()}


def _prepare(database: Path) -> None:
    """Create a SQLite store if there is none, and give it a write-ahead log, except on a network's disk.

    Only one process creates it: if several do so at once, all of them fail. It gets its name at the end: MLflow refuses
    one that a process was killed while creating.
    """
    with database.with_name(database.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not database.exists() or not database.stat().st_size:
            new = database.with_name(database.name + ".new")
            new.unlink(missing_ok=True)
            create_database_file(new)
            upgrade.main([sqlite_url(new)], standalone_mode=False)  # the command `mlflow db upgrade`
            new.replace(database)
        if not on_network(database):
            with contextlib.suppress(sqlite3.OperationalError), _connected(database) as connection:
                connection.execute("PRAGMA journal_mode = WAL")  # the file keeps it


@contextlib.contextmanager
def _connected(database: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(database, timeout=1.0)) as connection:
        yield connection


def _local(artifacts: str) -> Path | None:
    """The folder of an artifact URI if it is on this machine, else None."""
    parts = urlsplit(artifacts)
    return Path(unquote(parts.path)) if parts.scheme in ("file", "") and not parts.netloc else None


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


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
    """File → content, of the files that MLflow expects beside a checkpoint's. Equal models give equal files."""
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
    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("int64"), (-1, -1))]),
        outputs=Schema([TensorSpec(np.dtype("float64"), (-1, -1))]),
    )


def limit_requests() -> None:
    """Make every request of this process's MLflow client end after a while, and never be repeated by the client.

    MLflow's defaults repeat a request for four minutes. The client also repeats requests that create a run, which gives
    two runs where the server did answer, too late. A mirror looks a run up before it tries again.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_TIMEOUT_S))
    os.environ.setdefault("MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT", str(UPLOAD_TIMEOUT_S))
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"


def check_server(uri: str) -> None:
    """Return if an MLflow server at the http(s) URL `uri` accepts requests of MLflow's own client.

    So credentials, TLS settings and proxies are those that runs are sent with.

    Raises:
        TrackingError: Nothing answers, the server refuses access, or it is not an MLflow server.
    """
    bypass_proxies_here(uri)
    limits = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(CHECK_REQUEST_S), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    try:
        with _environment(limits):
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except Exception as error:  # the answer of another service can fail anywhere in the client
        url, reason = redacted_url(uri), _one_line(error)
        if isinstance(error, MlflowException) and error.error_code in ACCESS_REFUSED:
            raise TrackingError(
                f"the MLflow server at {url} refuses access ({reason}){through_proxy(uri)}; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
                code="access_refused",
                uri=url,
                reason=reason,
                **proxy_data(uri),
            ) from error
        # The client turns errors of the connection into MlflowException.
        if isinstance(error, MlflowException) and isinstance(error.__cause__ or error.__context__, OSError):
            raise no_server(uri, reason) from error
        raise TrackingError(
            f"{url} answers, but is not an MLflow server ({reason}){through_proxy(uri)}; check the URL's port and path",
            code="not_an_mlflow_server",
            uri=url,
            reason=reason,
            **proxy_data(uri),
        ) from error


def _one_line(error: Exception) -> str:
    """The message of an error in one line, without secrets."""
    # SQLAlchemy's statement and link say nothing to a user.
    text = " ".join(str(error).split()).partition(" [SQL:")[0].partition(" (Background on this error")[0]
    return redacted(text)[:500]  # before it is cut: a part of a secret could not be found


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
