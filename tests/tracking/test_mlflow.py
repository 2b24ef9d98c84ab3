"""MLflow as a tracker: its stores, its client and its server."""

import json
import multiprocessing
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from cope_sweep.inference import Predictor
from cope_sweep.store import Store
from cope_sweep.tracking.sync import sync
from cope_sweep.tracking.uri import TrackingError, resolve_uri
from cope_sweep.train import Runtime, train_run
from tests.helpers.errors import raises
from tests.helpers.finished_runs import fail, finish, plan_of
from tests.helpers.sweeps import end, end_sweep, write_sweep
from tests.tracking.trackers import TAG, client_of, run_of, runs_of, sweep_of, synced

pytestmark = pytest.mark.slow
METRICS = {"in_dist/token_error": 25.0}
TOKENS = np.array([[3, 1, 2, 2], [0, 1, 1, 3]])


def connect(uri):
    """It is imported here, because importing mlflow takes seconds also when no test needs it."""
    from cope_sweep.tracking import client

    return client.connect(uri)


def open_store(queue):
    try:
        connect("sqlite:///own.db").create_run("0")
        queue.put("opened")
    except BaseException as error:
        queue.put(repr(error))


KILLED = """
import os, sys
from cope_sweep.tracking.uri import import_mlflow

import_mlflow()
from cope_sweep.tracking import client

client.upgrade.main = lambda words, **_: (open(words[0].removeprefix("sqlite:///"), "w").write("x"), os._exit(9))
client.connect(sys.argv[1])
"""


@pytest.mark.thorough
def test_a_process_that_was_killed_while_it_created_a_store_does_no_harm(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert subprocess.run([sys.executable, "-c", KILLED, uri], cwd=Path.cwd(), check=False).returncode == 9
    assert not (tmp_path / "mlflow.db").exists()
    connect(uri).create_run("0")
    assert not (tmp_path / "mlflow.db.new").exists()


def test_several_processes_can_create_a_store_at_once_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forks = multiprocessing.get_context("fork")
    queue = forks.Queue()
    processes = [forks.Process(target=open_store, args=(queue,)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=240) for _ in processes] == ["opened"] * 4
    for process in processes:
        process.join()
    connect("sqlite:///own.db").create_run("0")
    assert (tmp_path / "own.db-wal").exists()


def test_mlflow_client_reads_a_sweep(store, sqlite_uri):
    plan = plan_of()
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.25})
    fail(store, plan.runs[1])
    record = end_sweep(store, record, "failed")
    synced(store, sqlite_uri)
    client, name = client_of(sqlite_uri), sweep_of(sqlite_uri, record).name
    experiment = client.get_experiment_by_name("copying")
    assert "CoPE counts tokens by their content." in experiment.tags["mlflow.note.content"]
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {
        name: "FAILED",
        "CoPE · seed 0": "FINISHED",
        "a_b <c> · seed 0": "FAILED",
    }
    parent = next(run for run in runs if run.info.run_name == name)
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert len(children) == 2
    folder = store.run(plan.runs[0].run_id)
    done = next(run for run in children if run.info.status == "FINISHED")
    assert done.info.start_time == folder.spec["created_ms"]
    # The index keeps seconds as a float; a millisecond is lost where it is rounded down.
    assert abs(done.info.end_time - (folder.path / "result.json").stat().st_mtime * 1000) <= 50  # another clock reading
    assert parent.info.end_time == record.ended_ms
    assert done.data.metrics["dense/loss"] == 0.25
    failed = next(run for run in children if run.info.status == "FAILED")
    path = client.download_artifacts(failed.info.run_id, "error.txt")
    assert "Diverged" in Path(path).read_text()
    (kept,) = store.root.glob("mlartifacts/copying/models/*/artifacts/model.safetensors")
    assert kept.read_bytes() == (folder.checkpoint / "model.safetensors").read_bytes()


