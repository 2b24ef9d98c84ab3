"""`cope-sweep delete` with MLflow."""

import json

from typer.testing import CliRunner

from cope_sweep.cli.application import app
from cope_sweep.tracking.page import mlflow_experiment_page
from tests.helpers.finished_runs import finish
from tests.helpers.processes import free_port
from tests.helpers.sweeps import end_sweep, write_sweep
from tests.tracking.trackers import client_of, run_of, runs_of, synced


def delete(store, *words):
    return CliRunner().invoke(app, ["delete", *words, "--yes", "--json", "--store", store.location])


def test_a_run_is_deleted_from_mlflow_and_another_one_when_it_is_trained_again(store, plan, uri, monkeypatch):
    record = write_sweep(store, plan)
    keep, drop, trashed = plan.runs[:3]
    for run in (keep, drop, trashed):
        finish(store, run, {"in_dist/token_error": 1.0, "dense/loss": 0.5})
    end_sweep(store, record)
    synced(store, uri)
    first = run_of(uri, drop)
    client_of(uri).delete_run(run_of(uri, trashed).id)  # by a person, in MLflow's pages

    refused = delete(store, drop.run_id, "--mlflow", f"http://127.0.0.1:{free_port()}")
    assert (refused.exit_code, json.loads(refused.stdout)["error"]["code"]) == (2, "no_server")
    assert store.status(drop.run_id) == "finished"

    done = delete(store, drop.run_id, trashed.run_id, "--mlflow", uri)
    assert json.loads(done.stdout) == {"deleted": [drop.run_id, trashed.run_id], "left": []}
    assert run_of(uri, drop) is None
    assert run_of(uri, keep) is not None
    assert client_of(uri).search_logged_models([first.experiment], f"source_run_id = '{first.id}'") == []
    assert store.status(drop.run_id) == "pending"

    for run in (drop, trashed):
        finish(store, run, {"in_dist/token_error": 2.0, "dense/loss": 0.5})
        synced(store, uri)
        assert run_of(uri, run).id != first.id
    assert len(runs_of(uri, f"tags.`cope_sweep.run_id` = '{drop.run_id}'")) == 1

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    page = mlflow_experiment_page(store, plan.name)
    shown = f"{uri}/#/experiments/{first.experiment}/runs?workflowType=machine_learning"
    assert page == (shown if uri.startswith("http") else None)
    assert mlflow_experiment_page(store, "no such ablation") is None


def test_runs_that_were_never_sent_are_deleted_without_mlflow(store, plan):
    finish(store, plan.runs[0], {"in_dist/token_error": 1.0})
    assert delete(store, plan.runs[0].run_id).exit_code == 0
    assert not (store.root / "mlflow.db").exists()


def test_where_mlflow_dies_between_runs_the_error_says_which_are_left(store, plan, sqlite_uri, monkeypatch):
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 1.0})
    first, second, third = (run.run_id for run in plan.runs[:3])
    delete_run = store.delete_run

    def delete_and_die(self, run_id):
        delete_run(run_id)
        (store.root / "mlflow.db").write_bytes(b"no database")

    monkeypatch.setattr(type(store), "delete_run", delete_and_die)
    refused = delete(store, first, second, third)
    error = json.loads(refused.stdout)["error"]
    assert (refused.exit_code, error["data"]["deleted"], error["data"]["left"]) == (2, [first], [second, third])
    assert [store.status(run_id) for run_id in (first, second)] == ["pending", "finished"]
