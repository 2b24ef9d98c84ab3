"""Resume files: a run that continues from one is the same to the bit, whatever happens while it is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cope_sweep.model import CheckpointError
from cope_sweep.store import AttemptWriter, RunFolder, Store
from cope_sweep.train import Runtime, Trainer, train_run
from cope_sweep.train import resume as module
from cope_sweep.train.resume import ResumeWriter, load_state, snapshot_state, write_state
from tests.helpers.errors import raises
from tests.helpers.processes import until
from tests.helpers.tiny import tiny_run
from tests.helpers.training import stop_after, text_run, weights

OFTEN = Runtime(checkpoint_every_s=1e-6)
"""Files are written in the background, one after another."""


def save_resume(path, trainer, notes):
    write_state(path, snapshot_state(trainer, notes))


@given(
    stops=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    micro_batch=st.sampled_from([None, 1, 3]),
    checkpoint_activations=st.booleans(),
    dropout=st.sampled_from([0.0, 0.4]),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 12),
    position=st.sampled_from(
        [
            ["cope"],
            ["cope_mlp", "absolute"],
            [{"kind": "relative", "share_layers": True}],
            [{"kind": "rope", "sampled": 20.0}, {"kind": "alibi", "sampled": 9.0}],
        ]
    ),
    optimizer=st.sampled_from(["adamw", "muon"]),
    task=st.sampled_from(
        [
            {"kind": "flip_flop", "pairs": 5},
            {"kind": "counting", "operations": 9, "train_sequences": 13},  # an epoch ends every third step
            {"kind": "selective_copy", "tokens": 2, "blanks": 20, "vocabulary": 6},
        ]
    ),
)
@settings(max_examples=5, deadline=None)
@pytest.mark.slow
def test_a_run_stopped_at_any_steps_ends_the_same_to_the_bit(
    tmp_path_factory, stops, micro_batch, checkpoint_activations, dropout, schedule, warmup, position, task, optimizer
):
    """Model, optimiser, schedule, dropout and position in the data: losses, curves and weights are the same."""
    run = tiny_run(
        task=task,
        **{"model.dropout": dropout, "model.layers": 2, "model.position": position, "evaluate.every": 4},
        train={"steps": 12, "batch": 5, "schedule": schedule, "warmup": warmup, "optimizer": optimizer},
    )
    runtime = Runtime(micro_batch=micro_batch, checkpoint_activations=checkpoint_activations)
    folder = tmp_path_factory.mktemp("store")
    whole, parts = Store(folder / "whole", create=True), Store(folder / "parts", create=True)
    train_run(run, whole.run(run.run_id), runtime)
    done = 0
    for stop in stops:
        if done + stop < 12:
            assert train_run(run, parts.run(run.run_id), runtime, should_stop=stop_after(stop - 1)) == "interrupted"
            done += stop
    assert train_run(run, parts.run(run.run_id), runtime) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert b.result["facts"]["resumed_from_step"] == done
    assert a.result["metrics"] == b.result["metrics"]
    assert a.curve() == b.curve()
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name


def test_a_run_on_a_text_continues_to_the_bit(tmp_path, text):
    """The steps take two epochs of the text."""
    run = text_run(text, **{"train.steps": 60, "train.batch": 8, "model.dropout": 0.1})
    whole, parts = Store(tmp_path / "whole", create=True), Store(tmp_path / "parts", create=True)
    train_run(run, whole.run(run.run_id), Runtime())
    for stop in (6, 17, 20):
        train_run(run, parts.run(run.run_id), Runtime(), should_stop=stop_after(stop))
    assert train_run(run, parts.run(run.run_id), Runtime()) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert a.curve() == b.curve()
    assert a.result["metrics"] == b.result["metrics"]


@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("dies_in", ["save_checkpoint", "finish"])
def test_a_run_that_is_killed_after_its_last_step_loses_nothing(store, tmp_path, monkeypatch, schedule, dies_in):
    run = tiny_run(**{"train.steps": 12, "train.schedule": schedule})

    def die(*arguments, **options):
        signal.raise_signal(signal.SIGINT)  # nothing is recorded

    with monkeypatch.context() as patch:
        patch.setattr(AttemptWriter, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            train_run(run, store.run(run.run_id), Runtime(checkpoint_every_s=0))
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    plain = Store(tmp_path / "plain", create=True)
    train_run(run, plain.run(run.run_id), Runtime())
    folder, expected = store.run(run.run_id), plain.run(run.run_id)
    assert folder.result["facts"]["resumed_from_step"] >= 11
    assert folder.curve() == expected.curve()
    assert folder.result["metrics"] == expected.result["metrics"]


@pytest.fixture(params=["adamw", "muon"])
def trained(request):
    """A trainer after three steps, none of whose losses was reported."""
    trainer = Trainer(tiny_run(**{"train.optimizer": request.param, "model.position": ["cope"]}), Runtime())
    for _ in range(3):
        trainer.train_step()
    return trainer


def test_older_files_without_a_checksum_can_be_loaded(tmp_path):
    trained = Trainer(tiny_run(), Runtime())
    trained.train_step()
    save_resume(tmp_path / "new", trained, {})
    with safe_open(tmp_path / "new", framework="pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name not in ("optimizer_values", "crc32")}
    save_file(load_file(tmp_path / "new"), tmp_path / "old", metadata=metadata)
    restored = Trainer(trained.spec, Runtime())
    load_state(tmp_path / "old", restored)
    for trainer in (trained, restored):
        trainer.train_step()
    for (name, value), other in zip(trained.model.named_parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_optimiser_state_that_is_no_tensor_is_restored(trained, tmp_path):
    """Some torch optimisers count steps with Python numbers."""
    parameter = trained.optimizers[0].param_groups[0]["params"][0]
    trained.optimizers[0].state[parameter]["updates"] = 7
    save_resume(tmp_path / "resume", trained, {})
    restored = Trainer(trained.spec, Runtime())
    load_state(tmp_path / "resume", restored)
    parameter = restored.optimizers[0].param_groups[0]["params"][0]
    assert restored.optimizers[0].state[parameter]["updates"] == 7


def test_files_of_other_runs_and_damaged_files_are_refused(trained, tmp_path):
    path = tmp_path / "resume"
    save_resume(path, trained, {})
    other = Trainer(tiny_run(seed=1), Runtime())
    with raises("another_run", file=str(path), run_id=trained.spec.run_id, expected=other.spec.run_id):
        load_state(path, other)
    tensors = load_file(path)
    del tensors["model/embedding.weight"]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    with raises("wrong_checksum", file=str(path)):
        load_state(path, Trainer(trained.spec, Runtime()))
    del metadata["crc32"]  # as in older files
    save_file(tensors, path, metadata=metadata)
    with raises("does_not_fit", file=str(path), run_id=trained.spec.run_id):
        load_state(path, Trainer(trained.spec, Runtime()))


def test_one_flipped_bit_is_found_wherever_it_is(trained, tmp_path):
    path = tmp_path / "resume"
    save_resume(path, trained, {"note": 1})
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    for offset in (
        content.index(b'"step"') + 8,
        8 + header,
        8 + header + (len(content) - header) // 2,
        len(content) - 1,
    ):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(CheckpointError):
            load_state(path, Trainer(trained.spec, Runtime()))
    path.write_bytes(content)
    assert load_state(path, Trainer(trained.spec, Runtime())) == {"note": 1}


@pytest.fixture
def trainer():
    trainer = Trainer(tiny_run(**{"model.position": ["cope"]}), Runtime())
    trainer.train_step()
    yield trainer
    trainer.close()


@pytest.fixture
def folder(store):
    run = tiny_run(**{"model.position": ["cope"]})
    return store.run(run.run_id).begin(run, "here")


@pytest.fixture
def gate(monkeypatch):
    """Files are written after this event."""
    gate, write = threading.Event(), module.write_state

    def wait_and_write(path, state):
        assert gate.wait(60)
        write(path, state)

    monkeypatch.setattr(module, "write_state", wait_and_write)
    return gate


def test_the_file_has_the_state_at_the_call(trainer, folder, gate):
    """Training goes on before anything is written."""
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    writer = ResumeWriter(folder)
    writer.write(trainer, {"note": 1})
    assert writer.busy
    assert not folder.resume.exists()
    trainer.train_step()
    assert not torch.equal(before["embedding.weight"], trainer.model.embedding.weight)
    gate.set()
    writer.wait()
    restored = Trainer(trainer.spec, Runtime())
    assert load_state(folder.resume, restored) == {"note": 1}
    assert restored.step == 1
    for name, value in restored.model.named_parameters():
        assert torch.equal(value, before[name]), name
    assert writer.duration_s > 0
    writer.close()


def test_a_large_state_on_a_cpu_is_not_copied(trainer, folder, monkeypatch):
    monkeypatch.setattr(module, "COPIED_BYTES", 0)
    writer = ResumeWriter(folder)
    writer.write(trainer, {})
    assert folder.resume.exists()
    assert not writer.busy
    writer.close()


def test_a_full_disk_in_the_background_fails_the_run(store, monkeypatch):
    def full(path, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_state", full)
    run = tiny_run(**{"train.steps": 500, "train.schedule": "linear"})
    assert train_run(run, store.run(run.run_id), OFTEN) == "failed"
    assert store.run(run.run_id).state["message"] == "OSError: [Errno 28] No space left on device"


def test_the_thread_ends_with_the_run(store):
    before = threading.enumerate()  # trainers of earlier tests may not have been collected yet
    run = tiny_run(**{"train.steps": 30})
    train_run(run, store.run(run.run_id), OFTEN)
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in begun if thread.name.startswith(("resume", "batches"))]


@pytest.mark.slow
def test_a_kill_while_a_file_is_written_leaves_the_one_before(tmp_path):
    run = tiny_run(**{"train.steps": 10_000, "evaluate.every": 10_000})
    script = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from cope_sweep.config import RunSpec
        from cope_sweep.store import Store
        from cope_sweep.train import Runtime, resume, train_run
        write, calls = resume.write_state, []

        def slow(path, state):
            write(path, state)
            calls.append(path)
            if len(calls) == 2:
                path.write_bytes(path.read_bytes()[:100])  # half a file
                Path({str(tmp_path)!r}, "writing").touch()
                time.sleep(600)

        resume.write_state = slow
        run = RunSpec.model_validate_json({run.model_dump_json()!r})
        train_run(run, Store({str(tmp_path)!r}, create=True).run(run.run_id), Runtime(checkpoint_every_s=0.01))
        """)
    store = Store(tmp_path, create=True)
    folder: RunFolder = store.run(run.run_id)
    child = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"})
    until(lambda: (tmp_path / "writing").exists() or child.poll() is not None)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert load_file(folder.resume)
    restored = Trainer(run, Runtime())
    load_state(folder.resume, restored)
    assert restored.step > 0
