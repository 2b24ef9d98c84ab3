import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from cope_sweep.record import Ledger
from cope_sweep.spec import Resources
from cope_sweep.train import Runtime, Trainer, train_run
from cope_sweep.train.resume import load_resume
from tests.tiny import tiny_run


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "store", create=True)


def stop_after(steps):
    asked = iter(range(steps))
    return lambda: next(asked, None) is None


def weights(folder):
    return load_file(folder.checkpoint / "model.safetensors")


def test_a_run_from_start_to_result(ledger):
    run, events = tiny_run(), []
    assert train_run(run, ledger, Runtime(worker_id="here"), on_event=events.append) == "finished"
    folder = ledger.run(run.run_id)
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


def test_a_finished_run_is_not_trained_again(ledger):
    run = tiny_run()
    train_run(run, ledger, Runtime())
    before = os.stat(ledger.run(run.run_id).path / "result.json").st_mtime_ns
    assert train_run(run, ledger, Runtime(), on_event=lambda event: pytest.fail("it trained")) == "finished"
    assert os.stat(ledger.run(run.run_id).path / "result.json").st_mtime_ns == before


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("position", [["cope"], ["absolute"], ["rope"]])
def test_resuming_is_the_same_to_the_bit(tmp_path, dropout, position):
    run = tiny_run(
        **{"train.steps": 23, "model.dropout": dropout, "model.position": position, "train.schedule": "cosine"}
    )
    whole, parts = Ledger(tmp_path / "whole", create=True), Ledger(tmp_path / "parts", create=True)
    train_run(run, whole, Runtime())
    assert train_run(run, parts, Runtime(), should_stop=stop_after(4)) == "interrupted"
    assert parts.run(run.run_id).status == "interrupted"
    assert train_run(run, parts, Runtime(), should_stop=stop_after(9)) == "interrupted"
    assert train_run(run, parts, Runtime()) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert a.result["metrics"] == b.result["metrics"]
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name
    assert a.curve() == b.curve()
    assert b.result["facts"]["resumed_from_step"] == 15


@given(
    stops=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    micro_batch=st.sampled_from([None, 1, 3]),
    checkpoint_activations=st.booleans(),
    dropout=st.sampled_from([0.0, 0.4]),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 12),
    position=st.sampled_from([["cope"], ["cope_mlp", "absolute"], [{"kind": "relative", "share_layers": True}]]),
    task=st.sampled_from(
        [
            {"kind": "flip_flop", "pairs": 5},
            {"kind": "counting", "operations": 9, "train_sequences": 13},  # an epoch ends every third step
            {"kind": "selective_copy", "tokens": 2, "blanks": 20, "vocabulary": 6},
        ]
    ),
)
@settings(max_examples=25, deadline=None)
def test_a_run_stopped_at_any_steps_ends_the_same_to_the_bit(
    tmp_path_factory, stops, micro_batch, checkpoint_activations, dropout, schedule, warmup, position, task
):
    """Model, moments, schedule, dropout, place in the data: losses, curves and weights are those of one go."""
    run = tiny_run(
        task=task,
        **{"model.dropout": dropout, "model.layers": 2, "model.position": position, "evaluate.every": 4},
        train={"steps": 12, "batch": 5, "schedule": schedule, "warmup": warmup},
    )
    runtime = Runtime(micro_batch=micro_batch, checkpoint_activations=checkpoint_activations)
    folder = tmp_path_factory.mktemp("store")
    whole, parts = Ledger(folder / "whole", create=True), Ledger(folder / "parts", create=True)
    train_run(run, whole, runtime)
    done = 0
    for stop in stops:
        if done + stop < 12:
            assert train_run(run, parts, runtime, should_stop=stop_after(stop - 1)) == "interrupted"
            done += stop
    assert train_run(run, parts, runtime) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert b.result["facts"]["resumed_from_step"] == done
    assert a.result["metrics"] == b.result["metrics"]
    assert a.curve() == b.curve()
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name


