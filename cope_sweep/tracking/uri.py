"""The tracker of a store: its URI, a check before a sweep starts that runs can be sent to it, and what it lacks.

Nothing here imports mlflow, which takes seconds, before a server answers.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from cope_sweep.errors import UserError
from cope_sweep.store.index.database import redacted
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.store import Store

ACCEPTED = "sqlite:///PATH, or http://HOST:PORT or https://HOST of an MLflow server"
CHECK_CONNECTION_S = 2
"""The time that a server may take to accept a connection before a sweep starts."""


class TrackingError(UserError):
    """The tracker did not answer or refused a request. The message says which tracker, why, and what to do."""


def resolve_uri(store: Store, explicit: str | None = None) -> str:
    """The tracking URI: `explicit`, else $MLFLOW_TRACKING_URI, else SQLite in the store. SQLite paths are absolute."""
    uri = explicit or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store.root / 'mlflow.db'}"
    path = sqlite_path(uri)
    return uri.rstrip("/") if path is None else f"sqlite:///{path}"


def tracker_key(store: Store, uri: str) -> str:
    """The name of the tracker at `uri` in the store's index.

    It has no password, and for a SQLite file in the store a path relative to it, so that it stays when the store moves.
    Where the store is in an object store, a SQLite file is one of this machine.
    """
    path = sqlite_path(uri)
    if path is not None and store.objects:
        return f"sqlite://{platform.node()}{path}"
    if path is not None:
        inside = path.is_relative_to(store.root)
        return f"sqlite:///{path.relative_to(store.root) if inside else path}"
    parts = urlsplit(uri.rstrip("/"))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def run_page(store: Store, run_id: str) -> str | None:
    """The URL of a run's page in MLflow, where its runs are sent to a server; None if it does not have the run.

    No request is made: the index knows what the server has received.
    """
    uri = resolve_uri(store)
    if not uri.startswith(("http://", "https://")):
        return None
    server = tracker_key(store, uri)
    tracked_id = Mirrored(store.index, server).tracked_ids([run_id]).get(run_id)
    return None if tracked_id is None else f"{server}/#/runs/{tracked_id}"


def mirrored_of(store: Store, uri: str) -> Mirrored:
    """The part of a store that the tracker at `uri` has; nothing where its SQLite file is gone. Raises StoreError."""
    mirrored = Mirrored(store.index, tracker_key(store, uri))
    path = sqlite_path(uri)
    if path is not None and not path.exists() and mirrored.newest_tracked_id() is not None:
        mirrored.forget()
    return mirrored


def backlog_count(store: Store, uri: str) -> int:
    """The number of runs and sweeps that have ended and that the tracker at `uri` does not have. Raises StoreError."""
    return mirrored_of(store, uri).count()


def sqlite_path(uri: str) -> Path | None:
    """The absolute path in `sqlite:///PATH`; None for other schemes."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def check(uri: str) -> None:
    """Return if runs can be sent to `uri`.

    Waits for a server 5 s at most; where one answers, importing mlflow takes some more.

    Raises:
        TrackingError: The scheme is not supported, the path cannot be written, or the server does not answer, refuses
            access, or is no MLflow server.
    """
    path = sqlite_path(uri)
    if path is not None:
        check_sqlite(path)
    elif uri.startswith(("http://", "https://")):
        _check_connection(uri)
        import_mlflow()
        from cope_sweep.tracking.mlflow import check_server

        check_server(uri)
    elif "://" not in uri or uri.startswith("file:"):
        raise TrackingError(
            f"{uri!r} is a folder, and MLflow 3.17 no longer keeps runs in folders; "
            f"accepted: {ACCEPTED}, as in sqlite:///store/mlflow.db"
        )
    else:
        raise TrackingError(
            f"{redacted(uri)!r}: tracking stores of this kind are not supported; accepted: {ACCEPTED}. "
            "For another database, start a server for it: mlflow server --backend-store-uri …"
        )


def check_sqlite(path: Path) -> None:
    """Return if MLflow can use a SQLite file, or create it. Raises TrackingError."""
    hint = "choose another with --mlflow sqlite:///PATH"
    if path.is_dir():
        raise TrackingError(f"{path} is a folder, not a SQLite file; {hint}")
    if not path.parent.is_dir():
        raise TrackingError(f"{path.parent}: no such folder for MLflow's SQLite file; create it, or {hint}")
    try:
        if path.exists():
            with path.open("r+b") as file:
                head = file.read(16)
            if head and head != b"SQLite format 3\0":
                raise TrackingError(f"{path} is not a SQLite file; {hint}")
        elif not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise TrackingError(f"{path}: MLflow's SQLite file cannot be written ({error.strerror}); {hint}") from error


def _check_connection(uri: str) -> None:
    """Return if something listens at a URL, so that a wrong one fails before mlflow is imported."""
    parts = urlsplit(uri)
    try:
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        # Behind a proxy, the server itself may be out of reach.
        if parts.scheme not in getproxies() or proxy_bypass(address[0]):
            socket.create_connection(address, timeout=CHECK_CONNECTION_S).close()
    except (OSError, ValueError) as error:
        raise no_server(uri, error) from error


def no_server(uri: str, reason: object) -> TrackingError:
    """The error where no MLflow server can be reached."""
    return TrackingError(
        f"no MLflow server answers at {redacted(uri)} ({reason}); start it (`mlflow server --port …`), correct "
        "--mlflow or MLFLOW_TRACKING_URI, or leave both out to keep runs in the store"
    )


def import_mlflow() -> None:
    """Import mlflow without its log messages and telemetry, unless the environment enables them."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow  # noqa: F401 - the import configures the loggers that are set below

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
