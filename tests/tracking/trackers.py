"""Reads back what a tracker has, for assertions."""

import pytest

from cope_sweep.tracking.mlflow import MlflowTracking
from cope_sweep.tracking.sync import TrackerSync, backlog_count
from cope_sweep.tracking.translate import TAG, Point
from tests.tracking.memory import MemoryTracking


def client_of(uri):
    """MLflow's own client. It is imported here, because the import takes seconds also when no test needs it."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def synced(store, tracking, uri="http://tracker"):
    """A sync by a process of its own, which sends everything."""
    sync = TrackerSync(store, uri, tracking)
    sync.sync()
    assert sync.errors == {}
    assert sync.left == 0
    assert backlog_count(store, uri) == 0
    return sync


def run_of(tracking, run):
    return tracking.find({f"{TAG}run_id": run.run_id})


def sweep_of(tracking, record):
    return tracking.find({f"{TAG}kind": "sweep", f"{TAG}sweep_id": record.sweep_id})


def history(tracking, run, key):
    """Every point of a metric, in order of steps."""
    if isinstance(tracking, MemoryTracking):
        points = [point for point in tracking.points[run.id] if point.key == key]
    else:
        metrics = client_of(tracking.uri).get_metric_history(run.id, key.replace("@", " at "))
        points = [Point(key, metric.value, metric.step, metric.timestamp) for metric in metrics]
    return sorted(points, key=lambda point: point.step)


def artifacts(tracking, run):
    """The names of its artifacts and folders, sorted."""
    if isinstance(tracking, MemoryTracking):
        return sorted({name.split("/")[0] for name in tracking.files[run.id]})
    return sorted(entry.path for entry in client_of(tracking.uri).list_artifacts(run.id))


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory):
    """An empty SQLite store of MLflow. Creating one takes seconds; tests copy it."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowTracking(f"sqlite:///{path}")
    return path
