"""A check before a sweep starts that runs can be sent to its tracker."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from cope_sweep.proxies import proxy_of
from cope_sweep.redaction import is_ambiguous, redacted_url
from cope_sweep.store.index.database import sqlite_file
from cope_sweep.tracking.uri import ACCEPTED, TrackingError, check_sqlite, import_mlflow, no_server

CHECK_CONNECTION_S = 2
"""The time that a server may take to accept a connection."""


def check_uri(uri: str) -> None:
    """Return if runs can be sent to `uri`.

    Waits for a server 5 s at most; where one answers, importing mlflow takes some more.

    Raises:
        TrackingError: The scheme is not supported, the path cannot be written, or the server does not answer, refuses
            access, or is not an MLflow server.
    """
    path = sqlite_file(uri)
    if path is not None:
        check_sqlite(path)
    elif uri.startswith(("http://", "https://")):
        if is_ambiguous(uri):
            raise no_server(uri, "write characters such as / and @ in its password as %2F and %40")
        _check_connection(uri)
        import_mlflow()
        from cope_sweep.tracking.mlflow import check_server

        check_server(uri)
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
