import json
import os
import re
import shutil
from unittest import mock

import pytest
import torch

from cope_sweep.kernels import dispatch, using
from cope_sweep.store import AttemptWriter
from cope_sweep.store.artifacts import LOG_FILE
from cope_sweep.train import Runtime, train_run
from tests.helpers.tiny import tiny_run


def test_a_run_from_start_to_result(store):
    run, events = tiny_run(), []
    assert train_run(run, store.run(run.run_id), Runtime(worker_id="here"), on_event=events.append) == "finished"
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
    assert (events[0].tokens_per_s, events[-1].tokens_per_s > 0) == (None, True)
    assert events[-1].metrics["in_dist/token_error"] == result["metrics"]["in_dist/token_error"]
    assert [(event.step, event.status) for event in events if event.evaluated] == [(3, "running"), (6, "finished")]
    assert result["facts"]["model_flops_per_s"] > result["facts"]["tokens_per_s"] > 0
    assert "mfu" not in result["facts"]
    assert json.loads((folder.checkpoint / "config.json").read_text())["run_id"] == run.run_id


@pytest.mark.parametrize(("lr", "own"), [(None, {}), (0.02, {"train/lr_matrices": [0.01, 0.02, 0.01]})])
def test_each_learning_rate_is_in_the_curve(store, lr, own):
    run = tiny_run(**{
        "train.optimizer": {"kind": "muon", "lr": lr}, "train.lr": 1e-3, "train.schedule": "linear", "train.warmup": 2,
        "train.steps": 4, "evaluate.every": 4,
    })  # fmt: skip
    with mock.patch("cope_sweep.train.loop.LOG_EVERY", 2):
        assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    curve = [row for row in store.run(run.run_id).curve() if "train/lr" in row]
    assert {name: [row[name] for row in curve] for name in curve[0] if name.startswith("train/lr")} == {
        "train/lr": pytest.approx([5e-4, 1e-3, 5e-4])
    } | {name: pytest.approx(values) for name, values in own.items()}


def test_a_finished_run_is_not_trained_again(store):
    run = tiny_run()
    train_run(run, store.run(run.run_id), Runtime())
    before = os.stat(store.run(run.run_id).path / "result.json").st_mtime_ns
    assert (
        train_run(run, store.run(run.run_id), Runtime(), on_event=lambda event: pytest.fail("it trained")) == "finished"
    )
    assert os.stat(store.run(run.run_id).path / "result.json").st_mtime_ns == before


def test_progress_events_are_throttled(store, monkeypatch):
    monkeypatch.setattr("cope_sweep.train.loop.REPORT_EVERY_S", 3600)
    events = []
    run = tiny_run(**{"evaluate.every": 100})
    train_run(run, store.run(run.run_id), Runtime(), on_event=events.append)
    assert [event.status for event in events] == ["running", "finished"]


def test_a_run_that_a_scheduler_stops_keeps_its_state(store):
    run, events = tiny_run(), []
    asked = iter([None, None, "stopped"])
    assert (
        train_run(run, store.run(run.run_id), Runtime(), on_event=events.append, should_stop=lambda: next(asked))
        == "stopped"
    )
    folder = store.run(run.run_id)
    assert (folder.status, events[-1].status, events[-1].step) == ("stopped", "stopped", 3)
    assert folder.resume.exists()
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    assert folder.result["facts"]["resumed_from_step"] == 3


def test_an_older_attempt_cannot_begin(store):
    run = tiny_run()
    store.run(run.run_id).begin(run, "newer", 3)
    assert train_run(run, store.run(run.run_id), Runtime(), attempt=2) == "fenced"
    assert store.run(run.run_id).state["worker_id"] == "newer"
    assert train_run(run, store.run(run.run_id), Runtime(), attempt=4) == "finished"


def test_an_attempt_ends_when_a_newer_one_begins(store):
    run = tiny_run()
    folder = store.run(run.run_id)

    def overtaken(event):
        if event.step == 3:
            folder.begin(run, "newer", 2)

    assert train_run(run, store.run(run.run_id), Runtime(), attempt=1, on_event=overtaken) == "fenced"
    assert folder.state == folder.state | {"status": "running", "worker_id": "newer", "attempt": 2}
    assert folder.result is None


def test_a_full_disk_fails_the_run_with_the_reason(store, monkeypatch, capsys):
    def full(*arguments, **facts):
        raise OSError(28, "No space left on device")

    run, events = tiny_run(), []
    with monkeypatch.context() as patch:
        patch.setattr(AttemptWriter, "log", full)
        patch.setattr(AttemptWriter, "set_state", full)
        assert train_run(run, store.run(run.run_id), Runtime(), on_event=events.append) == "failed"
    assert events[-1].message == "OSError: [Errno 28] No space left on device"
    assert "the failure cannot be recorded" in capsys.readouterr().err
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"


