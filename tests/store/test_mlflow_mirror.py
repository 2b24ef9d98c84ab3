"""The process that copies a sweep to MLflow."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cope_sweep.store.mlflow import MlflowTracking
from cope_sweep.store.mlflow_mirror import MlflowMirror
from cope_sweep.store.translate import TAG
from tests.results.ablations import finish, plan_of
from tests.store.sweeps import end_sweep, write_sweep
from tests.sweep.ports import free_port

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
"""Importing mlflow takes 4 s on an idle machine and minutes on a busy one."""


@pytest.fixture
def plan():
    return plan_of()


def until(condition, timeout_s=TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def sweep_of(tracking, record):
    return tracking.find({f"{TAG}kind": "sweep", f"{TAG}sweep_id": record["sweep_id"]})


def test_a_sweep_is_copied_while_it_runs_and_at_its_end(store, plan, sqlite_uri):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    mirror = MlflowMirror.start(store, record["sweep_id"], sqlite_uri)
    tracking = MlflowTracking(sqlite_uri)
    try:
        until(lambda: tracking.find({f"{TAG}run_id": plan.runs[0].run_id}))
        # The mirror ignores Ctrl-C.
        mirror.process.send_signal(signal.SIGINT)
        for run in plan.runs[1:]:
            finish(store, run, {"dense/loss": 0.5})
        end_sweep(store, record)
    finally:
        report = mirror.finish(timeout_s=TIMEOUT_S)
    assert (report.runs_written, report.errors) == (6, [])
    assert mirror.process.returncode == 0
    parent = sweep_of(tracking, record)
    assert parent.status == "finished"
    assert parent.tags[f"{TAG}runs.finished"] == "6"
    log = (store.root / "logs" / f"mlflow-{record['sweep_id']}.log").read_text()
    assert "6 runs written, 0 errors" in log
    assert "alembic" not in log
    assert "Warning" not in log


SWEEP = """
import sys, time
from cope_sweep.store import Store
from cope_sweep.store.mlflow_mirror import MlflowMirror

mirror = MlflowMirror.start(Store(sys.argv[1]), sys.argv[2], sys.argv[3])
print(mirror.process.pid, flush=True)
time.sleep(600)
"""


def test_the_state_of_a_killed_sweep_is_copied(store, plan, sqlite_uri, tmp_path):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    script = tmp_path / "sweep.py"
    script.write_text(textwrap.dedent(SWEEP))
    command = [sys.executable, str(script), str(store.root), record["sweep_id"], sqlite_uri]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    sweep = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    int(sweep.stdout.readline())
    finish(store, plan.runs[1], {"dense/loss": 0.5})
    sweep.kill()
    sweep.wait()
    sweep.stdout.close()
    log = store.root / "logs" / f"mlflow-{record['sweep_id']}.log"
    until(lambda: "runs written" in log.read_text())
    tracking = MlflowTracking(sqlite_uri)
    assert sweep_of(tracking, record).status == "interrupted"
    for run in plan.runs[:2]:
        assert tracking.find({f"{TAG}run_id": run.run_id}).status == "finished"


def test_an_unreachable_server_is_reported_with_a_command_that_works_later(store, plan, sqlite_uri):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    address = f"127.0.0.1:{free_port()}"
    mirror = MlflowMirror.start(store, record["sweep_id"], f"http://me:secret@{address}")
    end_sweep(store, record)
    report = mirror.finish(TIMEOUT_S)
    assert report.runs_written == 0
    (error,) = report.errors
    assert f"MLflow at http://me:***@{address} could not be opened" in error
    assert "secret" not in error
    # The command works once there is a tracker.
    command = error.split("`")[1].split()
    assert command[:4] == ["python", "-m", "cope_sweep.store.mlflow_mirror", "--once"]
    command = [sys.executable, *command[1:-1], sqlite_uri]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"runs_written": 1, "errors": []}
    assert sweep_of(MlflowTracking(sqlite_uri), record).status == "finished"


def test_a_mirror_that_takes_too_long_is_ended_and_reported(store, plan, sqlite_uri):
    record = write_sweep(store, plan)
    mirror = MlflowMirror.start(store, record["sweep_id"], sqlite_uri)
    mirror.process.send_signal(signal.SIGSTOP)
    (error,) = mirror.finish(timeout_s=0.0).errors
    assert "MLflow took longer than 0 s" in error
    assert "cope_sweep.store.mlflow_mirror --once" in error
    assert mirror.process.returncode == -signal.SIGKILL


def test_a_mirror_process_that_dies_is_reported(store, plan, sqlite_uri):
    record = write_sweep(store, plan)
    mirror = MlflowMirror.start(store, record["sweep_id"], sqlite_uri)
    mirror.process.kill()
    (error,) = mirror.finish(TIMEOUT_S).errors
    assert "died (exit code -9)" in error
    assert "cope_sweep.store.mlflow_mirror --once" in error