def text_run(text, **overrides):
    return tiny_run(**{"task": text, "model.position": ["cope"]} | overrides)


def test_a_text_goes_on_where_it_was_to_the_bit(tmp_path, text):
    """Steps enough for two epochs of its contexts."""
    run = text_run(text, **{"train.steps": 60, "train.batch": 8, "model.dropout": 0.1})
    whole, parts = Ledger(tmp_path / "whole", create=True), Ledger(tmp_path / "parts", create=True)
    train_run(run, whole, Runtime())
    for stop in (6, 17, 20):
        train_run(run, parts, Runtime(), should_stop=stop_after(stop))
    assert train_run(run, parts, Runtime()) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert a.curve() == b.curve()
    assert a.result["metrics"] == b.result["metrics"]


def test_a_text_is_told_in_facts_and_its_tokenizer_goes_with_the_checkpoint(ledger, text):
    run = text_run(text)
    assert train_run(run, ledger, Runtime()) == "finished"
    folder = ledger.run(run.run_id)
    assert folder.result["facts"]["data"] == run.task.fingerprint()
    assert (folder.checkpoint / "tokenizer.json").read_bytes() == run.task.tokenizer_json.read_bytes()
    assert set(folder.result["metrics"]) >= {f"test/{name}" for name in run.task.METRICS}


def test_a_run_does_not_go_on_with_other_data(ledger, text, tmp_path):
    run = text_run(text, **{"train.steps": 12})
    assert train_run(run, ledger, Runtime(), should_stop=stop_after(3)) == "interrupted"
    (tmp_path / "moved").mkdir()
    for path in (tmp_path / "text").iterdir():
        (tmp_path / "moved" / path.name).write_text(path.read_text().replace("lobster", "crab"))
    moved = text_run(text | {"folder": str(tmp_path / "moved")}, **{"train.steps": 12})
    assert moved.run_id == run.run_id
    assert train_run(moved, ledger, Runtime()) == "failed"
    message = ledger.run(run.run_id).state["message"]
    assert run.task.fingerprint() in message
    assert moved.task.fingerprint() in message
    assert "bring the files back" in message
    assert train_run(run, ledger, Runtime()) == "finished"
    assert ledger.run(run.run_id).result["facts"]["resumed_from_step"] == 4


@pytest.mark.parametrize(
    ("position", "measured"), [(["cope"], True), (["rope"], True), (["alibi"], True), (["relative"], True),
                               ([{"kind": "relative", "far": "last"}], True), ([], True), (["absolute"], False)]
)  # fmt: skip
def test_longer_contexts_are_measured_or_it_is_said_why_not(ledger, text, position, measured):
    """The model has 16 positions; 64 is four times that. Absolute ones end there: the run is no failure for that."""
    run = text_run(text, **{"model.position": position, "evaluate.contexts": [8, 16, 32, 64]})
    assert train_run(run, ledger, Runtime()) == "finished"
    metrics, facts = ledger.run(run.run_id).result["metrics"], ledger.run(run.run_id).result["facts"]
    assert metrics["test/perplexity@16"] == pytest.approx(metrics["test/perplexity"], rel=1e-5)
    assert "validation/perplexity@8" in metrics
    assert ("test/perplexity@64" in metrics) == measured
    if measured:
        assert "contexts_left_out" not in facts
    else:
        assert facts["contexts_left_out"].startswith("32, 64: absolute position encoding has embeddings for 16")


def test_a_text_shorter_than_a_window_is_refused_before_training(ledger, text):
    run = text_run(text, **{"evaluate.contexts": [100_000]})
    assert train_run(run, ledger, Runtime()) == "failed"
    folder = ledger.run(run.run_id)
    assert "fewer than one context of 100,000" in folder.state["message"]
    assert folder.curve() == []


