"""The URI of a store's tracker, and the errors of trackers. Nothing here imports mlflow, which takes seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

from cope_sweep.errors import UserError
from cope_sweep.proxies import proxy_data, through_proxy
from cope_sweep.redaction import redacted_url, remember
from cope_sweep.store.index.database import sqlite_file, sqlite_url
from cope_sweep.store.store import Store

ARTIFACTS = "mlartifacts"
MOVE = "SET {0} = :new || substr({0}, length(:old) + 1) WHERE substr({0}, 1, length(:old)) = :old"
MOVES = (
    f"UPDATE experiments {MOVE.format('artifact_location')}",
    f"UPDATE runs {MOVE.format('artifact_uri')}",
    f"UPDATE logged_models {MOVE.format('artifact_location')}",
)
"""Replace the start of the places of artifacts in MLflow's tables."""
LOG_FILE = "mlflow.log"
"""The file in a store with what MLflow's client logs while it is sent."""
BUSY_TIMEOUT_S = 60
RUN_ID_TAG = "cope_sweep.run_id"
"""The tag of MLflow's run that names the run of the store. A run is looked up by it."""
ACCEPTED = "sqlite:///PATH, or http://HOST:PORT or https://HOST of an MLflow server"


class TrackingError(UserError):
    """The tracker did not answer or refused a request. The message says which tracker, why, and what to do."""

    default_code = "tracking_failed"


def resolve_uri(store: Store, explicit: str | None = None) -> str:
    """The tracking URI: `explicit`, else $MLFLOW_TRACKING_URI, else SQLite in the store. SQLite paths are absolute."""
    uri = explicit or os.environ.get("MLFLOW_TRACKING_URI") or sqlite_url(store.root / "mlflow.db")
    remember(uri)
    path = sqlite_file(uri)
    return uri.rstrip("/") if path is None else sqlite_url(path)


def check_sqlite(path: Path) -> None:
    """Return if MLflow can use a SQLite file, or create it. Raises TrackingError."""
    hint = "choose another with --mlflow sqlite:///PATH"
    if path.is_dir():
        raise TrackingError(f"{path} is a folder, not a SQLite file; {hint}", code="not_sqlite", file=str(path))
    if not path.parent.is_dir():
        raise TrackingError(
            f"{path.parent}: no such folder for MLflow's SQLite file; create it, or {hint}",
            code="no_such_file",
            file=str(path.parent),
        )
    try:
        if path.exists():
            with path.open("r+b") as file:
                head = file.read(16)
            if head and head != b"SQLite format 3\0":
                raise TrackingError(f"{path} is not a SQLite file; {hint}", code="not_sqlite", file=str(path))
        elif not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise TrackingError(
            f"{path}: MLflow's SQLite file cannot be written ({error.strerror}); {hint}",
            code="not_writable",
            file=str(path),
        ) from error


def artifact_folder(path: Path) -> Path:
    """The folder of the artifacts of MLflow's SQLite file: beside it."""
    return path.parent / ARTIFACTS


def follow_artifacts(path: Path) -> None:
    """Correct the places of artifacts in MLflow's SQLite file after its store was moved or copied.

    MLflow keeps them as absolute URLs, and has no request that changes them. Without this, it would not find the models
    that it has, and would make new ones in the folder that the store was moved or copied from.

    Raises:
        TrackingError: The file cannot be read or written.
    """
    new = artifact_folder(path).as_uri()
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as database:
            places = database.execute("SELECT artifact_location FROM experiments").fetchall()
            folders = {place.rpartition("/")[0] for (place,) in places if place}
            moved = {old for old in folders if old.startswith("file:///") and old.endswith(f"/{ARTIFACTS}")} - {new}
            with database:
                for old in moved:
                    for statement in MOVES:
                        database.execute(statement, {"old": f"{old}/", "new": f"{new}/"})
    except sqlite3.Error as error:
        raise TrackingError(
            f"{path}: the places of MLflow's artifacts cannot be corrected ({error})",
            code="not_writable",
            file=str(path),
        ) from error


def no_server(uri: str, reason: object) -> TrackingError:
    """The error where no MLflow server can be reached."""
    return TrackingError(
        f"no MLflow server answers at {redacted_url(uri)} ({reason}){through_proxy(uri)}; start it "
        "(`mlflow server --port …`), correct --mlflow or MLFLOW_TRACKING_URI, or leave both out to keep runs in the "
        "store",
        code="no_server",
        uri=redacted_url(uri),
        **proxy_data(uri),
    )


class _LogFile(logging.FileHandler):
    """A log file. What its disk cannot take is dropped: the error that was logged is raised, too."""

    def handleError(self, record: logging.LogRecord) -> None: ...  # noqa: N802 - a method of logging


def import_mlflow(log: Path | None = None) -> None:
    """Import mlflow without telemetry. What it and the libraries below it log goes to the file `log`; None: nowhere.

    They log each failed request with a traceback, and errors are raised besides.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow  # noqa: F401 - the import configures the loggers that are set below

    handler = logging.NullHandler() if log is None else _LogFile(log, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("mlflow", "alembic", "sqlalchemy", "urllib3"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
