"""Reads back what a tracker has, for assertions."""

from typing import NamedTuple

import pytest

from cope_sweep.store import Lease, RunRecord
from cope_sweep.tracking.sync import sync

TAG = "cope_sweep."


class Dataset(NamedTuple):
    name: str
    digest: str
    context: str
    source: str


class Seen(NamedTuple):
    """A run of MLflow."""

    id: str
    experiment: str
    status: str
    """In lower case."""
    name: str
    tags: dict
    params: dict
    datasets: list
    models: list
    """Their ids."""


class Point(NamedTuple):
    step: int
    value: float
    timestamp_ms: int


def client_of(uri):
    """MLflow's own client. It is imported here, because the import takes seconds also when no test needs it."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def synced(store, uri):
    """A sync by a process of its own, which sends everything; how many runs and sweeps."""
    sent, left, reasons = sync(store, uri, timeout_s=0)
    assert (left, reasons) == (0, [])
    return sent


def runs_of(uri, condition=""):
    """The runs of all experiments, oldest first."""
    client = client_of(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    return [
        Seen(
            run.info.run_id,
            run.info.experiment_id,
            run.info.status.lower(),
            run.info.run_name,
            dict(run.data.tags),
            dict(run.data.params),
            [
                Dataset(each.dataset.name, each.dataset.digest, each.tags[0].value, each.dataset.source)
                for each in run.inputs.dataset_inputs
            ],
            [each.model_id for each in run.outputs.model_outputs] if run.outputs else [],
        )
        for run in client.search_runs(experiments, condition, order_by=["attributes.start_time ASC"])
    ]


def run_of(uri, run):
    """The only run of MLflow for a run; None if there is none."""
    return only(runs_of(uri, f"tags.`{TAG}run_id` = '{run.run_id}'"))


def sweep_of(uri, record):
    return only(runs_of(uri, f"tags.`{TAG}kind` = 'sweep' AND tags.`{TAG}sweep_id` = '{record.sweep_id}'"))


def only(found):
    assert len(found) <= 1
    return found[0] if found else None


def history(uri, run, key):
    """Every point of a metric, in order of steps."""
    metrics = client_of(uri).get_metric_history(run.id, key)
    return sorted(Point(each.step, each.value, each.timestamp) for each in metrics)


def artifacts(uri, run):
    """The names of its artifacts and folders, sorted."""
    return sorted(entry.path for entry in client_of(uri).list_artifacts(run.id))


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory):
    """An empty SQLite store of MLflow. Creating one takes seconds; tests copy it."""
    from cope_sweep.tracking.client import connect, write_log

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{path}")
    write_log(f"sqlite:///{path}")
    return path


def send(store, uri, *runs):
    """Bring MLflow up to date with some runs, also with those that are trained, as a sweep does."""
    from cope_sweep.tracking.mlflow import MLflowLogger

    logger = MLflowLogger(store, uri)
    for run in runs:
        logger.log_run(run.run_id)


def lease(store, record, run, ttl_s=100.0):
    """Lease a run to a sweep, which thereby trains it."""
    row = RunRecord.of(run.run_id, "running", run.model_dump(mode="json"))
    assert isinstance(store.index.acquire(row, record.sweep_id, ttl_s), Lease)
