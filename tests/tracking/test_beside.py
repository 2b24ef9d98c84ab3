"""The process that copies a store to MLflow, and MLflow servers that are away, slow, or answer with errors."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from cope_sweep.tracking.beside import MlflowMirror
from cope_sweep.tracking.send import TAG
from cope_sweep.tracking.sync import MirrorLock, Sync
from cope_sweep.tracking.uri import backlog_count, tracker_key
from tests.read.tables.ablations import finish, plan_of
from tests.store.sweeps import begin, end, end_sweep, write_sweep
from tests.store.waiting import TIMEOUT_S, until, until_prolonged
from tests.sweep.ports import free_port
from tests.tracking.stub_server import Stub
from tests.tracking.trackers import client_of, history, run_of, runs_of, sweep_of


@pytest.mark.slow
def test_a_sweep_is_copied_while_it_runs_and_at_its_end(store, plan, sqlite_uri):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    folder = begin(store, plan.runs[1], {"step": 1, "train/loss": 2.0})
    mirror = MlflowMirror.start(store, record.sweep_id, sqlite_uri)
    try:
        until(lambda: run_of(sqlite_uri, plan.runs[0]) and run_of(sqlite_uri, plan.runs[1]))
        # The mirror ignores Ctrl-C.
        mirror.process.send_signal(signal.SIGINT)
        folder.log({"step": 2, "train/loss": 1.0})
        until(lambda: len(history(sqlite_uri, run_of(sqlite_uri, plan.runs[1]), "train/loss")) == 2)
        for run in plan.runs[2:]:
            finish(store, run, {"dense/loss": 0.5})
        folder.finish({"train/loss": 1.0}, {"steps": 2})
        end(store, folder)
        end_sweep(store, record)
    finally:
        errors = mirror.finish(patience_s=TIMEOUT_S)
    assert errors == []
    assert mirror.process.returncode == 0
    parent = sweep_of(sqlite_uri, record)
    assert parent.status == "finished"
    assert parent.tags[f"{TAG}runs.finished"] == "6"
    assert backlog_count(store, sqlite_uri) == 0
    log = (store.root / "logs" / f"mlflow-{record.sweep_id}.log").read_text()
    assert "7 runs and sweeps sent, 0 left" in log
    assert "alembic" not in log
    assert "Warning" not in log


@pytest.mark.slow
def test_what_a_killed_mirror_did_not_send_is_sent_by_the_next_one(store, plan, sqlite_uri):
    record = write_sweep(store, plan)
    mirror = MlflowMirror.start(store, record.sweep_id, sqlite_uri)
    mirror.process.kill()
    for run in plan.runs:
        finish(store, run, {"dense/loss": 0.5})
    end_sweep(store, record)
    (error,) = mirror.finish(patience_s=TIMEOUT_S)
    assert "died (exit code -9)" in error
    assert f"cope-sweep sync --store {store.root} --mlflow {sqlite_uri}" in error
    assert backlog_count(store, sqlite_uri) == 7
    # There is nothing left to train, and no sweep.
    assert MlflowMirror.start(store, None, sqlite_uri).finish(patience_s=TIMEOUT_S) == []
    assert backlog_count(store, sqlite_uri) == 0
    assert sweep_of(sqlite_uri, record).status == "finished"


@pytest.mark.slow
def test_the_end_of_a_sweep_shows_progress_and_ctrl_c_leaves_the_rest(store, sqlite_uri):
    """Also a run that the tracker shows as running, and the sweep itself, have ended there then."""
    plan = plan_of(seeds=list(range(12)))
    record = write_sweep(store, plan)
    folder = begin(store, plan.runs[-1], {"step": 1, "train/loss": 2.0})
    with Sync(store, sqlite_uri) as session:
        assert session.sync()
    assert (run_of(sqlite_uri, plan.runs[-1]).status, sweep_of(sqlite_uri, record).status) == ("running", "running")
    for run in plan.runs[:-1]:
        finish(store, run, {"dense/loss": 0.5})
    folder.finish({"train/loss": 1.0}, {"steps": 2})
    end(store, folder)
    end_sweep(store, record)
    calls, interrupted = [], threading.Event()

    def on_sending(sent, total):
        calls.append((sent, total))
        if sent and not interrupted.is_set():
            interrupted.set()
            signal.raise_signal(signal.SIGINT)

    (error,) = MlflowMirror.start(store, record.sweep_id, sqlite_uri).finish(on_sending, patience_s=TIMEOUT_S)
    left = backlog_count(store, sqlite_uri)
    assert 0 < left < 37
    assert f"interrupted with {left} runs and sweeps to send; the store has all results" in error
    assert f"cope-sweep sync --store {store.root}" in error
    assert {run.status for run in runs_of(sqlite_uri)} == {"finished"}

    calls.clear()
    rest = MlflowMirror.start(store, None, sqlite_uri)
    assert rest.finish(lambda *call: calls.append(call), patience_s=TIMEOUT_S) == []
    assert calls[0] == (0, left)
    assert calls[-1] == (left, left)
    assert calls == sorted(calls)
    assert len(runs_of(sqlite_uri)) == 37


SWEEP = """
import sys, time
from cope_sweep.store import Store
from cope_sweep.tracking.beside import MlflowMirror

