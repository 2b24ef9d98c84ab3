import http.server
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from cope_sweep.record.preflight import check, redacted, resolve_uri
from cope_sweep.record.tracking import TrackingError


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers as its server's `code` and `body` say, and keeps what it was asked."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.server.codes.get(self.path, 200))
        self.end_headers()
        self.wfile.write(self.server.body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    found.codes, found.body, found.asked = {}, json.dumps({"experiments": []}).encode(), []
    found.url = f"http://127.0.0.1:{found.server_port}"
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()


def refusal(uri):
    with pytest.raises(TrackingError) as caught:
        check(uri)
    return str(caught.value)


def test_the_store_s_own_database_is_the_default(ledger, monkeypatch, tmp_path):
    assert resolve_uri(ledger) == f"sqlite:///{ledger.root}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000/")
    assert resolve_uri(ledger) == "http://tracking:5000"
    assert resolve_uri(ledger, "https://other") == "https://other"
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(ledger, "sqlite:///here.db") == f"sqlite:///{tmp_path}/here.db"


def test_a_database_that_is_there_or_can_be_made(tmp_path, sqlite_uri):
    check(sqlite_uri)
    check(f"sqlite:///{tmp_path}/new.db")
    with sqlite3.connect(tmp_path / "empty.db"):
        pass
    check(f"sqlite:///{tmp_path}/empty.db")


def test_databases_that_cannot_be(tmp_path):
    assert "no such folder" in refusal(f"sqlite:///{tmp_path}/none/mlflow.db")
    assert "is a folder" in refusal(f"sqlite:///{tmp_path}")
    (tmp_path / "notes.txt").write_text("these are notes, of some length")
    assert "not a SQLite file" in refusal(f"sqlite:///{tmp_path}/notes.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be written" in refusal(f"sqlite:///{tmp_path}/mlflow.db")


@pytest.mark.parametrize("uri", ["./mlruns", "/tmp/mlruns", "file:///tmp/mlruns", "mlruns"])
def test_folders_of_files_are_of_the_past(uri):
    assert "sqlite:///store/mlflow.db" in refusal(uri)


@pytest.mark.parametrize("uri", ["postgresql://me:secret@host/db", "databricks://x", "ftp://host", "sqlite://"])
def test_unknown_kinds_are_told_what_is_accepted(uri):
    text = refusal(uri)
    assert "sqlite:///PATH" in text
    assert "http://HOST:PORT" in text
    assert "secret" not in text


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = refusal(f"http://me:secret@127.0.0.1:{port}")
    assert "no MLflow server answers" in text
    assert "mlflow server" in text
    assert "secret" not in text


def test_one_that_never_answers_is_given_up_on_in_seconds():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        assert "timed out" in refusal(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 8


def test_a_name_that_is_none():
    assert "no MLflow server answers" in refusal("http://no-such-host.invalid:5000")


def test_another_server_than_mlflow_s(server):
    server.codes["/health"] = 404
    assert "HTTP 404 for /health" in refusal(server.url)
    server.codes.clear()
    server.body = b"<html>welcome</html>"
    assert "not as an MLflow server does" in refusal(server.url)


@pytest.mark.parametrize("code", [401, 403])
def test_one_that_asks_who_is_there(server, code):
    server.codes["/api/2.0/mlflow/experiments/search"] = code
    assert "MLFLOW_TRACKING_USERNAME" in refusal(server.url)


def test_credentials_are_those_that_mlflow_would_send(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    check(server.url)
    assert server.asked[-1] == ("/api/2.0/mlflow/experiments/search", "Bearer t0ken")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    check(server.url)
    assert server.asked[-1][1] == "Basic bWU6c2VjcmV0"
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}")
    check(server.url.replace("//", "//me:secret@"))
    assert server.asked[-1][1] == "Basic bWU6c2VjcmV0"
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text(
        "[mlflow]\nmlflow_tracking_username = file\nmlflow_tracking_password = p%w\n"
    )
    check(server.url)
    assert server.asked[-1][1] == "Basic ZmlsZTpwJXc="


def test_a_real_server(server_uri):
    check(server_uri)
    check(f"{server_uri}/")


def test_passwords_are_not_shown():
    assert redacted("http://me:secret@host:1/x") == "http://me:***@host:1/x"
    assert redacted("http://host:1/x") == "http://host:1/x"


def test_mlflow_is_not_imported_for_it():
    code = "import sys, cope_sweep.record.preflight, cope_sweep.record.follow, cope_sweep.record.mlflow\n"
    code += "print(*(name in sys.modules for name in ('mlflow', 'torch', 'pandas')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3
