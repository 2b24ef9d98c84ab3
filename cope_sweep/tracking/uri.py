"""The URI of a store's MLflow, its check before a sweep starts, and the import of mlflow, which takes seconds."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cope_sweep.errors import UserError
from cope_sweep.redaction import is_ambiguous, redacted_url, remember
from cope_sweep.store.index.database import sqlite_file, sqlite_url
from cope_sweep.store.store import Store

if TYPE_CHECKING:
    from cope_sweep.tracking.mlflow import MLflowLogger

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


def check_uri(uri: str) -> str | None:
    """Return if runs can be sent to `uri`, with a note if its server is slow to answer: it may answer later.

    Raises:
        TrackingError: The scheme is not supported, the path cannot be written, or the server cannot be reached,
            refuses access, or is not an MLflow server.
    """
    path, url = sqlite_file(uri), redacted_url(uri)
    if path is not None:
        check_sqlite(path)
        return None
    if not uri.startswith(("http://", "https://")):
        raise TrackingError(
            f"MLflow's runs cannot be kept in {url!r}; accepted: sqlite:///PATH, and http://HOST:PORT or https://HOST "
            "of an MLflow server. For another database, start one: mlflow server --backend-store-uri …",
            code="unsupported_tracking",
            uri=url,
        )
    if is_ambiguous(uri):  # the client's own error may show a part of a password
        reason = "write characters such as / and @ in its password as %2F and %40"
        raise TrackingError(f"{url} is not the URL of a server: {reason}", code="no_server", uri=url, reason=reason)
    import_mlflow()
    from cope_sweep.tracking.client import check_server

    return check_server(uri)


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


def mlflow_logger(store: Store, uri: str) -> MLflowLogger:
    """Import mlflow, and connect to it for a store. Raises TrackingError."""
    import_mlflow(store.root / LOG_FILE)
    from cope_sweep.tracking.mlflow import MLflowLogger

    return MLflowLogger(store, uri)