@pytest.mark.parametrize("attention", ["reference", "blocked", "native"])
def test_divergence_with_cope_names_the_step_in_every_implementation(store, attention):
    """Positions that are sums of NaN gates are no indices: the loss is what is reported."""
    run = tiny_run(
        **{"train.lr": 1e30, "train.clip": None, "train.steps": 40, "model.position": ["cope"], "evaluate.every": 99}
    )
    assert train_run(run, store.run(run.run_id), Runtime(attention=attention)) == "failed"
    message = store.run(run.run_id).state["message"]
    assert re.fullmatch(r"Diverged: train/loss is nan at step [2-9]; lower train.lr, or set train.clip", message)


@pytest.mark.parametrize(
    ("overrides", "outcome"), [({}, "finished"), ({"train.lr": 1e30, "train.clip": None}, "failed")]
)
def test_settings_of_the_process_are_those_of_before_when_a_run_has_ended(store, overrides, outcome):
    """A notebook that trains a run goes on with its own number of threads and implementation of attention."""
    run, during = tiny_run(**{"model.position": ["cope"], "train.steps": 8} | overrides), []

    def on_event(event):
        during.append((torch.get_num_threads(), dispatch._chosen.get()))

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with using("blocked"):
            runtime = Runtime(threads=2, attention="reference")
            assert train_run(run, store.run(run.run_id), runtime, on_event=on_event) == outcome
            assert (torch.get_num_threads(), dispatch._chosen.get()) == (3, "blocked")
    finally:
        torch.set_num_threads(before)
    assert during[0] == (2, "reference")


def log_of(store, run):
    return (store.run(run.run_id).path / LOG_FILE).read_text()


def test_a_run_warns_once_where_every_head_counts_beyond_the_last_embedding(store):
    run, events = tiny_run(**{"model.position": [{"kind": "cope", "p_max": 1, "std": 1.0}]}), []
    train_run(run, store.run(run.run_id), Runtime(), on_event=events.append)
    assert [len(event.warnings) for event in events if event.evaluated] == [1, 1]
    assert events[0].warnings == ()
    (warning,) = events[-1].warnings
    assert warning.startswith("cope: ")
    assert log_of(store, run).count(f"warning: {warning}") == 1


def test_a_finished_run_warns_of_position_logits_that_do_nothing(store):
    run, events = tiny_run(**{"model.position": [{"kind": "cope", "p_max": 8}], "train.position_lr": 1e-6}), []
    train_run(run, store.run(run.run_id), Runtime(), on_event=events.append)
    assert [len(event.warnings) for event in events if event.evaluated] == [0, 1]
    assert events[-1].warnings[0].startswith("cope: ")


def test_the_largest_position_that_a_contextual_encoding_reaches_is_a_fact(store):
    """Gates that have hardly been trained are about ½; positions are counted beyond the last embedding, too."""
    few, rope = (
        tiny_run(**{"model.position": position, "train.lr": 1e-9})
        for position in ([{"kind": "cope", "p_max": 2}], ["rope"])
    )
    facts = []
    for run in (few, rope):
        train_run(run, store.run(run.run_id), Runtime())
        facts.append(store.run(run.run_id).result["facts"])
    assert facts[0]["largest_position"] == pytest.approx(few.task.length("train") / 2, rel=0.02)
    assert "largest_position" not in facts[1]


@pytest.mark.parametrize("position", [[], ["rope"], [{"kind": "cope", "p_max": 8, "std": 1.0}]])
def test_other_runs_do_not_warn(store, position):
    run, events = tiny_run(**{"model.position": position}), []
    train_run(run, store.run(run.run_id), Runtime(), on_event=events.append)
    assert not any(event.warnings for event in events)
    assert "warning" not in log_of(store, run)


def test_warnings_change_no_number(store, monkeypatch):
    run = tiny_run(**{"model.position": [{"kind": "cope", "p_max": 1, "std": 1.0}, "rope"], "model.dropout": 0.1})
    train_run(run, store.run(run.run_id), Runtime())
    warned = store.run(run.run_id)
    before, weights = warned.result["metrics"], (warned.checkpoint / "model.safetensors").read_bytes()
    shutil.rmtree(warned.path)
    monkeypatch.setattr("cope_sweep.train.loop.head_loads", lambda model, sequences: [])
    train_run(run, store.run(run.run_id), Runtime())
    assert store.run(run.run_id).result["metrics"] == before
    assert (store.run(run.run_id).checkpoint / "model.safetensors").read_bytes() == weights
