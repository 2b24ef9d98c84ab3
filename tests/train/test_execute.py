import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file

from cope_sweep.record import Ledger
from cope_sweep.spec import Resources
from cope_sweep.train import Execution, execute
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
    assert execute(run, ledger, Execution(where="here"), on_event=events.append) == "finished"
    folder = ledger.run(run.run_id)
    assert folder.status == "finished"
    result = folder.result
    assert result["facts"]["parameters"] == 936  # 48 embedding, 288 attention, 552 feed-forward, 48 norms
    assert result["facts"]["steps"] == 6
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
    execute(run, ledger, Execution())
    before = os.stat(ledger.run(run.run_id).path / "result.json").st_mtime_ns
    assert execute(run, ledger, Execution(), on_event=lambda event: pytest.fail("it trained")) == "finished"
    assert os.stat(ledger.run(run.run_id).path / "result.json").st_mtime_ns == before


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("position", [["cope"], ["absolute"], ["rope"]])
def test_resuming_is_the_same_to_the_bit(tmp_path, dropout, position):
    run = tiny_run(
        **{"train.steps": 23, "model.dropout": dropout, "model.position": position, "train.schedule": "cosine"}
    )
    whole, parts = Ledger(tmp_path / "whole", create=True), Ledger(tmp_path / "parts", create=True)
    execute(run, whole, Execution())
    assert execute(run, parts, Execution(), should_stop=stop_after(4)) == "interrupted"
    assert parts.run(run.run_id).status == "interrupted"
    assert execute(run, parts, Execution(), should_stop=stop_after(9)) == "interrupted"
    assert execute(run, parts, Execution()) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert a.result["metrics"] == b.result["metrics"]
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name
    assert a.curve() == b.curve()
    assert b.result["facts"]["resumed_from_step"] == 15


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    run = tiny_run(**{"train.steps": 400, "evaluate.every": 400})
    script = textwrap.dedent(f"""
        from cope_sweep.record import Ledger
        from cope_sweep.spec import RunSpec
        from cope_sweep.train import Execution, execute
        run = RunSpec.model_validate_json({run.model_dump_json()!r})
        execute(run, Ledger({str(tmp_path)!r}, create=True), Execution(checkpoint_every_s=0.02))
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
    assert execute(run, ledger, Execution()) == "finished"
    assert folder.result["facts"]["resumed_from_step"] > 0
    untouched = Ledger(tmp_path / "whole", create=True)
    execute(run, untouched, Execution())
    for name, tensor in weights(folder).items():
        assert torch.equal(tensor, weights(untouched.run(run.run_id))[name]), name
    assert folder.curve() == untouched.run(run.run_id).curve()


def test_a_resume_file_cut_short_begins_again(ledger):
    run = tiny_run(**{"train.steps": 12})
    execute(run, ledger, Execution(), should_stop=stop_after(5))
    folder = ledger.run(run.run_id)
    folder.resume.write_bytes(folder.resume.read_bytes()[:100])
    assert execute(run, ledger, Execution()) == "finished"
    assert folder.result["facts"]["resumed_from_step"] == 0


def test_divergence_fails_the_run_with_its_traceback(ledger):
    run, events = tiny_run(**{"train.lr": 1e30, "train.clip": None, "train.steps": 40}), []
    assert execute(run, ledger, Execution(), on_event=events.append) == "failed"
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
        assert execute(run, ledger, Execution()) == "failed"
    assert ledger.run(run.run_id).state["message"] == "ZeroDivisionError: division by zero"
    assert execute(run, ledger, Execution()) == "finished"


def test_a_run_in_training_elsewhere_is_busy(ledger):
    run = tiny_run()
    with ledger.run(run.run_id).lock():
        assert execute(run, ledger, Execution()) == "busy"
    assert execute(run, ledger, Execution()) == "finished"


@pytest.mark.parametrize("attention", ["reference", "blocked", "auto"])
def test_what_computes_attention_is_not_what_a_run_is(tmp_path, attention):
    run = tiny_run(**{"model.position": ["cope"]})
    plain, other = Ledger(tmp_path / "a", create=True), Ledger(tmp_path / "b", create=True)
    execute(run, plain, Execution(attention="reference"))
    execute(run, other, Execution.of(Resources(attention=attention), where="here"))
    mine, theirs = plain.run(run.run_id).result["metrics"], other.run(run.run_id).result["metrics"]
    assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
