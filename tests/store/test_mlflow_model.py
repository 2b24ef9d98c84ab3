"""The files by which MLflow knows what a model is and how to load it, with a real checkpoint."""

import secrets
from pathlib import Path

import numpy as np
import pytest

from cope_sweep.inference import Predictor
from cope_sweep.tracking.mlflow import MlflowTracking
from cope_sweep.tracking.sync import TrackerSync
from cope_sweep.tracking.translate import TAG
from cope_sweep.train import Runtime, train_run
from tests.read.tables.ablations import plan_of
from tests.store.sweeps import end, write_sweep
from tests.store.trackers import client_of

pytestmark = pytest.mark.slow
TOKENS = np.array([[3, 1, 2, 2], [0, 1, 1, 3]])


@pytest.fixture(params=["sqlite", "server"])
def uri(request, monkeypatch):
    """A database and a real server; MLflow's own functions find it in the environment."""
    uri = request.getfixturevalue(f"{request.param}_uri")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def trained(store):
    plan = plan_of(seeds=[secrets.randbelow(2**30)])  # all tests share the server
    write_sweep(store, plan)
    assert train_run(plan.runs[0], store, Runtime()) == "finished"
    end(store, plan.runs[0])
    return store.run(plan.runs[0].run_id)


def sent_model(store, uri, folder):
    """Send the store as a process of its own; the run's model in MLflow."""
    sync = TrackerSync(store, uri, MlflowTracking(uri))
    sync.sync()
    assert sync.errors == {}
    (model_id,) = MlflowTracking(uri).find({f"{TAG}run_id": folder.run_id}).models
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
        sync = TrackerSync(store, uri, MlflowTracking(uri))
        sync.sync()
        assert "the process ends here" in " ".join(sync.errors.values())
    run = MlflowTracking(uri).find({f"{TAG}run_id": trained.run_id})
    (half,) = client_of(uri).search_logged_models([run.experiment], f"source_run_id = '{run.id}'")
    before = files_of(half)
    model = sent_model(store, uri, trained)
    assert (model.model_id, str(model.status)) == (half.model_id, "READY")
    assert files_of(model) == before
    assert len(client_of(uri).search_logged_models([run.experiment], f"source_run_id = '{run.id}'")) == 1
