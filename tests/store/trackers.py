"""Reads back what a tracker has, for assertions."""

from cope_sweep.tracking.translate import Point
from tests.store.memory import MemoryTracking


def client_of(uri):
    """MLflow's own client. It is imported here, because the import takes seconds also when no test needs it."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def history(tracking, run, key):
    """Every point of a metric, in order of steps."""
    if isinstance(tracking, MemoryTracking):
        points = [point for point in tracking.points[run.id] if point.key == key]
    else:
        metrics = client_of(tracking.uri).get_metric_history(run.id, key.replace("@", " at "))
        points = [Point(key, metric.value, metric.step, metric.timestamp) for metric in metrics]
    return sorted(points, key=lambda point: point.step)
