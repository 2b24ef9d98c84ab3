"""MLflow behind the tracking port: the only importer of mlflow, which takes seconds, so only once a store is opened.

A SQLite store is one file, `<store>/mlflow.db`, and its artifacts lie beside it in `mlartifacts/<experiment>/`, under
absolute paths, so that `mlflow ui` finds them whatever directory it is started from. An MLflow server keeps its own.
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

from cope_sweep.record.preflight import redacted, sqlite_path
from cope_sweep.record.tracking import Point, Standing, Tracked, TrackingError, note_latest

if TYPE_CHECKING:
    from mlflow.entities import Run

STANDINGS: dict[Standing, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}
_STANDING_OF: dict[str, Standing] = {name: standing for standing, name in STANDINGS.items()} | {"SCHEDULED": "running"}

TRIES = 10
"""How often the same entries are sent while other writers send them, too."""

MAX_TEXT = {"tag": 8000, "param": 6000, "about": 20000}
"""Characters that MLflow takes of a value."""


class MlflowTracking:
    """A tracking store of MLflow's, by `sqlite:///PATH` or the URL of a server.

    Raises TrackingError where it cannot be opened. A SQLite store is made where it is missing; any number of processes
    may do so at once.
    """

    def __init__(self, uri: str) -> None:
        _quiet()
        from mlflow.tracking import MlflowClient

        self.uri = uri
        self._experiments: dict[str, str] = {}
        database = sqlite_path(uri)
        self._artifact_root = database.parent / "mlartifacts" if database else None
        with self._errors("opened"), _alone(database):
            self._client = MlflowClient(tracking_uri=uri)
            # The client opens its store at first use, and that is when MLflow migrates a fresh one.
            self._everywhere = self._all_experiments()

    def find(self, tags: Mapping[str, str]) -> Tracked | None:
        condition = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with self._errors("searched"):
            run = self._search(condition)
            if run is None and (everywhere := self._all_experiments()) != self._everywhere:
                self._everywhere = everywhere
                run = self._search(condition)
        return _tracked(run) if run else None

    def _search(self, condition: str) -> Run | None:
        order = ["attributes.start_time ASC"]
        runs = self._client.search_runs(self._everywhere, condition, max_results=1, order_by=order)
        return runs[0] if runs else None

    def create(
        self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, about: str = ""
    ) -> Tracked:
        with self._errors("written"):
            return _tracked(
                self._client.create_run(
                    self._experiment(experiment, about), started_ms, _cut(tags, "tag"), run_name=name
                )
            )

    def log(
        self,
        run: Tracked,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        points, params, tags = list(points), _cut(params or {}, "param"), _cut(tags or {}, "tag")
        entries = (
            [Metric(_there(point.key), point.value, point.timestamp_ms, point.step) for point in points],
            [Param(key, value) for key, value in params.items()],
            [RunTag(key, value) for key, value in tags.items()],
        )
        with self._errors("written"):
            for chances_left in reversed(range(TRIES)):
                try:
                    # The client cuts this into requests of 1000 entries.
                    self._client.log_batch(run.id, *entries)
                    break
                except Exception as error:
                    # Another writer was at the same entries, between MLflow's look and its own writing. Whatever is
                    # there and equal may be logged again.
                    if "IntegrityError" not in f"{type(error)} {error}" or not chances_left:
                        raise
        run.params |= params
        run.tags |= tags
        for point in points:
            note_latest(run, point)

    def set_standing(self, run: Tracked, standing: Standing, ended_ms: int | None = None) -> None:
        with self._errors("written"):
            if standing == "running":
                self._client.update_run(run.id, STANDINGS[standing])
            else:
                self._client.set_terminated(run.id, STANDINGS[standing], ended_ms)
        run.standing = standing

    def put_text(self, run: Tracked, path: str, text: str) -> None:
        with self._errors("written"):
            if folder := _local(run.artifacts):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
            else:
                self._client.log_text(run.id, text, path)

    def put_folder(self, run: Tracked, path: str, folder: Path) -> None:
        with self._errors("written"):
            if target := _local(run.artifacts):
                shutil.copytree(folder, target / path, copy_function=_link_or_copy, dirs_exist_ok=True)
            else:
                self._client.log_artifacts(run.id, str(folder), path)

    def history(self, run: Tracked, key: str) -> list[Point]:
        with self._errors("read"):
            metrics = self._client.get_metric_history(run.id, _there(key))
        return sorted((Point(key, m.value, m.step, m.timestamp) for m in metrics), key=lambda point: point.step)

    def artifacts(self, run: Tracked, path: str = "") -> list[str]:
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

    def _experiment(self, name: str, about: str) -> str:
        """The id of the experiment called `name`, made where it is missing."""
        from mlflow.exceptions import MlflowException

        if name in self._experiments:
            return self._experiments[name]
        found = self._client.get_experiment_by_name(name)
        if found is None:
            location = (self._artifact_root / name).as_uri() if self._artifact_root else None
            # Told what it is, MLflow's UI shows runs and charts, and does not ask for traces of agents.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            tags |= {"mlflow.note.content": about[: MAX_TEXT["about"]]} if about else {}
            try:
                self._experiments[name] = self._client.create_experiment(name, location, tags)
                return self._experiments[name]
            except MlflowException:
                # Another process may have been first.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise TrackingError(
                f"{redacted(self.uri)}: the experiment {name!r} is in MLflow's trash; bring it back with "
                f"`mlflow experiments restore -x {found.experiment_id}`, or empty the trash with `mlflow gc`"
            )
        self._experiments[name] = found.experiment_id
        return self._experiments[name]

    @contextlib.contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        """Say what went wrong in one line."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            # A store's driver, the network, the disk: MLflow passes on what it meets, of any class.
            if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
                error = OSError("; ".join(str(why) for _, _, why in error.args[0]))  # one per file of a folder
            text = " ".join(str(error).split()).replace(self.uri, redacted(self.uri))[:500]
            raise TrackingError(f"MLflow at {redacted(self.uri)} could not be {done}: {text}") from error