def test_an_expert_finds_data_models_durations_and_times(store, sqlite_uri):
    plan = plan_of()
    record = write_sweep(store, plan)
    for run in plan.rows[0].runs:
        finish(store, run, {"in_dist/loss": 0.25})
    end_sweep(store, record)
    synced(store, sqlite_uri)
    client = client_of(sqlite_uri)
    experiment = client.get_experiment_by_name("copying")
    ids = [experiment.experiment_id]
    # The search box of the page, and the models' tab.
    for condition in (
        f"tags.`{TAG}kind` = 'run' AND dataset.name = 'selective_copy/in_dist'",
        f"tags.`{TAG}kind` = 'run' AND dataset.context = 'train'",
        f"tags.`{TAG}row` = 'CoPE'",
        f"tags.`{TAG}device` = 'cpu' AND metrics.`system/parameters` > 1000",
    ):
        assert len(client.search_runs(ids, condition)) == 2, condition
    runs = {run.info.run_id: run for run in client.search_runs(ids, f"tags.`{TAG}kind` = 'run'")}
    models = client.search_logged_models(ids, "metrics.`in_dist/loss` < 0.5 AND params.`model.dim` = '8'")
    assert {model.source_run_id for model in models} == set(runs)
    for model in models:
        run = runs[model.source_run_id]
        assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
        assert {metric.key: metric.dataset_name for metric in model.metrics} == {
            "in_dist/loss": "selective_copy/in_dist", "train/loss": "selective_copy/train", "system/parameters": None,
        }  # fmt: skip
        assert run.info.start_time <= run.info.end_time
        for key in ("train/loss", "in_dist/loss", "system/parameters"):
            for point in client.get_metric_history(run.info.run_id, key):
                assert run.info.start_time <= point.timestamp <= run.info.end_time


def test_the_next_sync_removes_duplicates_and_keeps_the_oldest(store, plan, uri):
    """Two processes sent the sweep at the same moment; the second one's runs are below its own parent."""
    record = write_sweep(store, plan)
    for run in plan.runs[:3]:
        finish(store, run, METRICS)
    end_sweep(store, record)
    synced(store, uri)
    client, before = client_of(uri), runs_of(uri, f"tags.`{TAG}sweep_id` = '{record.sweep_id}'")
    parent, child = sweep_of(uri, record), run_of(uri, plan.runs[0])
    for run in (parent, child):
        client.create_run(run.experiment, tags=run.tags, run_name=run.name)
    second = client.create_run(parent.experiment, tags={f"{TAG}kind": "x"})
    client.set_tag(run_of(uri, plan.runs[1]).id, "mlflow.parentRunId", second.info.run_id)
    assert sync(store, uri, dry_run=True).left == 3
    assert synced(store, uri) == 3
    assert synced(store, uri) == 0
    after = runs_of(uri, f"tags.`{TAG}sweep_id` = '{record.sweep_id}'")
    assert {run.id: run.tags for run in after} == {run.id: run.tags for run in before}
    assert len(after) == 1 + 3


def test_a_run_with_two_models_is_sent_again(store, sqlite_uri):
    from mlflow.entities import LoggedModelOutput

    plan = plan_of()
    finish(store, plan.runs[0], METRICS)
    synced(store, sqlite_uri)
    client, run = client_of(sqlite_uri), run_of(sqlite_uri, plan.runs[0])
    model = client.create_logged_model(run.experiment, source_run_id=run.id)
    client.log_outputs(run.id, [LoggedModelOutput(model.model_id, 1)])
    assert synced(store, sqlite_uri) == 1
    run = run_of(sqlite_uri, plan.runs[0])
    assert [each.model_id for each in client.search_logged_models([run.experiment])] == run.models
    assert synced(store, sqlite_uri) == 0


def test_nothing_appears_beside_a_store_whose_name_has_other_characters(tmp_path):
    store = Store(tmp_path / "it's 2 (ü) #1", create=True)
    finish(store, plan_of().runs[0], METRICS)
    synced(store, resolve_uri(store))
    assert [path.name for path in tmp_path.iterdir()] == ["it's 2 (ü) #1"]
    assert len(models(resolve_uri(store))) == 1


