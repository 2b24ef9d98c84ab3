"""A sweep that sends its runs to MLflow while it trains, and MLflow servers that are away, slow, or answer with errors."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from cope_sweep.store import Event
from cope_sweep.tracking.background import BackgroundLogger
from cope_sweep.tracking.sync import sync
from tests.helpers.finished_runs import finish, plan_of
from tests.helpers.processes import TIMEOUT_S, free_port, until
from tests.helpers.stub_server import Stub
from tests.helpers.sweeps import begin, end, end_sweep, write_sweep
from tests.tracking.trackers import TAG, client_of, history, lease, run_of, runs_of, sweep_of, synced

pytestmark = pytest.mark.slow


@pytest.fixture
def record_sweep(store):
    """A function that starts to send a sweep."""

    def start(record, uri):
        logger = BackgroundLogger(store, uri, record)
        logger.start()
        return logger

    return start


def report(logger, run, status="finished", **metrics):
    logger.report(Event(run_id=run.run_id, status=status, metrics=metrics))


def test_a_sweep_is_sent_while_it_runs_and_at_its_end(store, plan, sqlite_uri, record_sweep):
    record = write_sweep(store, plan)
    logger = record_sweep(record, sqlite_uri)
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    report(logger, plan.runs[0])
    folder = begin(store, plan.runs[1], {"step": 1, "train/loss": 2.0})
    report(logger, plan.runs[1], "running", loss=2.0)
    until(lambda: run_of(sqlite_uri, plan.runs[1]))
    until(lambda: run_of(sqlite_uri, plan.runs[0]))
    until(lambda: run_of(sqlite_uri, plan.runs[0]).tags.get(f"{TAG}status") == "finished")
    assert (run_of(sqlite_uri, plan.runs[1]).status, sweep_of(sqlite_uri, record).status) == ("running", "running")
    folder.log({"step": 2, "train/loss": 1.0})
    report(logger, plan.runs[1], "running", loss=1.0)
    until(lambda: len(history(sqlite_uri, run_of(sqlite_uri, plan.runs[1]), "train/loss")) == 2)
    for run in plan.runs[2:-1]:
        finish(store, run, {"dense/loss": 0.5})
        report(logger, run)
    folder.finish({"train/loss": 1.0}, {"steps": 2})
    end(store, folder)
    report(logger, plan.runs[1])
    lease(store, record, plan.runs[-1])
    finish(store, plan.runs[-1], {"dense/loss": 0.5})  # nobody reports its end
    record = end_sweep(store, record)
    calls = []
    assert logger.finish(lambda *call: calls.append(call), patience_s=TIMEOUT_S) == []
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    assert sweep_of(sqlite_uri, record).status == "finished"
    assert {run.status for run in runs_of(sqlite_uri)} == {"finished"}
    assert len(runs_of(sqlite_uri)) == 7
    assert synced(store, sqlite_uri) == 0


def test_ctrl_c_at_the_end_leaves_the_rest_to_the_next_sync(store, sqlite_uri, record_sweep):
    plan = plan_of(seeds=list(range(12)))
    record = write_sweep(store, plan)
    folder = begin(store, plan.runs[-1], {"step": 1, "train/loss": 2.0})
    logger = record_sweep(record, sqlite_uri)
    report(logger, plan.runs[-1], "running")
    until(lambda: run_of(sqlite_uri, plan.runs[-1]))
    for run in plan.runs[:-1]:
        finish(store, run, {"dense/loss": 0.5})
        report(logger, run)
    folder.log({"step": 2, "train/loss": 1.0})
    folder.finish({"train/loss": 1.0}, {"steps": 2})
    end(store, folder)
    end_sweep(store, record)
    interrupted = threading.Event()

    def on_sending(sent, total):
        if sent and not interrupted.is_set():
            interrupted.set()
            signal.raise_signal(signal.SIGINT)

    (error,) = logger.finish(on_sending, patience_s=TIMEOUT_S)

    assert f"cope-sweep sync --store {store.root}" in error
    assert len(runs_of(sqlite_uri, f"tags.`{TAG}status` = 'finished'")) < 37
    assert {run.status for run in runs_of(sqlite_uri)} == {"finished"}  # also of what was not sent
    synced(store, sqlite_uri)
    assert {run.status for run in runs_of(sqlite_uri)} == {"finished"}
    assert len(runs_of(sqlite_uri)) == 37
    assert [point.step for point in history(sqlite_uri, run_of(sqlite_uri, plan.runs[-1]), "train/loss")] == [1, 2]


SWEEP = """
import sys, time
from cope_sweep.store import Event, Store
from cope_sweep.tracking.background import BackgroundLogger