def _quiet() -> None:
    """Import mlflow without its chatter and telemetry, unless the environment asks for them."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow  # noqa: F401 - it sets up its logging, which is then lowered

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextlib.contextmanager
def _alone(database: Path | None) -> Iterator[None]:
    """One process at a time: several that migrate a fresh SQLite store at once all fail."""
    if database is None:
        yield
        return
    with database.with_name(database.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tracked(run: Run) -> Tracked:
    metrics = run.data._metric_objs  # The public view of it leaves the steps out.
    return Tracked(
        id=run.info.run_id,
        experiment=run.info.experiment_id,
        artifacts=run.info.artifact_uri,
        standing=_STANDING_OF[run.info.status],
        tags=dict(run.data.tags),
        params=dict(run.data.params),
        latest={_here(m.key): Point(_here(m.key), m.value, m.step, m.timestamp) for m in metrics},
    )


def _there(key: str) -> str:
    """A metric's name in MLflow, which has no `@`: `test/perplexity at 2048`."""
    return key.replace("@", " at ")


def _here(key: str) -> str:
    return key.replace(" at ", "@")


def _cut(values: Mapping[str, str], kind: str) -> dict[str, str]:
    limit = MAX_TEXT[kind]
    return {key: value if len(value) <= limit else value[: limit - 2] + " …" for key, value in values.items()}


def _local(artifacts: str) -> Path | None:
    """The folder behind an artifact URI, where it is one of this machine's."""
    parts = urlsplit(artifacts)
    return Path(unquote(parts.path)) if parts.scheme in ("file", "") and not parts.netloc else None


def _link_or_copy(source: str, target: str) -> None:
    """A finished checkpoint never changes, so a hard link will do: no time, no second copy on the disk.

    Another sweep may be at the same file at the same time; whichever is last puts the whole of it in place.
    """
    own = f"{target}.{uuid.uuid4().hex}"
    try:
        try:
            os.link(source, own)
        except OSError:
            shutil.copyfile(source, own)
        Path(own).replace(target)
    finally:
        # Renaming a link over another of the same file does nothing, and leaves both.
        Path(own).unlink(missing_ok=True)