def test_a_store_is_one_file_after_a_sync(store, sqlite_uri):
    finish(store, plan_of().runs[0], METRICS)
    connect(sqlite_uri).create_run("0")
    wal = store.root / "mlflow.db-wal"
    assert wal.stat().st_size > 0
    synced(store, sqlite_uri)
    assert not wal.exists() or wal.stat().st_size == 0


def test_an_experiment_in_the_trash_is_an_error(store, sqlite_uri):
    from cope_sweep.tracking.mlflow import MLflowLogger

    plan = plan_of()
    record = write_sweep(store, plan)
    synced(store, sqlite_uri)
    MLflowLogger(store, sqlite_uri).log_sweep(record.sweep_id)
    experiment = sweep_of(sqlite_uri, record).experiment
    client_of(sqlite_uri).delete_experiment(experiment)
    with raises("tracking_failed") as caught:
        MLflowLogger(store, sqlite_uri).log_sweep(write_sweep(store, plan, sweep_id="20260101-000000-bb").sweep_id)
    assert f"experiment {experiment} must be in the 'active' state" in str(caught.value)


def test_a_server_serves_a_sqlite_store_and_its_artifacts_from_any_directory(store, served_database, server_uri):
    """Like `mlflow ui --backend-store-uri sqlite:///…`, started in another directory; the requests are its page's."""
    plan = plan_of("shown", seeds=[2**30])
    write_sweep(store, plan)
    finish(store, plan.runs[0], {"dense/loss": 0.25})
    uri = f"sqlite:///{served_database}"
    synced(store, uri)
    run = run_of(uri, plan.runs[0])

    def get(path):
        with urllib.request.urlopen(f"{server_uri}/{path}", timeout=30) as response:
            return response.read()

    (model,) = run.models
    listed = json.loads(get(f"ajax-api/2.0/mlflow/logged-models/{model}/artifacts/directories"))
    assert {"config.json", "model.safetensors"} <= {file["path"] for file in listed["files"]}
    kept = get(f"ajax-api/2.0/mlflow/logged-models/{model}/artifacts/files?artifact_file_path=model.safetensors")
    assert kept == b"weights"
    shown = json.loads(get(f"ajax-api/2.0/mlflow/runs/get?run_id={run.id}"))["run"]
    assert shown["info"]["run_name"] == f"CoPE · seed {2**30}"
    assert {metric["key"]: metric["value"] for metric in shown["data"]["metrics"]}["dense/loss"] == 0.25


# -- the files by which MLflow knows what a model is and how to load it, with a real checkpoint ----------------------


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.thorough), "server"])
def uri(request, monkeypatch):
    """A database and a real server; MLflow's own functions find it in the environment."""
    uri = request.getfixturevalue(f"{request.param}_uri")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def trained(store):
    plan = plan_of(seeds=[secrets.randbelow(2**30)])  # all tests share the server
    write_sweep(store, plan)
    assert train_run(plan.runs[0], store.run(plan.runs[0].run_id), Runtime()) == "finished"
    end(store, store.run(plan.runs[0].run_id))
    return store.run(plan.runs[0].run_id)


def sent_model(store, uri, folder):
    """Send the store; the run's model in MLflow."""
    synced(store, uri)
    (model_id,) = run_of(uri, folder).models
    return client_of(uri).get_logged_model(model_id)


def files_of(model):
    import mlflow

    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{model.model_id}"))
    names = {path.name for path in folder.iterdir()} - {"registered_model_meta"}  # MLflow's own note of a download
    return {name: (folder / name).read_bytes() for name in names}


def test_mlflow_reads_and_loads_a_model(store, uri, trained):
    import mlflow

    model = sent_model(store, uri, trained)
    info = mlflow.models.get_model_info(f"models:/{model.model_id}")
    assert (info.model_id, info.run_id, info.model_uuid) == (model.model_id, model.source_run_id, model.model_id)
    assert str(info.signature.inputs) == "[Tensor('int64', (-1, -1))]"
    assert set(info.flavors) == {"cope_sweep", "python_function"}
    kept = {path.name: path.read_bytes() for path in trained.checkpoint.iterdir()}
    assert info.flavors["cope_sweep"]["files"] == sorted(kept)
    found = files_of(model)
    assert {name: found[name] for name in kept} == kept
    assert set(found) - set(kept) == {"MLmodel", "requirements.txt"}

    loaded = mlflow.pyfunc.load_model(f"models:/{model.model_id}")
    own = Predictor.load(trained.checkpoint).log_probabilities(TOKENS)
    np.testing.assert_array_equal(loaded.predict(TOKENS), own)
    assert mlflow.models.Model.load(f"models:/{model.model_id}").model_size_bytes == sum(map(len, kept.values()))


