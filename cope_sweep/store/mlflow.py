"""MLflow as an experiment tracker. This is the only module that imports mlflow, and it does so on first use.

Importing mlflow takes seconds. A SQLite store is the file `<store>/mlflow.db`; its artifacts are beside it in
`mlartifacts/<experiment>/`. MLflow stores their absolute paths, so that `mlflow ui` finds them from any directory. An
MLflow server keeps its own artifacts.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from cope_sweep.store.preflight import redacted, sqlite_path
from cope_sweep.store.tracking import Point, TrackedRun, TrackedStatus, TrackingError, update_latest

if TYPE_CHECKING:
    from mlflow.entities import Run

MLFLOW_STATUS: dict[TrackedStatus, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}
_STATUS_OF: dict[str, TrackedStatus] = {name: status for status, name in MLFLOW_STATUS.items()} | {
    "SCHEDULED": "running"
}

ACCESS_REFUSED = ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED")
"""MLflow's error codes for the HTTP statuses 401 and 403."""

MAX_LOG_TRIES = 10
"""How often a batch is sent while other processes write the same entries."""

MAX_CHARACTERS = {"tag": 8000, "param": 6000, "note": 20000}
"""The lengths that MLflow accepts."""


def check_server(uri: str, timeout_s: int) -> None:
    """Return if an MLflow server at the http(s) URL `uri` accepts requests within `timeout_s`.

    MLflow's own client sends the request, so that credentials, TLS settings and proxies are those that runs are sent
    with.

    Raises:
        TrackingError: Nothing answers, the server refuses access, or it is no MLflow server.
    """
    _import_mlflow()
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    url = redacted(uri)
    limits = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    try:
        with _environment(limits):
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except MlflowException as error:
        reason = _one_line(error, uri)
        if error.error_code in ACCESS_REFUSED:
            raise TrackingError(
                f"the MLflow server at {url} refuses access ({reason}); "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            ) from error
        # The client turns errors of the connection into MlflowException.
        if isinstance(error.__cause__ or error.__context__, OSError):
            raise TrackingError(no_server(uri, reason)) from error
        raise TrackingError(
            f"{url} answers, but not as an MLflow server does ({reason}); check the URL's port and path"
        ) from error
    except Exception as error:
        # The answer of another service can fail anywhere in the client.
        raise TrackingError(
            f"{url} answers, but not as an MLflow server does ({_one_line(error, uri)}); check the URL's port and path"
        ) from error


class MlflowTracking:
    """An MLflow tracking store, given as `sqlite:///PATH` or as the URL of a server.

    A SQLite store is created if it does not exist; several processes may do so at once.

    Raises:
        TrackingError: The store cannot be opened.
    """

    def __init__(self, uri: str) -> None:
        _import_mlflow()
        from mlflow.tracking import MlflowClient

        self.uri = uri
        self._experiments: dict[str, str] = {}
        database = sqlite_path(uri)
        self._artifact_root = database.parent / "mlartifacts" if database else None
        with self._errors("opened"), _migration_lock(database):
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

    def put_folder(self, run: TrackedRun, path: str, folder: Path) -> None:
        with self._errors("written"):
            if target := _local(run.artifacts):
                shutil.copytree(folder, target / path, copy_function=_link_or_copy, dirs_exist_ok=True)
            else:
                self._client.log_artifacts(run.id, str(folder), path)

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
            reason = _one_line(error, self.uri)
            raise TrackingError(f"MLflow at {redacted(self.uri)} could not be {action}: {reason}") from error


def no_server(uri: str, reason: object) -> str:
    """The error message where no MLflow server can be reached."""
    return (
        f"no MLflow server answers at {redacted(uri)} ({reason}); start it (`mlflow server --port …`), correct "
        "--mlflow or MLFLOW_TRACKING_URI, or leave both out to keep runs in the store"
    )


def _one_line(error: Exception, uri: str) -> str:
    """The message of an error in one line, without the password in `uri`."""
    return " ".join(str(error).split()).replace(uri, redacted(uri))[:500]


def _import_mlflow() -> None:
    """Import mlflow without its log messages and telemetry, unless the environment enables them."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow  # noqa: F401 - the import configures the loggers that are set below

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


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


@contextlib.contextmanager
def _migration_lock(database: Path | None) -> Iterator[None]:
    """One process at a time: if several create the tables of a SQLite store at once, all of them fail."""
    if database is None:
        yield
        return
    with database.with_name(database.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tracked(run: Run) -> TrackedRun:
    # RunData.metrics has no steps, but the protocol buffer has them.
    metrics = run.data.to_proto().metrics
    points = [Point(_key(metric.key), metric.value, metric.step, metric.timestamp) for metric in metrics]
    return TrackedRun(
        id=run.info.run_id,
        experiment=run.info.experiment_id,
        artifacts=run.info.artifact_uri,
        status=_STATUS_OF[run.info.status],
        tags=dict(run.data.tags),
        params=dict(run.data.params),
        latest={point.key: point for point in points},
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
