"""MLflow as a tracker: its stores, its client and its server."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.request
from pathlib import Path

import pytest

from cope_sweep.store.mlflow import MlflowTracking
from cope_sweep.store.tracker_sync import TrackerSync
from cope_sweep.store.tracking import TrackingError
from cope_sweep.store.translate import TAG
from tests.results.ablations import fail, finish, plan_of
from tests.store.sweeps import end_sweep, write_sweep
from tests.sweep.ports import free_port

pytestmark = pytest.mark.slow


def client_of(uri):
    """MLflow's own client. It is imported here, because the import takes seconds also when no test of this file runs."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def open_store(path, queue):
    try:
        MlflowTracking(f"sqlite:///{path}").create("x", "y", tags={}, started_ms=1)
        queue.put("opened")
    except BaseException as error:
        queue.put(repr(error))


def test_several_processes_can_create_a_store_at_once(tmp_path):
    forks = multiprocessing.get_context("fork")
    queue = forks.Queue()
    processes = [forks.Process(target=open_store, args=(tmp_path / "mlflow.db", queue)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=240) for _ in processes] == ["opened"] * 4
    for process in processes:
        process.join()


def test_mlflow_client_reads_a_sweep(store, sqlite_uri):
    plan = plan_of()
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.25})
    fail(store, plan.runs[1])
    record = end_sweep(store, record, "failed")
    TrackerSync(store, record["sweep_id"], MlflowTracking(sqlite_uri)).sync()
    client = client_of(sqlite_uri)
    experiment = client.get_experiment_by_name("copying")
    assert "CoPE counts tokens by their content." in experiment.tags["mlflow.note.content"]
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {
        record["sweep_id"]: "FAILED",
        "CoPE · seed 0": "FINISHED",
        "a_b <c> · seed 0": "FAILED",
    }
    parent = next(run for run in runs if run.info.run_name == record["sweep_id"])
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert len(children) == 2
    folder = store.run(plan.runs[0].run_id)
    done = next(run for run in children if run.info.status == "FINISHED")
    assert done.info.start_time == folder.spec["created_ms"]
    assert done.info.end_time == int((folder.path / "result.json").stat().st_mtime * 1000)
    assert parent.info.end_time == record["ended_ms"]
    assert done.data.metrics["dense/loss"] == 0.25
    failed = next(run for run in children if run.info.status == "FAILED")
    path = client.download_artifacts(failed.info.run_id, "error.txt")
    assert "Diverged" in Path(path).read_text()


def test_concurrent_sweeps_share_their_common_runs(store, sqlite_uri):
    """Two ablations with the same runs; four writers at once."""
    plans = [plan_of("one"), plan_of("two")]
    records = [write_sweep(store, plan) for plan in plans]
    for run in plans[0].runs:
        finish(store, run, {"dense/loss": 0.25})
    syncs = [TrackerSync(store, record["sweep_id"], MlflowTracking(sqlite_uri)) for record in records * 2]
    threads = [threading.Thread(target=sync.sync) for sync in syncs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sync.errors for sync in syncs] == [{}] * 4
    client = client_of(sqlite_uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert sorted(run.data.tags[f"{TAG}run_id"] for run in runs if f"{TAG}run_id" in run.data.tags) == sorted(
        run.run_id for run in plans[0].runs
    )
    assert len(runs) == 6 + 2
    for run in runs:
        if f"{TAG}run_id" in run.data.tags:
            assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 2


def test_a_checkpoint_is_a_hard_link_to_the_store(store, sqlite_uri):
    plan = plan_of()
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {})
    TrackerSync(store, record["sweep_id"], MlflowTracking(sqlite_uri)).sync()
    kept = next(store.root.glob("mlartifacts/copying/*/artifacts/checkpoint/model.safetensors"))
    assert kept.samefile(store.run(plan.runs[0].run_id).checkpoint / "model.safetensors")


def test_an_experiment_in_the_trash_is_an_error_with_a_command(sqlite_uri):
    tracking = MlflowTracking(sqlite_uri)
    run = tracking.create("copying", "x", tags={}, started_ms=1)
    client_of(sqlite_uri).delete_experiment(run.experiment)
    with pytest.raises(TrackingError, match=f"mlflow experiments restore -x {run.experiment}"):
        MlflowTracking(sqlite_uri).create("copying", "x", tags={}, started_ms=1)