mirror = MlflowMirror.start(Store(sys.argv[1]), sys.argv[2], sys.argv[3])
print(mirror.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_state_of_a_killed_sweep_is_copied(store, plan, sqlite_uri, tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(textwrap.dedent(SWEEP))
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    command = [sys.executable, str(script), str(store.root), record.sweep_id, sqlite_uri]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    sweep = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    int(sweep.stdout.readline())
    begin(store, plan.runs[1], {"step": 1, "train/loss": 2.0}, lease_s=0.0)
    sweep.kill()
    sweep.wait()
    sweep.stdout.close()
    end_sweep(store, record, "interrupted")
    log = store.root / "logs" / f"mlflow-{record.sweep_id}.log"
    until(lambda: "sweeps sent" in log.read_text())
    assert sweep_of(sqlite_uri, record).status == "killed"
    assert run_of(sqlite_uri, plan.runs[0]).status == "finished"
    assert run_of(sqlite_uri, plan.runs[1]).status == "killed"
    assert store.index.statuses()[plan.runs[1].run_id] == "interrupted"


@pytest.mark.slow
def test_an_unreachable_server_is_reported_with_a_command_that_works_later(store, plan):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    address = f"127.0.0.1:{free_port()}"
    mirror = MlflowMirror.start(store, record.sweep_id, f"http://me:secret@{address}")
    log = store.root / "logs" / f"mlflow-{record.sweep_id}.log"
    until(lambda: "could not be opened" in log.read_text())
    end_sweep(store, record)
    (error,) = mirror.finish()
    assert backlog_count(store, f"http://{address}") == 2
    assert f"MLflow at http://me:***@{address} could not be opened" in error
    assert "secret" not in error
    assert f"cope-sweep sync --store {store.root}" in error


@pytest.mark.slow
def test_a_server_that_hangs_does_not_hold_the_end_of_the_sweep(store, plan, server_uri):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    with Stub(server_uri) as stub:
        stub.delay_s = 600
        mirror = MlflowMirror.start(store, record.sweep_id, stub.url)
        until(lambda: stub.requests)
        started_s = time.monotonic()
        (error,) = mirror.finish(patience_s=3.0)
        assert time.monotonic() - started_s < 60  # 8 s on an idle machine; the server answers after 600
        assert "MLflow made no progress for 3 s" in error
        assert f"cope-sweep sync --store {store.root}" in error
        assert mirror.process.returncode == -signal.SIGKILL
        assert backlog_count(store, stub.url) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["errors", "lost", "away"])
def test_a_server_with_faults_has_everything_once_when_it_is_back(store, plan, server_uri, fault):
    """While a sweep trains; `lost`: requests are carried out, and the client is told that they failed."""
    record = write_sweep(store, plan)
    with Stub(server_uri) as stub, Sync(store, stub.url, first_sweep=record.sweep_id) as session:
        session.sync()
        stub.status = 500 if fault == "errors" else None
        stub.lose_every = 13 if fault == "lost" else 0
        if fault == "away":
            stub.__exit__()
        folder = begin(store, plan.runs[0], {"step": 1, "train/loss": 3.0})
        complete = session.sync()
        folder.log({"step": 2, "train/loss": 2.0})
        for run in plan.runs[1:]:
            finish(store, run, {"dense/loss": 0.5})
            complete = session.sync()
        folder.finish({"train/loss": 2.0}, {"steps": 2})
        end(store, folder)
        end_sweep(store, record)
        if fault != "lost":
            assert not complete
            assert session.reasons()
            assert backlog_count(store, stub.url) == 7
        if fault == "away":
            port = int(stub.url.rpartition(":")[2])
            stub = Stub(server_uri, port).__enter__()
        stub.status = None
        assert session.send_all(tries=TIMEOUT_S) == []
        assert backlog_count(store, stub.url) == 0
    experiment = run_of(server_uri, plan.runs[0]).experiment
    client = client_of(server_uri)
    assert len(client.search_runs([experiment])) == 7
    assert sweep_of(server_uri, record).status == "finished"
    assert [p.step for p in history(server_uri, run_of(server_uri, plan.runs[0]), "train/loss")] == [1, 2]
    for run in plan.runs[1:]:
        tracked = run_of(server_uri, run)
        assert (tracked.status, len(tracked.models)) == ("finished", 1)
        assert [p.step for p in history(server_uri, tracked, "train/loss")] == [1, 6]
    models = client.search_logged_models([experiment])
    assert len(models) == 5


@pytest.mark.slow
def test_one_mirror_per_store_and_tracker_works_at_a_time(store, plan, sqlite_uri):
    write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    other_uri = shutil.copyfile(sqlite_uri.removeprefix("sqlite:///"), store.root / "other.db")
    first, second, other = (Sync(store, uri) for uri in (sqlite_uri, sqlite_uri, f"sqlite:///{other_uri}"))
    with first, second, other:
        assert first.sync()
        finish(store, plan.runs[1], {"dense/loss": 0.5})
        assert not second.sync()  # it waits
        assert second.reasons() == ["another process sends to this tracker"]
        assert len(runs_of(sqlite_uri)) == 2
        assert other.sync()
        assert first.sync()
        assert second.sync()  # there is nothing left, whoever sent it
        first.__exit__(None, None, None)
        finish(store, plan.runs[2], {"dense/loss": 0.5})
        assert second.sync()
    assert len(runs_of(sqlite_uri)) == 4


def test_the_lock_is_renewed_and_given_back(store):
    name = "mirror:x"
    lock, another = MirrorLock(store.index, name, ttl_s=3), MirrorLock(store.index, name, ttl_s=3)
    assert lock.acquire()
    until_prolonged(store.index, name, 3)
    assert not another.acquire()
    lock.release()
    assert another.acquire()
    another.release()


def test_the_name_of_a_tracker_has_no_password_and_no_place(store):
    assert tracker_key(store, "http://me:secret@host:5000/") == "http://host:5000"
    assert tracker_key(store, f"sqlite:///{store.root}/mlflow.db") == "sqlite:///mlflow.db"
    assert tracker_key(store, "sqlite:////elsewhere/mlflow.db") == "sqlite:////elsewhere/mlflow.db"
