"""Which tracking store is meant, and whether it can be used: known in moments, without importing mlflow."""

from __future__ import annotations

import base64
import configparser
import json
import os
import ssl
import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from cope_sweep.record.ledger import Ledger
from cope_sweep.record.tracking import TrackingError

ACCEPTED = "sqlite:///PATH, or http://HOST:PORT or https://HOST of an MLflow server"
BUDGET_S = 5.0


def resolve_uri(ledger: Ledger, explicit: str | None = None) -> str:
    """The tracking URI: `explicit`, else $MLFLOW_TRACKING_URI, else SQLite in the store; SQLite paths made absolute."""
    uri = explicit or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{ledger.root / 'mlflow.db'}"
    path = sqlite_path(uri)
    return uri.rstrip("/") if path is None else f"sqlite:///{path}"


def sqlite_path(uri: str) -> Path | None:
    """The absolute path behind `sqlite:///PATH`; None for other schemes."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def redacted(uri: str) -> str:
    """`uri` without the password in it."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}"))


def check(uri: str) -> None:
    """Return if runs can be carried to `uri`; within about 5 s.

    Raises TrackingError: no such scheme, a path that cannot be written, a server that does not answer, or asks for
    credentials, or is none of MLflow's.
    """
    if uri.startswith("sqlite:///"):
        _check_sqlite(Path(uri.removeprefix("sqlite:///")).absolute())
    elif uri.startswith(("http://", "https://")):
        _check_server(uri)
    elif "://" not in uri or uri.startswith("file:"):
        raise TrackingError(
            f"{uri!r} is a folder, and MLflow 3.17 does not keep runs in folders any more; "
            f"accepted: {ACCEPTED}, as in sqlite:///store/mlflow.db"
        )
    else:
        raise TrackingError(
            f"{redacted(uri)!r}: tracking stores of this kind are not spoken to directly; accepted: {ACCEPTED}. "
            "For another database, put a server before it: mlflow server --backend-store-uri …"
        )


def _check_sqlite(path: Path) -> None:
    way_out = "choose another with --mlflow sqlite:///PATH"
    if path.is_dir():
        raise TrackingError(f"{path} is a folder, not a SQLite file; {way_out}")
    if not path.parent.is_dir():
        raise TrackingError(f"{path.parent}: no such folder for MLflow's SQLite file; make it, or {way_out}")
    try:
        if path.exists():
            with path.open("r+b") as file:
                head = file.read(16)
            if head and head != b"SQLite format 3\0":
                raise TrackingError(f"{path} is not a SQLite file; {way_out}")
        elif not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise TrackingError(f"{path}: MLflow's SQLite file cannot be written ({error.strerror}); {way_out}") from error


def _check_server(uri: str) -> None:
    deadline_s = time.monotonic() + BUDGET_S
    shown = redacted(uri)
    try:
        _ask(uri, "/health", None, deadline_s)
        answer = json.loads(_ask(uri, "/api/2.0/mlflow/experiments/search", {"max_results": 1}, deadline_s))
    except HTTPError as error:
        said = " ".join(error.read(200).decode(errors="replace").split())
        if error.code in (401, 403):
            raise TrackingError(
                f"the MLflow server at {shown} refuses access (HTTP {error.code}: {said}); "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            ) from error
        raise TrackingError(
            f"{shown} answers, but not as an MLflow server does (HTTP {error.code} for {urlsplit(error.url).path}: "
            f"{said}); check the URL's port and path"
        ) from error
    except ValueError as error:
        raise TrackingError(
            f"{shown} answers, but not as an MLflow server does (no JSON); check the URL's port and path"
        ) from error
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise TrackingError(
            f"no MLflow server answers at {shown} ({reason}); start it (`mlflow server --port …`), correct --mlflow or "
            "MLFLOW_TRACKING_URI, or leave both out to keep runs in the store"
        ) from error
    if not isinstance(answer, dict):
        raise TrackingError(f"{shown} answers, but not as an MLflow server does; check the URL's port and path")


def _ask(uri: str, path: str, body: dict[str, object] | None, deadline_s: float) -> bytes:
    """What the server answers. Raises OSError (HTTPError is one) or ValueError."""
    parts = urlsplit(uri)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    headers = {"Content-Type": "application/json"} | _authorization(uri)
    data = None if body is None else json.dumps(body).encode()
    request = Request(bare.rstrip("/") + path, data=data, headers=headers)  # noqa: S310 - http or https, by `check`
    timeout_s = max(0.5, deadline_s - time.monotonic())
    with urlopen(request, timeout=timeout_s, context=_tls(uri)) as response:  # noqa: S310
        answer: bytes = response.read(1_000_000)
    return answer


def _authorization(uri: str) -> dict[str, str]:
    """The header that MLflow's client will send: from the URL, its environment variables, ~/.mlflow/credentials."""
    parts = urlsplit(uri)
    kept = configparser.ConfigParser(interpolation=None)
    kept.read(Path("~/.mlflow/credentials").expanduser())
    user, password = (
        os.environ.get(name.upper()) or kept.get("mlflow", name, fallback=None)
        for name in ("mlflow_tracking_username", "mlflow_tracking_password")
    )
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if not (user and password) and not token and parts.username:
        user, password = unquote(parts.username), unquote(parts.password or "")
    if user and password:
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tls(uri: str) -> ssl.SSLContext | None:
    if not uri.startswith("https://"):
        return None
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
        return ssl._create_unverified_context()  # noqa: S323 - asked for by MLflow's own switch
    return ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or None)
