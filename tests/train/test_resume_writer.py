import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from cope_sweep.store import RunFolder, Store
from cope_sweep.store.errors import FencedError
from cope_sweep.train import Runtime, Trainer, train_run
from cope_sweep.train import resume_writer as module
from cope_sweep.train.resume import load_resume
from cope_sweep.train.resume_writer import ResumeWriter
from tests.tiny import tiny_run
from tests.train.stores import stop_after, weights

OFTEN = Runtime(checkpoint_every_s=1e-6)


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
    assert load_resume(folder.resume, restored) == {"note": 1}
    assert restored.step == 1
    for name, value in restored.model.named_parameters():
        assert torch.equal(value, before[name]), name
    assert writer.duration_s > 0
    writer.close()


def test_at_most_one_file_is_pending(trainer, folder, gate):
    writer = ResumeWriter(folder)
    writer.write(trainer, {"number": 1})
    second = threading.Thread(target=writer.write, args=(trainer, {"number": 2}))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # it waits for the first file
    gate.set()
    second.join(60)
    writer.wait()
    assert load_resume(folder.resume, Trainer(trainer.spec, Runtime())) == {"number": 2}
    writer.close()


def test_a_large_state_on_a_cpu_is_not_copied(trainer, folder, monkeypatch):
    monkeypatch.setattr(module, "COPIED_BYTES", 0)
    writer = ResumeWriter(folder)
    writer.write(trainer, {})
    assert folder.resume.exists()
    assert not writer.busy
    writer.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), FencedError("a newer attempt")])
def test_an_error_of_the_thread_is_raised_once_by_the_next_call(trainer, folder, monkeypatch, error):
    def fail(path, state):
        raise error

    writer = ResumeWriter(folder)
    monkeypatch.setattr(module, "write_state", fail)
    writer.write(trainer, {})
    with pytest.raises(type(error)):
        writer.wait()
    assert not writer.busy
    assert [file.name for file in folder.path.iterdir() if "resume" in file.name] == []
    writer.close()


def test_a_full_disk_in_the_background_fails_the_run(store, monkeypatch):
    def full(path, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_state", full)
    run = tiny_run(**{"train.steps": 500, "train.schedule": "linear"})
    assert train_run(run, store, OFTEN) == "failed"
    assert store.run(run.run_id).state["message"] == "OSError: [Errno 28] No space left on device"


def test_the_thread_ends_with_the_run(store):
    train_run(tiny_run(**{"train.steps": 30}), store, OFTEN)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("resume", "batches"))]


def test_a_run_with_files_in_the_background_resumes_to_the_bit(tmp_path):
    run = tiny_run(**{"train.steps": 40, "model.dropout": 0.2, "model.position": ["cope"]})
    whole, parts = Store(tmp_path / "whole", create=True), Store(tmp_path / "parts", create=True)
    train_run(run, whole, Runtime())
    assert train_run(run, parts, OFTEN, should_stop=stop_after(17)) == "interrupted"
    assert train_run(run, parts, OFTEN) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert a.curve() == b.curve()
    assert all(torch.equal(value, weights(b)[name]) for name, value in weights(a).items())


@pytest.mark.slow
def test_a_kill_while_a_file_is_written_leaves_the_one_before(tmp_path):
    run = tiny_run(**{"train.steps": 10_000, "evaluate.every": 10_000})
    script = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from cope_sweep.config import RunSpec
        from cope_sweep.store import Store
        from cope_sweep.train import Runtime, resume_writer, train_run
        write, calls = resume_writer.write_state, []

        def slow(path, state):
            write(path, state)
            calls.append(path)
            if len(calls) == 2:
                path.write_bytes(path.read_bytes()[:100])  # half a file
                Path({str(tmp_path)!r}, "writing").touch()
                time.sleep(600)

        resume_writer.write_state = slow
        run = RunSpec.model_validate_json({run.model_dump_json()!r})
        train_run(run, Store({str(tmp_path)!r}, create=True), Runtime(checkpoint_every_s=0.01))
        """)
    store = Store(tmp_path, create=True)
    folder: RunFolder = store.run(run.run_id)
    child = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (tmp_path / "writing").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert (tmp_path / "writing").exists()
    assert load_file(folder.resume)
    restored = Trainer(run, Runtime())
    load_resume(folder.resume, restored)
    assert restored.step > 0
