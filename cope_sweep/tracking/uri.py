"""The URI of a store's tracker, its check before a sweep starts, and its errors, without an import of mlflow."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from cope_sweep.errors import UserError
from cope_sweep.proxies import proxy_data, proxy_of, through_proxy
from cope_sweep.redaction import is_ambiguous, redacted_url, remember
from cope_sweep.store.index.database import sqlite_file, sqlite_url
from cope_sweep.store.store import Store

LOG_FILE = "mlflow.log"
"""The file in a store with what MLflow's client logs while it is sent."""
CHECK_CONNECTION_S = 2
"""The time that a server may take to accept a connection."""
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


def check_uri(uri: str) -> str | None:
    """Return if runs can be sent to `uri`, with a note if its server is slow to answer: it may answer later.

    Waits for a server 5 s at most; where one answers, importing mlflow takes some more.

    Raises:
        TrackingError: The scheme is not supported, the path cannot be written, or the server cannot be reached,
            refuses access, or is not an MLflow server.
    """
    path = sqlite_file(uri)
    if path is not None:
        check_sqlite(path)
    elif uri.startswith(("http://", "https://")):
        if is_ambiguous(uri):
            raise no_server(uri, "write characters such as / and @ in its password as %2F and %40")
        _check_connection(uri)
        import_mlflow()
        from cope_sweep.tracking.client import check_server

        return check_server(uri)
    elif "://" not in uri or uri.startswith("file:"):
        raise TrackingError(
            f"{redacted_url(uri)!r} is a folder, and MLflow 3.17 no longer keeps runs in folders; "
            f"accepted: {ACCEPTED}, as in sqlite:///store/mlflow.db",
            code="unsupported_tracking",
            uri=redacted_url(uri),
        )
    else:
        raise TrackingError(
            f"{redacted_url(uri)!r}: tracking stores of this kind are not supported; accepted: {ACCEPTED}. "
            "For another database, start a server for it: mlflow server --backend-store-uri …",
            code="unsupported_tracking",
            uri=redacted_url(uri),
        )
    return None


def _check_connection(uri: str) -> None:
    """Return if something listens at a URL, so that a wrong one fails before mlflow is imported."""
    try:
        parts = urlsplit(uri)
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        # Behind a proxy, the server itself may be out of reach.
        if proxy_of(uri) is None:
            socket.create_connection(address, timeout=CHECK_CONNECTION_S).close()
    except (OSError, ValueError) as error:
        raise no_server(uri, error) from error


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