def test_facts_tell_the_time_of_all_attempts(ledger):
    run = tiny_run(**{"train.steps": 30})
    assert train_run(run, ledger, Runtime(), should_stop=stop_after(14)) == "interrupted"
    folder = ledger.run(run.run_id)
    before = load_resume(folder.resume, Trainer(run, Runtime()))["spent"]
    assert train_run(run, ledger, Runtime()) == "finished"
    facts = folder.result["facts"]
    assert facts["resumed_from_step"] == 15
    assert facts["train_s"] > before["train_s"] > 0
    assert facts["wall_s"] > before["wall_s"] > before["train_s"]


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    run = tiny_run(**{"train.steps": 400, "evaluate.every": 400})
    script = textwrap.dedent(f"""
        from cope_sweep.record import Ledger
        from cope_sweep.spec import RunSpec
        from cope_sweep.train import Runtime, train_run
        run = RunSpec.model_validate_json({run.model_dump_json()!r})
        train_run(run, Ledger({str(tmp_path)!r}, create=True), Runtime(checkpoint_every_s=0.02))
        """)
    ledger = Ledger(tmp_path, create=True)
    folder = ledger.run(run.run_id)
    child = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while not folder.resume.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert folder.status == "interrupted"
    assert train_run(run, ledger, Runtime()) == "finished"
    assert folder.result["facts"]["resumed_from_step"] > 0
    untouched = Ledger(tmp_path / "whole", create=True)
    train_run(run, untouched, Runtime())
    for name, tensor in weights(folder).items():
        assert torch.equal(tensor, weights(untouched.run(run.run_id))[name]), name
    assert folder.curve() == untouched.run(run.run_id).curve()


def test_a_resume_file_cut_short_begins_again(ledger):
    run = tiny_run(**{"train.steps": 12})
    train_run(run, ledger, Runtime(), should_stop=stop_after(5))
    folder = ledger.run(run.run_id)
    folder.resume.write_bytes(folder.resume.read_bytes()[:100])
    assert train_run(run, ledger, Runtime()) == "finished"
    assert folder.result["facts"]["resumed_from_step"] == 0


def test_divergence_fails_the_run_with_its_traceback(ledger):
    run, events = tiny_run(**{"train.lr": 1e30, "train.clip": None, "train.steps": 40}), []
    assert train_run(run, ledger, Runtime(), on_event=events.append) == "failed"
    folder = ledger.run(run.run_id)
    assert folder.status == "failed"
    assert "lower train.lr" in folder.state["message"]
    assert "Traceback" in folder.state["traceback"]
    assert events[-1].status == "failed"
    assert events[-1].message == folder.state["message"]
    assert folder.result is None


def test_a_failed_run_can_be_tried_again(ledger, monkeypatch):
    run = tiny_run()
    with monkeypatch.context() as patch:
        patch.setattr("cope_sweep.train.trainer.next_token_loss", lambda *_: 1 / 0)
        assert train_run(run, ledger, Runtime()) == "failed"
    assert ledger.run(run.run_id).state["message"] == "ZeroDivisionError: division by zero"
    assert train_run(run, ledger, Runtime()) == "finished"


def test_a_run_in_training_elsewhere_is_busy(ledger):
    run = tiny_run()
    with ledger.run(run.run_id).lock():
        assert train_run(run, ledger, Runtime()) == "busy"
    assert train_run(run, ledger, Runtime()) == "finished"


@pytest.mark.parametrize("attention", ["reference", "blocked", "auto"])
def test_what_computes_attention_is_not_what_a_run_is(tmp_path, attention):
    run = tiny_run(**{"model.position": ["cope"]})
    plain, other = Ledger(tmp_path / "a", create=True), Ledger(tmp_path / "b", create=True)
    train_run(run, plain, Runtime(attention="reference"))
    train_run(run, other, Runtime.of(Resources(attention=attention), worker_id="here"))
    mine, theirs = plain.run(run.run_id).result["metrics"], other.run(run.run_id).result["metrics"]
    assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