store, runs = Store(sys.argv[1]), sys.argv[4:]
logger = BackgroundLogger(store, sys.argv[3], store.sweep(sys.argv[2]))
logger.start()
for run_id in runs:
    logger.report(Event(run_id=run_id, status=store.index.statuses([run_id])[run_id]))
time.sleep(600)
"""


@pytest.mark.parametrize("uri", ["sqlite", pytest.param("server", marks=pytest.mark.thorough)], indirect=True)
def test_a_killed_sweep_leaves_neither_gaps_nor_duplicates(store, plan, uri, tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(textwrap.dedent(SWEEP))
    record = write_sweep(store, plan)
    for run in plan.runs[1:]:
        finish(store, run, {"dense/loss": 0.5})
    folder = begin(store, plan.runs[0], {"step": 1, "train/loss": 2.0})
    command = [sys.executable, str(script), str(store.root), record.sweep_id, uri, *(run.run_id for run in plan.runs)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    until(lambda: run_of(uri, plan.runs[3]))
    process.kill()
    process.wait()
    folder.set_state("interrupted")
    end(store, folder)
    end_sweep(store, record, "interrupted")
    synced(store, uri)
    parent = sweep_of(uri, record)
    assert parent.status == "killed"
    assert run_of(uri, plan.runs[0]).status == "scheduled"
    for run in plan.runs[1:]:
        tracked = run_of(uri, run)
        assert (tracked.status, len(tracked.models), tracked.tags["mlflow.parentRunId"]) == ("finished", 1, parent.id)
        assert [point.step for point in history(uri, tracked, "train/loss")] == [1, 6]


def test_an_unreachable_server_is_reported_with_a_command_that_works_later(store, plan, record_sweep):
    record = write_sweep(store, plan)
    address = f"127.0.0.1:{free_port()}"
    logger = record_sweep(record, f"http://me:secret@{address}")
    finish(store, plan.runs[0], {"dense/loss": 0.5})
    report(logger, plan.runs[0])
    end_sweep(store, record)
    (error,) = logger.finish()
    assert f"MLflow at http://***@{address}" in error
    assert "secret" not in error
    assert f"cope-sweep sync --store {store.root}" in error


def test_a_slow_server_is_noted_once_and_has_everything(store, plan, server_uri):
    """It needs longer for an answer than a request may take, then it is back."""
    record, notes = write_sweep(store, plan), []
    with Stub(server_uri) as stub:
        stub.status = 503
        logger = BackgroundLogger(store, stub.url, record, notes.append)
        logger.start()
        until(lambda: notes)
        for run in plan.runs[:3]:
            finish(store, run, {"dense/loss": 0.5})
            report(logger, run)
        end_sweep(store, record)
        until(lambda: stub.requests > 2)
        stub.status = None
        assert logger.finish(patience_s=TIMEOUT_S) == []
    assert len(notes) == 1
    assert {run_of(server_uri, run).status for run in plan.runs[:3]} == {"finished"}


def test_a_server_that_hangs_neither_stops_training_nor_holds_its_end(store, plan, server_uri, record_sweep):
    record = write_sweep(store, plan)
    with Stub(server_uri) as stub:
        stub.delay_s = 600
        logger = record_sweep(record, stub.url)
        until(lambda: stub.requests)
        begun_s = time.monotonic()
        for _ in range(10_000):
            report(logger, plan.runs[0], "running", loss=time.monotonic())
        assert time.monotonic() - begun_s < 1
        end_sweep(store, record)
        (error,) = logger.finish(patience_s=3.0)
        assert time.monotonic() - begun_s < 60  # 4 s on an idle machine; the server answers after 600
        assert "3 s" in error


@pytest.mark.parametrize(
    "fault", [*(pytest.param(each, marks=pytest.mark.thorough) for each in ("errors", "away")), "lost"]
)
def test_a_server_with_faults_has_everything_once_when_it_is_back(store, plan, server_uri, record_sweep, fault):
    """While a sweep trains; `lost`: requests are carried out, and the client is told that they failed."""
    record = write_sweep(store, plan)
    with Stub(server_uri) as stub:
        logger = record_sweep(record, stub.url)
        until(lambda: sweep_of(server_uri, record))
        stub.status = 500 if fault == "errors" else None
        stub.lose_every = 23 if fault == "lost" else 0
        if fault == "away":
            stub.__exit__()
        folder = begin(store, plan.runs[0], {"step": 1, "train/loss": 3.0})
        report(logger, plan.runs[0], "running")
        time.sleep(3)
        folder.log({"step": 2, "train/loss": 2.0})
        for run in plan.runs[1:]:
            finish(store, run, {"dense/loss": 0.5})
            report(logger, run)
        folder.finish({"train/loss": 2.0}, {"steps": 2})
        end(store, folder)
        end_sweep(store, record)
        errors = logger.finish(patience_s=TIMEOUT_S)
        assert fault == "lost" or errors
        if fault == "away":
            stub = Stub(server_uri, int(stub.url.rpartition(":")[2])).__enter__()
        stub.status = None
        assert sync(store, stub.url, timeout_s=TIMEOUT_S).left == 0
        if fault == "away":
            stub.__exit__()
    experiment = run_of(server_uri, plan.runs[0]).experiment
    client = client_of(server_uri)
    assert len(client.search_runs([experiment])) == 7
    assert sweep_of(server_uri, record).status == "finished"
    assert [point.step for point in history(server_uri, run_of(server_uri, plan.runs[0]), "train/loss")] == [1, 2]
    for run in plan.runs[1:]:
        tracked = run_of(server_uri, run)
        assert (tracked.status, len(tracked.models)) == ("finished", 1)
        assert [point.step for point in history(server_uri, tracked, "train/loss")] == [1, 6]
    assert len(client.search_logged_models([experiment])) == 5


SYNC = """
import sys
from cope_sweep.store import Store
from cope_sweep.tracking.sync import sync

