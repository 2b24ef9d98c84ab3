"""The process that follows a sweep."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cope_sweep.record.follow import Follower
from cope_sweep.record.mlflow import MlflowTracking
from cope_sweep.record.translate import TAG
from tests.record.sweeps import end_sweep, write_sweep
from tests.results.ablations import finish, plan_of


@pytest.fixture
def plan():
    return plan_of()


def until(condition, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def sweep_of(tracking, record):
    return tracking.find({f"{TAG}kind": "sweep", f"{TAG}sweep_id": record["sweep_id"]})


def test_a_sweep_is_followed_while_it_runs_and_to_its_end(ledger, plan, sqlite_uri):
    record = write_sweep(ledger, plan)
    finish(ledger, plan.runs[0], {"dense/loss": 0.5})
    began = time.monotonic()
    follower = Follower.start(ledger, record["sweep_id"], sqlite_uri)
    assert time.monotonic() - began < 1
    tracking = MlflowTracking(sqlite_uri)
    try:
        until(lambda: tracking.find({f"{TAG}run_id": plan.runs[0].run_id}))
        # Ctrl-C in the terminal is for the sweep.
        follower.process.send_signal(signal.SIGINT)
        for run in plan.runs[1:]:
            finish(ledger, run, {"dense/loss": 0.5})
        end_sweep(ledger, record)
    finally:
        report = follower.finish(timeout_s=60)
    assert (report.runs_written, report.errors) == (6, [])
    assert follower.process.returncode == 0
    parent = sweep_of(tracking, record)
    assert parent.standing == "finished"
    assert parent.tags[f"{TAG}runs.finished"] == "6"
    log = (ledger.root / "logs" / f"mlflow-{record['sweep_id']}.log").read_text()
    assert "6 runs written, 0 errors" in log
    assert "alembic" not in log
    assert "Warning" not in log


SWEEP = """
import sys, time
from cope_sweep.record import Ledger
from cope_sweep.record.follow import Follower

follower = Follower.start(Ledger(sys.argv[1]), sys.argv[2], sys.argv[3])
print(follower.process.pid, flush=True)
time.sleep(600)
"""


def test_a_sweep_that_is_killed_is_carried_to_where_it_came(ledger, plan, sqlite_uri, tmp_path):
    record = write_sweep(ledger, plan)
    finish(ledger, plan.runs[0], {"dense/loss": 0.5})
    script = tmp_path / "sweep.py"
    script.write_text(textwrap.dedent(SWEEP))
    command = [sys.executable, str(script), str(ledger.root), record["sweep_id"], sqlite_uri]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    sweep = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    int(sweep.stdout.readline())
    finish(ledger, plan.runs[1], {"dense/loss": 0.5})
    sweep.kill()
    sweep.wait()
    sweep.stdout.close()
    log = ledger.root / "logs" / f"mlflow-{record['sweep_id']}.log"
    until(lambda: "runs written" in log.read_text())
    tracking = MlflowTracking(sqlite_uri)
    assert sweep_of(tracking, record).standing == "interrupted"
    for run in plan.runs[:2]:
        assert tracking.find({f"{TAG}run_id": run.run_id}).standing == "finished"


def test_a_server_that_is_gone_harms_nothing_and_says_the_way_out(ledger, plan, sqlite_uri):
    record = write_sweep(ledger, plan)
    finish(ledger, plan.runs[0], {"dense/loss": 0.5})
    follower = Follower.start(ledger, record["sweep_id"], "http://me:secret@127.0.0.1:9")
    end_sweep(ledger, record)
    report = follower.finish(timeout_s=8)
    assert report.runs_written == 0
    (error,) = report.errors
    assert "http://me:***@127.0.0.1:9" in error
    assert "secret" not in error
    # The way out is a command; it works once there is a tracker.
    command = error.split("`")[1].split()
    assert command[:4] == ["python", "-m", "cope_sweep.record.follow", "--once"]
    command = [sys.executable, *command[1:-1], sqlite_uri]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"runs_written": 1, "errors": []}
    assert sweep_of(MlflowTracking(sqlite_uri), record).standing == "finished"


def test_a_follower_that_dies_is_reported(ledger, plan, sqlite_uri):
    record = write_sweep(ledger, plan)
    follower = Follower.start(ledger, record["sweep_id"], sqlite_uri)
    follower.process.kill()
    (error,) = follower.finish(timeout_s=10).errors
    assert "died (exit code -9)" in error
    assert "cope_sweep.record.follow --once" in error
