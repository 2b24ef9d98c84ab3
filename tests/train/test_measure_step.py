import math
import time

import pytest
import torch

from cope_sweep.errors import UserError
from cope_sweep.train.measure_step import measure_step
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer
from tests.tiny import tiny_run

RUNTIME = Runtime()
LARGE = {"model.dim": 64, "model.layers": 2, "task.blanks": 60, "train.batch": 16, "train.steps": 8}


@pytest.mark.slow
def test_a_measurement_tells_how_long_training_takes():
    run = tiny_run(**LARGE)
    step = measure_step(run, RUNTIME, steps=5)
    trainer = Trainer(run, RUNTIME)
    trainer.train_step()
    started_s = time.perf_counter()
    while not trainer.done:
        trainer.train_step()
    assert step.fits
    assert step.step_s == pytest.approx((time.perf_counter() - started_s) / 7, rel=2)


@pytest.mark.slow
def test_larger_steps_take_more_time_and_memory():
    """Also before a smaller one: its memory is not counted again."""
    runs = tiny_run(), tiny_run(**LARGE | {"model.ffn_dim": 20_000, "train.batch": 4}), tiny_run()
    before, large, after = (measure_step(run, RUNTIME, steps=1) for run in runs)
    assert max(before.step_s, after.step_s) < large.step_s
    of_parameters = 4 * sum(math.prod(p.shape) for p in Trainer(runs[1], RUNTIME).model.parameters())
    assert large.peak_memory_bytes > before.peak_memory_bytes + 2 * of_parameters
    assert after.peak_memory_bytes < before.peak_memory_bytes + 1.5 * of_parameters


@pytest.mark.parametrize("workers", [1, 3, 99])
def test_a_worker_takes_its_share_of_the_batch(workers, monkeypatch):
    batches = []
    monkeypatch.setattr(
        Trainer,
        "train_step",
        lambda self: [batches.append(self.spec.train.batch), setattr(self, "step", self.step + 1)],
    )
    measure_step(tiny_run(**{"train.batch": 7}), RUNTIME, workers=workers, steps=2)
    assert batches == [math.ceil(7 / workers)] * 3


def test_the_run_may_be_shorter_than_the_measurement_or_in_its_warm_up():
    assert measure_step(tiny_run(**{"train.steps": 1, "train.warmup": 1}), RUNTIME, steps=2).fits


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_what_does_not_fit_is_told(error, monkeypatch):
    def fail(self):
        raise error

    monkeypatch.setattr(Trainer, "train_step", fail)
    step = measure_step(tiny_run(), RUNTIME)
    assert not step.fits
    assert step.step_s == math.inf


def test_a_tensor_that_no_memory_of_this_machine_holds_does_not_fit():
    assert not measure_step(tiny_run(**{"model.dim": 10**6, "model.ffn_dim": 10**9}), RUNTIME).fits


def test_data_that_cannot_be_read_are_an_error(tmp_path):
    text = {"kind": "code", "tokens": 8, "corpus": "mine", "folder": str(tmp_path / "nowhere")}
    with pytest.raises(UserError, match="nowhere"):
        measure_step(tiny_run(task=text), RUNTIME)
