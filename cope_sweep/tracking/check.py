"""The check of an MLflow before a sweep starts: a wrong address should not be found out after hours of training."""

from __future__ import annotations

from cope_sweep.redaction import is_ambiguous, redacted_url
from cope_sweep.store.index.database import sqlite_file
from cope_sweep.tracking.uri import TrackingError, check_sqlite, import_mlflow


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
