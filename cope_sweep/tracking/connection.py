"""How MLflow's client is imported and configured, its errors in one line, and the check of a server."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping

from cope_sweep.tracking.port import TrackingError
from cope_sweep.tracking.uri import redacted

ACCESS_REFUSED = ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED")
"""MLflow's error codes for the HTTP statuses 401 and 403."""
REQUEST_TIMEOUT_S = 20
UPLOAD_TIMEOUT_S = 300


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


def check_server(uri: str, timeout_s: int) -> None:
    """Return if an MLflow server at the http(s) URL `uri` accepts requests within `timeout_s`.

    MLflow's own client sends the request, so that credentials, TLS settings and proxies are those that runs are sent
    with.

    Raises:
        TrackingError: Nothing answers, the server refuses access, or it is no MLflow server.
    """
    import_mlflow()
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    url = redacted(uri)
    limits = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    try:
        with _environment(limits):
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except MlflowException as error:
        reason = one_line(error, uri)
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
            f"{url} answers, but not as an MLflow server does ({one_line(error, uri)}); check the URL's port and path"
        ) from error


def no_server(uri: str, reason: object) -> str:
    """The error message where no MLflow server can be reached."""
    return (
        f"no MLflow server answers at {redacted(uri)} ({reason}); start it (`mlflow server --port …`), correct "
        "--mlflow or MLFLOW_TRACKING_URI, or leave both out to keep runs in the store"
    )


@contextlib.contextmanager
def tracking_errors(uri: str, action: str) -> Iterator[None]:
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
        raise TrackingError(f"MLflow at {redacted(uri)} could not be {action}: {one_line(error, uri)}") from error


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