def test_a_file_that_is_not_a_database_is_an_error(tmp_path):
    (tmp_path / "mlflow.db").write_text("these are notes, of some length")
    with pytest.raises(TrackingError, match="could not be opened"):
        MlflowTracking(f"sqlite:///{tmp_path}/mlflow.db")


def test_an_unreachable_server_is_an_error(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TrackingError, match=f"{url} could not be opened"):
        MlflowTracking(url)


def test_a_server_serves_a_sqlite_store_and_its_artifacts_from_any_directory(store, served_database, server_uri):
    """Like `mlflow ui --backend-store-uri sqlite:///…`, started in another directory; the requests are its page's."""
    plan = plan_of("shown", seeds=[2**30])
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.25})
    tracking = MlflowTracking(f"sqlite:///{served_database}")
    TrackerSync(store, record["sweep_id"], tracking).sync()
    run = tracking.find({f"{TAG}run_id": plan.runs[0].run_id})

    def get(path):
        with urllib.request.urlopen(f"{server_uri}/{path}", timeout=30) as response:
            return response.read()

    listed = json.loads(get(f"ajax-api/2.0/mlflow/artifacts/list?run_id={run.id}&path=checkpoint"))
    assert [file["path"] for file in listed["files"]] == ["checkpoint/config.json", "checkpoint/model.safetensors"]
    assert get(f"get-artifact?path=checkpoint/model.safetensors&run_uuid={run.id}") == b"weights"
    shown = json.loads(get(f"ajax-api/2.0/mlflow/runs/get?run_id={run.id}"))["run"]
    assert shown["info"]["run_name"] == f"CoPE · seed {2**30}"
    assert {metric["key"]: metric["value"] for metric in shown["data"]["metrics"]}["dense/loss"] == 0.25


TRAIN = """
import os, signal, sys
from cope_sweep.store import Store
from cope_sweep.train import Runtime, train_run
from tests.tiny import tiny_run

run = tiny_run(**{"train.steps": 60, "evaluate.every": 7})
calls = 0

def stop():
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return False

# A checkpoint is written after every step. The process is killed after a step was logged and before its checkpoint.
print(train_run(run, Store(sys.argv[1]), Runtime(checkpoint_every_s=0.0), should_stop=stop))
"""


def test_after_a_kill_and_a_resumption_no_point_is_missing_or_duplicated(store, sqlite_uri, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}

    def train(kill_at):
        command = [sys.executable, str(script), str(store.root), str(kill_at)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    plan = plan_of(
        base=plan_of().ablation.content.base | {"train": {"steps": 60, "batch": 4}, "evaluate": {
            "every": 7, "sequences": 8, "final_sequences": 8}},
        grid={}, seeds=[0],
    )  # fmt: skip
    record = write_sweep(store, plan)
    tracking = MlflowTracking(sqlite_uri)
    sync = TrackerSync(store, record["sweep_id"], tracking)
    # Step 42 was evaluated and logged, but is not in the checkpoint.
    assert train(42).returncode == -signal.SIGKILL
    folder = store.run(plan.runs[0].run_id)
    assert folder.curve()[-1]["step"] == 42
    sync.sync()
    run = tracking.find({f"{TAG}run_id": folder.run_id})
    assert run.status == "interrupted"
    assert run.latest["dense/loss"].step == 42
    done = train(-1)
    assert done.stdout.strip() == "finished", done.stderr
    assert folder.result["facts"]["resumed_from_step"] == 41
    sync.sync()
    # A second writer, without the state of the first.
    TrackerSync(store, record["sweep_id"], MlflowTracking(sqlite_uri)).sync()
    run = tracking.find({f"{TAG}run_id": folder.run_id})
    assert run.status == "finished"
    client = client_of(sqlite_uri)
    for key in ("train/loss", "train/lr", "dense/loss", "in_dist/token_error"):
        ours = [(row["step"], row[key]) for row in folder.curve() if key in row]
        theirs = [(metric.step, metric.value) for metric in client.get_metric_history(run.id, key)]
        assert sorted(theirs) == ours
        assert len(ours) >= 7
