import math

import pytest

from cope_sweep.train import reporter as reporter_module
from cope_sweep.train.reporter import Diverged, RunReporter
from tests.tiny import tiny_run


@pytest.fixture
def run_folder(store):
    return store.run(tiny_run().run_id).begin(tiny_run(), "here")


def test_metrics_go_to_the_curve_and_the_latest_to_events(run_folder):
    events = []
    reporter = RunReporter(tiny_run(), "here", run_folder, events.append)
    reporter.start(2)
    reporter.step = 3
    reporter.log({"train/loss": 2.0})
    reporter.step = 4
    reporter.log({"train/loss": 1.5, "in_dist/loss": 1.0})
    reporter.report("finished")
    assert run_folder.curve() == [
        {"step": 3, "train/loss": 2.0},
        {"step": 4, "train/loss": 1.5, "in_dist/loss": 1.0},
    ]
    assert [event.status for event in events] == ["running", "finished"]
    last = events[-1]
    assert (last.run_id, last.step, last.steps, last.worker_id) == (tiny_run().run_id, 4, 6, "here")
    assert last.metrics == {"train/loss": 1.5, "in_dist/loss": 1.0}
    assert last.steps_per_s > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_raises_and_is_not_logged(run_folder, value):
    reporter = RunReporter(tiny_run(), "here", run_folder, lambda event: None)
    with pytest.raises(Diverged, match=r"train/loss is .* at step 0; lower train.lr, or set train.clip"):
        reporter.log({"train/loss": value})
    assert run_folder.curve() == []


def test_progress_events_are_throttled(monkeypatch):
    events = []
    reporter = RunReporter(tiny_run(), "here", None, events.append)
    monkeypatch.setattr(reporter_module, "REPORT_EVERY_S", math.inf)
    reporter.report_throttled()
    assert len(events) == 1  # the one at the start
    monkeypatch.setattr(reporter_module, "REPORT_EVERY_S", 0)
    reporter.report_throttled()
    assert len(events) == 2


def test_a_worker_without_a_folder_writes_nothing(store):
    reporter = RunReporter(tiny_run(), "rank 1", None, lambda event: None)
    reporter.log({"train/loss": 1.0})
    assert reporter.metrics == {"train/loss": 1.0}
    assert store.run_folders() == []
