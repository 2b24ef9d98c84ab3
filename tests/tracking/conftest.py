"""Trackers for tests: SQLite stores, and an MLflow server in a process of its own."""

import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.helpers.finished_runs import plan_of
from tests.helpers.object_stores import bucket_url, object_server, on_machine  # noqa: F401 - fixtures
from tests.helpers.processes import free_port
from tests.tracking.trackers import fresh_database  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def _without_tracking_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW_TRACKING")]:
        monkeypatch.delenv(name)


@pytest.fixture
def plan():
    """Different runs for every test, because all tests share the server."""
    return plan_of(f"copying-{secrets.token_hex(4)}", seeds=[secrets.randbelow(2**30), secrets.randbelow(2**30)])


@pytest.fixture
def sqlite_uri(store, fresh_database):  # noqa: F811
    """The MLflow store of a store, still empty."""
    shutil.copyfile(fresh_database, store.root / "mlflow.db")
    return f"sqlite:///{store.root / 'mlflow.db'}"


def start_server(folder, database):
    """Start an MLflow server on a free port, in `folder`. Returns its process and URL once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "-w", "1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(folder / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return process, url
        except OSError:
            time.sleep(0.2)
    process.kill()
    pytest.fail(f"the MLflow server did not start: {(folder / 'server.log').read_text()[-2000:]}")


def stop_server(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def served_database(tmp_path_factory, fresh_database):  # noqa: F811
    """The SQLite store behind `server_uri`."""
    path = tmp_path_factory.mktemp("served") / "mlflow.db"
    shutil.copyfile(fresh_database, path)
    return path


@pytest.fixture(scope="session")
def server_uri(tmp_path_factory, served_database):
    """The URL of a server that was started in another directory than that of its store."""
    process, url = start_server(tmp_path_factory.mktemp("elsewhere"), served_database)
    yield url
    stop_server(process)


@pytest.fixture(params=["sqlite", "server"])
def uri(request):
    """Each kind of tracker. The store of the server is shared by all tests and not empty."""
    return request.getfixturevalue(f"{request.param}_uri")
