"""Resolution and check of the tracking URI."""

import json
import os
import socket
import sqlite3

import pytest

from cope_sweep.redaction import redacted_url
from cope_sweep.store import RunRecord
from cope_sweep.tracking.check import check_uri
from cope_sweep.tracking.page import mlflow_experiment_page, mlflow_run_page
from cope_sweep.tracking.uri import resolve_uri
from tests.helpers.errors import raises
from tests.helpers.processes import output_of
from tests.helpers.stub_server import Stub
from tests.helpers.sweeps import write_sweep
from tests.tracking.trackers import run_of, send


@pytest.fixture
def server():
    with Stub(None) as found:
        found.status, found.body = 200, json.dumps({"experiments": []}).encode()
        yield found


def is_refused(uri, code, /, **data):
    """The check refuses a URI with this code and these data, and neither its message nor its data have the password."""
    with raises(code, **data) as caught:
        check_uri(uri)
    assert "secret" not in f"{caught.value} {caught.value.data}"


def test_the_default_is_the_sqlite_file_of_the_store(store, monkeypatch, tmp_path):
    assert resolve_uri(store) == f"sqlite:///{store.root}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000/")
    assert resolve_uri(store) == "http://tracking:5000"
    assert resolve_uri(store, "https://other") == "https://other"
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(store, "sqlite:///here.db") == f"sqlite:///{tmp_path}/here.db"


@pytest.mark.slow
def test_sqlite_files_that_exist_or_can_be_created(tmp_path, sqlite_uri):
    check_uri(sqlite_uri)
    check_uri(f"sqlite:///{tmp_path}/new.db")
    with sqlite3.connect(tmp_path / "empty.db"):
        pass
    check_uri(f"sqlite:///{tmp_path}/empty.db")


def test_sqlite_files_that_cannot_be_created(tmp_path):
    is_refused(f"sqlite:///{tmp_path}/none/mlflow.db", "no_such_file", file=f"{tmp_path}/none")
    is_refused(f"sqlite:///{tmp_path}", "not_sqlite", file=str(tmp_path))
    (tmp_path / "notes.txt").write_text("these are notes, of some length")
    is_refused(f"sqlite:///{tmp_path}/notes.txt", "not_sqlite", file=f"{tmp_path}/notes.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    is_refused(f"sqlite:///{tmp_path}/mlflow.db", "not_writable", file=f"{tmp_path}/mlflow.db")


@pytest.mark.parametrize("uri", ["./mlruns", "/tmp/mlruns", "file:///tmp/mlruns", "mlruns"])
def test_folders_are_not_supported(uri):
    is_refused(uri, "unsupported_tracking", uri=uri)


@pytest.mark.parametrize("uri", ["postgresql://me:secret@host/db", "databricks://x", "ftp://host", "sqlite://"])
def test_an_unsupported_scheme_is_an_error(uri):
    is_refused(uri, "unsupported_tracking", uri=redacted_url(uri))


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:secret@127.0.0.1:1",
        "http://me:secret@no-such-host.invalid:5000",
        "http://me:sec[secret@host:5000",
        "http://me:a/secret@host:5000",
        "http://127.0.0.1:99999",
    ],
)
def test_an_address_where_nothing_listens(uri):
    is_refused(uri, "no_server", uri=redacted_url(uri))


@pytest.mark.slow
def test_a_server_that_has_not_answered_is_a_note():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        note = check_uri(f"http://me:secret@127.0.0.1:{silent.getsockname()[1]}")
    assert note is not None
    assert "secret" not in note


@pytest.mark.slow
@pytest.mark.parametrize(("code", "body"), [(404, b"not found"), (200, b"<html>welcome</html>"), (200, b"[]")])
def test_a_server_that_is_not_mlflow(server, code, body):
    server.status, server.body = code, body
    is_refused(server.url, "not_an_mlflow_server", uri=server.url)


@pytest.mark.slow
@pytest.mark.parametrize("code", [401, 403])
def test_a_server_that_refuses_access(server, code):
    server.status, server.body = code, b"You are not authenticated."
    is_refused(server.url, "access_refused", uri=server.url)


@pytest.mark.slow
def test_credentials_are_those_of_mlflow(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    check_uri(server.url)
    assert server.seen[-1] == ("/api/2.0/mlflow/experiments/search", "Bearer t0ken")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    check_uri(server.url)
    assert server.seen[-1][1] == "Basic bWU6c2VjcmV0"
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}")
    check_uri(server.url.replace("//", "//me:secret@"))
    assert server.seen[-1][1] == "Basic bWU6c2VjcmV0"
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text(
        "[mlflow]\nmlflow_tracking_username = file\nmlflow_tracking_password = pw\n"
    )
    check_uri(server.url)
    assert server.seen[-1][1] == "Basic ZmlsZTpwdw=="


@pytest.mark.slow
def test_a_real_server(server_uri):
    check_uri(server_uri)
    check_uri(f"{server_uri}/")


@pytest.mark.slow
def test_mlflow_is_imported_where_runs_are_sent(tmp_path):
    code = f"""
import sys
import cope_sweep.tracking.page
import cope_sweep.tracking.background
import cope_sweep.tracking.sync
from cope_sweep.tracking.check import check_uri

check_uri("sqlite:///{tmp_path}/mlflow.db")
print(*(name for name in ("mlflow", "torch", "pandas") if name in sys.modules))
"""
    assert output_of("-c", code).split() == []


@pytest.mark.slow
def test_a_run_that_a_server_has_leads_to_its_page(store, plan, server_uri, monkeypatch):
    record = write_sweep(store, plan)
    row = RunRecord.of(plan.runs[0].run_id, "running", plan.runs[0].model_dump(mode="json"))
    store.index.acquire(row, record.sweep_id, 600)
    assert mlflow_run_page(store, plan.runs[0].run_id) is None  # the database of the store has no pages
    send(store, server_uri, plan.runs[0])
    with Stub(server_uri) as stub:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", stub.url.replace("//", "//me:secret@"))
        page = mlflow_run_page(store, plan.runs[0].run_id)
        run = run_of(server_uri, plan.runs[0])
        shown = f"{stub.url}/#/experiments/{run.experiment}/runs/{run.id}?workflowType=machine_learning"
        assert page == shown
        assert stub.seen[-1][1] == "Basic bWU6c2VjcmV0"
        assert mlflow_run_page(store, plan.runs[1].run_id) is None
        monkeypatch.setenv("COPE_SWEEP_MLFLOW_PAGE", "https://me:secret@mlflow.example/")  # through a proxy
        assert mlflow_run_page(store, plan.runs[0].run_id) == shown.replace(stub.url, "https://mlflow.example")


@pytest.mark.slow
def test_a_server_that_does_not_answer_delays_one_page_only(store, plan, monkeypatch):
    record = write_sweep(store, plan)
    for run in plan.runs:
        store.index.acquire(RunRecord.of(run.run_id, "running", run.model_dump(mode="json")), record.sweep_id, 600)
    with Stub(None) as stub:
        stub.status, stub.delay_s = 200, 5.0
        monkeypatch.setenv("MLFLOW_TRACKING_URI", stub.url)
        assert [mlflow_run_page(store, run.run_id) for run in plan.runs] == [None] * 6
        assert stub.requests == 1


@pytest.mark.parametrize(
    "uri", ["http://me:secret/x@127.0.0.1:5000", "http://mlflow:tcp://10.0.0.1:5000", "http://[::1"]
)
def test_a_url_that_cannot_be_parsed_has_no_pages(store, plan, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert mlflow_experiment_page(store, plan.name) is None