print(sync(Store(sys.argv[1]), sys.argv[2], timeout_s=60).reasons)
"""


@pytest.mark.parametrize("uri", [pytest.param("sqlite", marks=pytest.mark.thorough), "server"], indirect=True)
@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_after_several_senders_at_once_the_next_sync_leaves_one_of_each(store, uri, tmp_path, number):
    plan = plan_of(f"copying-{number}-{time.time_ns()}", seeds=[time.time_ns() % 2**30, time.time_ns() % 2**30 + 1])
    record = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, {"dense/loss": 0.5})
    end_sweep(store, record)
    script = tmp_path / "sync.py"
    script.write_text(textwrap.dedent(SYNC))
    command = [sys.executable, str(script), str(store.root), uri]
    processes = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path.cwd())}) for _ in range(number)]
    assert [process.wait(timeout=280) for process in processes] == [0] * number
    synced(store, uri)
    parent = sweep_of(uri, record)
    experiment = client_of(uri).get_run(parent.id).info.experiment_id
    assert len(client_of(uri).search_runs([experiment])) == 7
    assert len(client_of(uri).search_logged_models([experiment])) == 6
    for run in plan.runs:
        tracked = run_of(uri, run)
        assert (tracked.status, tracked.tags["mlflow.parentRunId"]) == ("finished", parent.id)
        assert len(set(tracked.models)) == 1
        assert [point.step for point in history(uri, tracked, "train/loss")] == [1, 6]


def test_a_sync_leaves_out_what_a_living_sweep_trains(store, plan, sqlite_uri):
    record = write_sweep(store, plan)
    begin(store, plan.runs[0], {"step": 1, "train/loss": 2.0})
    other = plan_of("other", seeds=[5])
    ended = write_sweep(store, other)
    finish(store, other.runs[0], {"dense/loss": 0.5})
    end_sweep(store, ended)
    synced(store, sqlite_uri)
    assert run_of(sqlite_uri, plan.runs[0]) is None
    assert sweep_of(sqlite_uri, record) is None
    assert run_of(sqlite_uri, other.runs[0]).status == "finished"
