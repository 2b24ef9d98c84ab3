"""The URI of a store's MLflow, and the import of mlflow, which takes seconds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from cope_sweep.errors import UserError
from cope_sweep.redaction import remember
from cope_sweep.store.index.database import sqlite_file, sqlite_url
from cope_sweep.store.store import Store

LOG_FILE = "mlflow.log"
"""The file in a store with what MLflow's client logs while it is sent."""
RUN_ID_TAG = "cope_sweep.run_id"
"""The tag of MLflow's run that names the run of the store. A run is looked up by it."""


class TrackingError(UserError):
    """MLflow did not answer or refused a request. The message says which server or file, why, and what to do."""

    default_code = "tracking_failed"


def resolve_uri(store: Store, explicit: str | None = None) -> str:
    """The tracking URI: `explicit`, else $MLFLOW_TRACKING_URI, else SQLite in the store. SQLite paths are absolute."""
    uri = explicit or os.environ.get("MLFLOW_TRACKING_URI") or sqlite_url(store.root / "mlflow.db")
    remember(uri)
    path = sqlite_file(uri)
    return uri.rstrip("/") if path is None else sqlite_url(path)


def check_sqlite(path: Path) -> None:
    """Return if MLflow can use a SQLite file, or create it. Raises TrackingError."""
    file, folder = path, path.parent
    if not folder.is_dir():
        file, code, problem = folder, "no_such_file", "no such folder"
    elif not os.access(path if path.exists() else folder, os.R_OK | os.W_OK):
        code, problem = "not_writable", "the file cannot be written"
    elif path.is_dir() or (path.exists() and not _is_sqlite(path)):
        code, problem = "not_sqlite", "not a SQLite file"
    else:
        return
    message = f"MLflow cannot use {path}: {problem}; choose another file with --mlflow sqlite:///PATH"
    raise TrackingError(message, code=code, file=str(file))


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) in (b"", b"SQLite format 3\0")  # an empty file becomes a database


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