def test_a_model_of_which_a_mirror_sent_a_part_becomes_whole(store, uri, trained, monkeypatch):
    """The process ends after the checkpoint was sent, and before the model is linked to its run."""
    import mlflow

    client = mlflow.MlflowClient

    def dies(*_):
        raise ConnectionError("the process ends here")

    with monkeypatch.context() as patched:
        patched.setattr(client, "finalize_logged_model", dies)
        assert "the process ends here" in " ".join(sync(store, uri, timeout_s=0).reasons)
    run = run_of(uri, trained)
    (half,) = client_of(uri).search_logged_models([run.experiment], f"source_run_id = '{run.id}'")
    before = files_of(half)
    model = sent_model(store, uri, trained)
    assert (model.model_id, str(model.status)) == (half.model_id, "READY")
    assert files_of(model) == before
    assert len(client_of(uri).search_logged_models([run.experiment], f"source_run_id = '{run.id}'")) == 1


def models(uri):
    """Place → files, of the models of all runs."""
    from mlflow.artifacts import list_artifacts

    client = client_of(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    found = client.search_logged_models(experiments)
    return {
        each.artifact_location: {file.path for file in list_artifacts(artifact_uri=each.artifact_location)}
        for each in found
    }


@pytest.mark.parametrize(
    "moves", [pytest.param(True, id="moved"), pytest.param(False, id="copied", marks=pytest.mark.thorough)]
)
def test_nothing_is_written_into_the_place_from_which_a_store_was_moved(tmp_path, moves):
    """Its name has characters that mean something in a URL. The database is made again, from the store."""
    plan, old, new = plan_of(), tmp_path / "o%20ld ?#store", tmp_path / "new" / "st%C3%BCre"
    store = Store(old, create=True)
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    end_sweep(store, record)
    synced(store, resolve_uri(store))
    client_of(resolve_uri(store)).create_experiment(
        "of a person", (tmp_path / "elsewhere" / "mlartifacts" / "1").as_uri()
    )
    (tmp_path / "link").symlink_to(old)
    linked = Store(tmp_path / "link")
    assert sync(linked, resolve_uri(linked)).left == 0  # the same place by another path
    before = models(resolve_uri(store))
    assert [place.startswith((old / "mlartifacts").as_uri()) for place in before] == [True]
    new.parent.mkdir()
    (shutil.move if moves else shutil.copytree)(old, new)

    store = Store(new)
    finish(store, plan.runs[1], METRICS)
    with raises("moved_store", file=str(new / "mlflow.db"), artifacts=str(old / "mlartifacts")) as caught:
        sync(store, resolve_uri(store))
    assert old.exists() != moves
    if not moves:
        assert models(resolve_uri(Store(old))) == before
    _, _, commands = str(caught.value).partition("make it again: ")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(commands, shell=True, check=True, env=os.environ | {"PATH": path})
    with sqlite3.connect(new / "mlflow.db") as database:  # MLflow's client here keeps the deleted one open
        places = [place for (place,) in database.execute("SELECT artifact_location FROM logged_models")]
    assert [place.startswith((new / "mlartifacts").as_uri()) for place in places] == [True] * 2
    files = {name.removeprefix("artifacts/") for name in next(iter(before.values()))}
    for folder in (new / "mlartifacts").glob("copying/models/*/artifacts"):
        assert {path.name for path in folder.iterdir()} == files


def logger_of(store, uri):
    from cope_sweep.tracking.mlflow import MLflowLogger

    return MLflowLogger(store, uri)


def calls_of(logger, monkeypatch, fails=""):
    """The calls of MLflow's client by their names, in order. The call `fails` raises an error, once."""
    calls, client = [], logger._client

    def watch(method):
        own = getattr(client, method)

        def call(*words, **options):
            calls.append(method)
            if method == fails and calls.count(method) == 1:
                raise OSError("the disk is full")
            return own(*words, **options)

        monkeypatch.setattr(client, method, call)

    for method in ("search_logged_models", "create_logged_model", "log_outputs"):
        watch(method)
    return calls


def test_models_are_looked_for_only_where_another_process_may_have_made_one(store, sqlite_uri, monkeypatch):
    plan = plan_of()
    for run in plan.runs[:2]:
        finish(store, run, METRICS)
    first, second = (run.run_id for run in plan.runs[:2])
    logger = logger_of(store, sqlite_uri)
    calls = calls_of(logger, monkeypatch, fails="log_outputs")
    with raises("tracking_failed"):
        logger.log_run(first)
    assert "search_logged_models" not in calls
    assert calls.count("create_logged_model") == 1
    logger.log_run(first)  # here, or in another process
    assert calls.count("search_logged_models") == 1
    assert calls.count("create_logged_model") == 1
    logger.log_run(second)
    assert calls.count("search_logged_models") == 1
    assert calls.count("create_logged_model") == 2
    assert [len(each.models) for each in runs_of(sqlite_uri)] == [1, 1]


def before(client, method, do, monkeypatch):
    """Have `do` happen once, before the next call of a method of MLflow's client."""
    own = getattr(client, method)

    def call(*words, **options):
        monkeypatch.setattr(client, method, own)
        do()
        return own(*words, **options)

    monkeypatch.setattr(client, method, call)


@pytest.mark.parametrize(
    "moment", ["create_logged_model", "log_model_artifacts", "finalize_logged_model", "log_outputs"]
)
def test_a_duplicate_that_another_process_discards_meanwhile_leaves_no_model(
    store, plan, sqlite_uri, moment, monkeypatch
):
    run = plan.runs[0]
    finish(store, run, METRICS)
    logger = logger_of(store, sqlite_uri)
    before(logger._client, moment, lambda: logger_of(store, sqlite_uri).delete_run(run.run_id), monkeypatch)
    with raises("tracking_failed"):
        logger.log_run(run.run_id)
    assert models(sqlite_uri) == {}


def test_a_model_that_is_made_while_its_run_is_discarded_is_deleted_too(store, plan, sqlite_uri, monkeypatch):
    run = plan.runs[0]
    finish(store, run, METRICS)
    logger = logger_of(store, sqlite_uri)
    logger.log_run(run.run_id, status_only=True)
    another = logger_of(store, sqlite_uri)

    def log_model():
        with suppress(TrackingError):
            logger.log_run(run.run_id)

    before(another._client, "delete_tag", log_model, monkeypatch)
    another.delete_run(run.run_id)
    assert models(sqlite_uri) == {}


def test_sqlite_waits_for_the_disk_at_checkpoints_only(tmp_path, fresh_database):
    """With a write-ahead log, at each commit otherwise. Other files of this process stay as they are."""
    import sqlalchemy

    for name, expected in (("mlflow.db", 1), ("other.db", 2)):
        path = tmp_path / name
        if name == "mlflow.db":
            shutil.copyfile(fresh_database, path)
            connect(f"sqlite:///{path}")
        engine = sqlalchemy.create_engine(f"sqlite:///{path}")
        with engine.connect() as connection:
            assert connection.execute(sqlalchemy.text("PRAGMA synchronous")).scalar() == expected
        engine.dispose()


def test_a_checkpoint_is_described_as_mlflow_writes_it(tmp_path):
    from types import SimpleNamespace

    from mlflow.models import Model

    from cope_sweep.tracking.model import described

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model = SimpleNamespace(
        creation_timestamp=1_700_000_000_000, artifact_location="file:///é", source_run_id="a", model_id="m-1"
    )
    with described(model, tmp_path) as folder:
        assert (folder / "MLmodel").read_text() == Model.load(str(folder)).to_yaml()
