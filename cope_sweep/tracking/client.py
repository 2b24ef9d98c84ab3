"""The connection to MLflow: its client, SQLite files and errors. Importing this module takes seconds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from mlflow.db import upgrade
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

from cope_sweep.errors import UserError
from cope_sweep.proxies import bypass_proxies_here, proxy_data, through_proxy
from cope_sweep.redaction import redacted, redacted_url
from cope_sweep.store.files import create_database_file
from cope_sweep.store.index.database import on_network, sqlite_file
from cope_sweep.tracking.uri import TrackingError, check_sqlite

ACCESS_REFUSED = ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED")
"""MLflow's error codes for the HTTP statuses 401 and 403."""
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
REQUEST_TIMEOUT_S = 20
UPLOAD_TIMEOUT_S = 300
CHECK_REQUEST_S = 3
"""The time that a server may take to answer before a sweep starts. MLflow's client takes whole seconds."""


_connected: set[str] = set()
"""The SQLite files that this process has connected to, as SQLite names them."""


@event.listens_for(Engine, "connect")  # MLflow gives nobody its engine
def _write_lazily(connection: object, _: object) -> None:
    """Have SQLite wait for the disk at checkpoints of the write-ahead log only, not at each of 20 commits for a run.

    A crash of the machine may take the last commits, and leaves the file whole: `sync` sends what is missing.
    """
    if not isinstance(connection, sqlite3.Connection):
        return
    (_, _, path), *_ = connection.execute("PRAGMA database_list")
    if path in _connected and connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
        connection.execute("PRAGMA synchronous = NORMAL")


def connect(uri: str) -> MlflowClient:
    """MLflow's client for `sqlite:///PATH` or the URL of a server.

    A SQLite file is created if it does not exist; several processes may do so at once. On a local disk it has a
    write-ahead log: its readers and its writer do not wait for each other.
    """
    # MLflow's defaults repeat a request for four minutes, and also requests that create a run, which gives two runs
    # where the server did answer, too late.
    os.environ.setdefault(TIMEOUT, str(REQUEST_TIMEOUT_S))
    os.environ.setdefault("MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT", str(UPLOAD_TIMEOUT_S))
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    bypass_proxies_here(uri)
    database = sqlite_file(uri)
    if database is not None:
        check_sqlite(database)
        _prepare(database)
        _connected.add(str(database.resolve()))
    client = MlflowClient(tracking_uri=_url(database) if database else uri)
    client.search_experiments(max_results=1)  # the client connects on first use
    return client


def write_log(uri: str) -> None:
    """Write the write-ahead log of a SQLite file into it: the file is whole then, and can be copied."""
    database = sqlite_file(uri)
    if database is not None:
        _pragma(database, "wal_checkpoint(TRUNCATE)")


@contextlib.contextmanager
def errors(uri: str) -> Iterator[None]:
    """Turn every error but those of the store into a TrackingError with a message of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # MLflow passes on errors of database drivers, the network and the disk
        reason = _one_line(error)
        raise TrackingError(
            f"sending to MLflow at {redacted_url(uri)} failed: {reason}{through_proxy(uri)}",
            uri=redacted_url(uri),
            reason=reason,
            **proxy_data(uri),
        ) from error


def check_server(uri: str) -> str | None:
    """Return if an MLflow server at the http(s) URL `uri` accepts requests of MLflow's own client, or may do so later.

    So credentials, TLS settings and proxies are those that runs are sent with. The answer is None, or a note that the
    server has not answered in time.

    Raises:
        TrackingError: Nothing answers, the server refuses access, or it is not an MLflow server.
    """
    url, set_before = redacted_url(uri), os.environ.get(TIMEOUT)
    os.environ[TIMEOUT] = str(CHECK_REQUEST_S)
    try:
        connect(uri)
        return None
    except Exception as error:  # the answer of another service can fail anywhere in the client
        if "timed out" in str(error):
            return f"MLflow at {url} has not answered within {CHECK_REQUEST_S} s: runs are sent when it does"
        if isinstance(error, MlflowException) and error.error_code in ACCESS_REFUSED:
            code, problem = "access_refused", f"the MLflow server at {url} refuses access"
            hint = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        elif isinstance(error, MlflowException) and isinstance(error.__cause__ or error.__context__, OSError):
            code, problem = "no_server", f"no MLflow server answers at {url}"
            hint = "start it (`mlflow server --port …`), or leave out --mlflow and MLFLOW_TRACKING_URI"
        else:
            code, problem = "not_an_mlflow_server", f"{url} answers, but is not an MLflow server"
            hint = "check the URL's port and path"
        reason = _one_line(error)
        message = f"{problem} ({reason}){through_proxy(uri)}; {hint}"
        raise TrackingError(message, code=code, uri=url, reason=reason, **proxy_data(uri)) from error
    finally:
        del os.environ[TIMEOUT]
        os.environ.update({} if set_before is None else {TIMEOUT: set_before})


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
            upgrade.main([_url(new)], standalone_mode=False)  # the command `mlflow db upgrade`
            new.replace(database)
        if not on_network(database):
            _pragma(database, "journal_mode = WAL")  # the file keeps it


def _url(database: Path) -> str:
    """The URL of a SQLite file for MLflow, where only characters are escaped that would end the path.

    MLflow creates the folder of the URL as it is written: for `it%27s` an empty one beside `it's`.
    """
    return "sqlite:///" + str(database).replace("%", "%25").replace("?", "%3F")


def _pragma(database: Path, command: str) -> None:
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database, timeout=1.0)) as connection:
        connection.execute(f"PRAGMA {command}")


def _one_line(error: Exception) -> str:
    """The message of an error in one line, without secrets."""
    # SQLAlchemy's statement and link say nothing to a user.
    text = " ".join(str(error).split()).partition(" [SQL:")[0].partition(" (Background on this error")[0]
    return redacted(text)[:500]  # before it is cut: a part of a secret could not be found
