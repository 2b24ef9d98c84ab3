"""Reads back what a tracker has, for assertions."""

from cope_sweep.store.tracking import MemoryTracking, Point


def history(tracking, run, key):
    """Every point of a metric, in order of steps."""
    if isinstance(tracking, MemoryTracking):
        points = [point for point in tracking.points[run.id] if point.key == key]
    else:
        from mlflow.tracking import MlflowClient

        metrics = MlflowClient(tracking_uri=tracking.uri).get_metric_history(run.id, key.replace("@", " at "))
        points = [Point(key, metric.value, metric.step, metric.timestamp) for metric in metrics]
    return sorted(points, key=lambda point: point.step)
