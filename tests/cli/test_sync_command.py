"""The command `sync`."""

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from rich.console import Console

from cope_sweep.cli import progress
from cope_sweep.store import Store
from cope_sweep.tracking.sync import backlog_count
from tests.read.tables.ablations import plan_of
from tests.store.sweeps import end_sweep, finish, write_sweep
from tests.store.waiting import until
from tests.sweep.ports import free_port


@pytest.fixture
def store(shell):
    """A store of a sweep that MLflow has nothing of, where the command looks for it."""
    store = Store(shell.folder / "store", create=True)
    plan = plan_of()
    record = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, {"dense/loss": 0.5})
    end_sweep(store, record)
    return store


def test_a_dry_run_shows_how_much_would_be_sent(shell, store):
    out, _ = shell("sync", "--dry-run")
    assert f"7 runs and sweeps are not in MLflow at sqlite:///{store.root}/mlflow.db yet" in out
    assert shell.json("sync", "--dry-run")["left"] == 7
    assert not (store.root / "mlflow.db").exists()


def test_without_a_store_it_is_bad_input(shell):
    assert "no store in" in shell("sync", code=2)[1]
    assert not (shell.folder / "store").exists()


@pytest.mark.slow
def test_everything_is_sent_once(shell, store):
    out, _ = shell("sync")
    uri = f"sqlite:///{store.root}/mlflow.db"
    assert f"Sent 7 of 7 runs and sweeps to {uri}." in out
    assert shell.json("sync") == {"uri": uri, "sent": 0, "left": 0, "errors": []}
    assert f"MLflow at {uri} has everything." in shell("sync")[0]
    with sqlite3.connect(store.root / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone() == (7,)
        assert database.execute("SELECT count(*) FROM logged_models").fetchone() == (6,)


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_the_reason_why_something_is_left(shell, store):
    url = f"http://127.0.0.1:{free_port()}"
    out, err = shell("sync", "--mlflow", url, code=1)
    assert "Sent 0 of 7" in out
    assert f"not sent: no MLflow server answers at {url}" in err
    report = shell.json("sync", "--mlflow", url, code=1)
    assert report["left"] == 7
    assert shell("sync", "--mlflow", "ftp://x", code=2)


def points_and_inputs(store):
    with sqlite3.connect(store.root / "mlflow.db") as database:
        return [database.execute(f"SELECT count(*) FROM {table}").fetchone() for table in ("metrics", "inputs")]


@pytest.mark.thorough
def test_a_sync_that_is_killed_again_and_again_duplicates_nothing(shell, store):
    """Killed each time that a run more has begun to be sent, so in the middle of one."""
    uri = f"sqlite:///{store.root}/mlflow.db"
    shell("sync")
    counts = points_and_inputs(store)
    # MLflow's tables are made first, which takes seconds.
    (store.root / "mlflow.db").unlink()
    assert backlog_count(store, uri) == 7
    subprocess.run([sys.executable, "-m", "mlflow", "db", "upgrade", uri], check=True, capture_output=True)
    kills = 0
    while True:
        before = len(statuses(store))
        process = shell.start("sync", "--json")
        while process.poll() is None and len(statuses(store)) <= before:
            time.sleep(0.002)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    assert json.loads(process.communicate()[0])["left"] == 0
    assert kills >= 3
    with sqlite3.connect(store.root / "mlflow.db") as database:
        assert database.execute("SELECT count(*), count(DISTINCT name) FROM runs").fetchone() == (7, 7)
        assert database.execute("SELECT count(*) FROM logged_models").fetchone() == (6,)
    assert points_and_inputs(store) == counts


def statuses(store):
    with sqlite3.connect(store.root / "mlflow.db") as database:
        return dict(database.execute("SELECT name, status FROM runs").fetchall())


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running_and_the_next_sync_sends_the_rest_once(shell, store):
    more = plan_of("more", seeds=list(range(2, 30)))
    record = write_sweep(store, more)
    for run in more.runs:
        finish(store, run, {"dense/loss": 0.5})
    end_sweep(store, record)
    uri = f"sqlite:///{store.root}/mlflow.db"
    total = backlog_count(store, uri)
    process = shell.start("sync")
    until(lambda: backlog_count(store, uri) < total)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    left = backlog_count(store, uri)
    assert process.returncode == 130
    assert 0 < left < total
    assert f"Sent {total - left} of {total} runs and sweeps" in out
    assert f"interrupted with {left} runs and sweeps to send; the same command sends the rest" in err
    assert set(statuses(store).values()) == {"FINISHED"}
    assert shell.json("sync") == {"uri": uri, "sent": left, "left": 0, "errors": []}
    assert len(statuses(store)) == total
    with sqlite3.connect(store.root / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (total,)
        assert database.execute("SELECT count(*) FROM logged_models").fetchone() == (total - 2,)
        twice = "SELECT run_uuid, key, step FROM metrics GROUP BY 1, 2, 3 HAVING count(*) > 1"
        assert database.execute(twice).fetchall() == []


def test_the_bar_counts_on_a_terminal_and_is_a_line_now_and_then_in_a_pipe(monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    for terminal, expected in ((True, "2/3"), (False, "sending to MLflow: 2/3 runs and sweeps\n")):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with progress.sending_bar(console) as bar:
            for sent in range(3):
                bar(sent, 3)
        assert expected in console.file.getvalue()
        with progress.sending_bar(silent := Console(file=io.StringIO(), force_terminal=terminal), silent=True) as bar:
            bar(1, 2)
        assert silent.file.getvalue() == ""
