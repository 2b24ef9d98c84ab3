"""A store in an object store, and MLflow: each machine has its own database."""

import shutil
from pathlib import Path

import pytest

from cope_sweep.tracking.sync import sync
from cope_sweep.train import Runtime, train_run
from tests.helpers.sweeps import begin, end
from tests.helpers.tiny import tiny_run
from tests.tracking.trackers import fresh_database, history, run_of, send, synced  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow
RUN = tiny_run(**{"train.steps": 12})


@pytest.fixture
def uri_of(fresh_database):  # noqa: F811
    """A function that makes the MLflow store of a machine, and returns its URI."""

    def made(store):
        shutil.copyfile(fresh_database, store.root / "mlflow.db")
        return f"sqlite:///{store.root}/mlflow.db"

    return made


def sent(store, uri):
    """Send a store as a process of its own; MLflow's run."""
    synced(store, uri)
    return run_of(uri, RUN)


def test_a_machine_that_trained_nothing_sends_runs_and_checkpoints_to_mlflow(on_machine, uri_of, monkeypatch):
    import mlflow

    first = on_machine("first")
    train_run(RUN, first.run(RUN.run_id), Runtime())
    end(first, first.run(RUN.run_id))
    second = on_machine("second")
    uri = uri_of(second)
    run = sent(second, uri)
    assert run.status == "finished"
    assert len(history(uri, run, "train/loss")) == len(
        [row for row in first.run(RUN.run_id).curve() if "train/loss" in row]
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (kept,) = run.models
    files = Path(mlflow.artifacts.download_artifacts(f"models:/{kept}"))
    for path in first.run(RUN.run_id).fetch_checkpoint().iterdir():
        assert (files / path.name).read_bytes() == path.read_bytes()
    assert mlflow.models.get_model_info(f"models:/{kept}").run_id == run.id
    # A SQLite database is one of a machine: another one has its own, which has received nothing.
    assert sync(second, uri, dry_run=True).left == 0
    first = on_machine("first")
    other = uri_of(first)
    assert sync(first, other, dry_run=True).left == 1
    assert sent(first, other).status == "finished"


def test_what_another_machine_logs_is_sent_while_it_trains(on_machine, uri_of):
    first = on_machine("first")
    begin(first, RUN, {"step": 1, "train/loss": 3.0}).set_state("interrupted")
    second, uri = on_machine("second"), uri_of(first)
    folder = begin(second, RUN)
    send(first, uri, RUN)
    folder.log({"step": 2, "train/loss": 2.0})
    folder._upload("curve.jsonl")
    send(first, uri, RUN)
    assert [p.step for p in history(uri, run_of(uri, RUN), "train/loss")] == [1, 2]


def test_a_run_whose_checkpoint_was_deleted_is_sent_without_one(on_machine, uri_of):
    first = on_machine("first")
    train_run(RUN, first.run(RUN.run_id), Runtime())
    end(first, first.run(RUN.run_id))
    objects, folder = first.objects, f"runs/{RUN.run_id}/checkpoint"
    for name in objects.names(folder):
        objects.delete(f"{folder}/{name}")
    second = on_machine("second")
    run = sent(second, uri_of(second))
    assert (run.status, run.models) == ("finished", [])
    assert not second.run(RUN.run_id).fetch_checkpoint().exists()
