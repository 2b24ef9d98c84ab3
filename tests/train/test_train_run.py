import json
import os

import pytest

from cope_sweep.train import Runtime, train_run
from tests.tiny import tiny_run


def test_a_run_from_start_to_result(store):
    run, events = tiny_run(), []
    assert train_run(run, store, Runtime(worker_id="here"), on_event=events.append) == "finished"
    folder = store.run(run.run_id)
    assert folder.status == "finished"
    result = folder.result
    assert result["facts"]["parameters"] == 936  # 48 embedding, 288 attention, 552 feed-forward, 48 norms
    assert result["facts"]["steps"] == 6
    assert result["facts"]["micro_batch"] == 4
    assert result["metrics"]["in_dist/token_error"] <= 100
    curve = folder.curve()
    assert [row["step"] for row in curve if "train/loss" in row] == [1, 6]
    assert [row["step"] for row in curve if "in_dist/loss" in row] == [3, 6]
    assert not folder.resume.exists()
    assert [events[0].status, events[-1].status] == ["running", "finished"]
    assert events[-1].metrics["in_dist/token_error"] == result["metrics"]["in_dist/token_error"]
    assert json.loads((folder.checkpoint / "config.json").read_text())["run_id"] == run.run_id


def test_a_finished_run_is_not_trained_again(store):
    run = tiny_run()
    train_run(run, store, Runtime())
    before = os.stat(store.run(run.run_id).path / "result.json").st_mtime_ns
    assert train_run(run, store, Runtime(), on_event=lambda event: pytest.fail("it trained")) == "finished"
    assert os.stat(store.run(run.run_id).path / "result.json").st_mtime_ns == before


def test_divergence_fails_the_run_with_its_traceback(store):
    run, events = tiny_run(**{"train.lr": 1e30, "train.clip": None, "train.steps": 40}), []
    assert train_run(run, store, Runtime(), on_event=events.append) == "failed"
    folder = store.run(run.run_id)
    assert folder.status == "failed"
    assert "lower train.lr" in folder.state["message"]
    assert "Traceback" in folder.state["traceback"]
    assert events[-1].status == "failed"
    assert events[-1].message == folder.state["message"]
    assert folder.result is None


def test_a_failed_run_can_be_tried_again(store, monkeypatch):
    run = tiny_run()
    with monkeypatch.context() as patch:
        patch.setattr("cope_sweep.train.trainer.next_token_loss", lambda *_: 1 / 0)
        assert train_run(run, store, Runtime()) == "failed"
    assert store.run(run.run_id).state["message"] == "ZeroDivisionError: division by zero"
    assert train_run(run, store, Runtime()) == "finished"


def test_a_run_that_another_process_trains_is_busy(store):
    run = tiny_run()
    with store.run(run.run_id).lock():
        assert train_run(run, store, Runtime()) == "busy"
    assert train_run(run, store, Runtime()) == "finished"
