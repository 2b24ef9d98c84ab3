"""What a step costs: measured here, or in a process of its own that may run out of memory."""

from __future__ import annotations

import math
import time

import pytest
import torch

from cope_sweep.config import estimates, expand
from cope_sweep.config.estimate import shape_of
from cope_sweep.errors import UserError
from cope_sweep.train import measure as measure_module
from cope_sweep.train.measure import measure_plan, measure_step
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer
from tests.config.ablations import TEXT, load
from tests.errors import raises
from tests.read.tables.ablations import plan_of
from tests.tiny import tiny_run
from tests.train.measuring import cannot_read_its_data, crashes, dies_of_memory

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


@pytest.mark.thorough
def test_larger_steps_take_more_time_and_memory():
    """Also before a smaller one: its memory is not counted again."""
    runs = tiny_run(), tiny_run(**LARGE | {"model.ffn_dim": 20_000, "train.batch": 4}), tiny_run()
    before, large, after = (measure_step(run, RUNTIME, steps=1) for run in runs)
    assert max(before.step_s, after.step_s) < large.step_s
    of_parameters = 4 * sum(math.prod(p.shape) for p in Trainer(runs[1], RUNTIME).model.parameters())
    assert large.peak_memory_bytes > before.peak_memory_bytes + 2 * of_parameters
    assert after.peak_memory_bytes < before.peak_memory_bytes + 1.5 * of_parameters


@pytest.mark.parametrize("workers", [3, *(pytest.param(workers, marks=pytest.mark.thorough) for workers in (1, 99))])
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


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), pytest.param(MemoryError(), marks=pytest.mark.thorough)],
)
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
    with raises("no_such_file", file=str(tmp_path / "nowhere")):
        measure_step(tiny_run(task=text), RUNTIME)


LARGE_FFN = 2**23
"""Its two matrices take 0.5 GB, their gradients as much, and the optimiser's state twice that."""


@pytest.mark.slow
def test_each_distinct_shape_is_measured_once():
    plan = expand(load(TEXT))
    assert len(plan.rows) == 4
    calls = []
    costs = measure_plan(plan, steps=1, on_shape=lambda *call: calls.append(call))
    assert calls == [("CoPE · 0.001", 1, 2), ("none · 0.001", 2, 2)]
    assert list(costs) == [shape_of(plan.rows[0].runs[0]), shape_of(plan.rows[2].runs[0])]
    found = estimates(plan, {}, costs)
    assert {estimate.basis for estimate in found.values()} == {"measured on this machine"}


@pytest.mark.thorough
def test_a_shape_that_needs_more_memory_than_there_is_does_not_fit_and_the_others_are_measured():
    plan = plan_of(grid={"model.ffn_dim": {"large": LARGE_FFN, "huge": 10**9, "small": 16}}, seeds=[0])
    large, huge, small = plan.runs
    costs = measure_plan(plan, steps=1, limit_bytes=1.2e9)
    assert not costs[shape_of(large)].fits
    assert costs[shape_of(large)].peak_memory_bytes > 1.2e9
    found = estimates(plan, {}, costs)
    assert [found[run.run_id].fits for run in (large, huge, small)] == [False, False, True]


def test_a_process_that_linux_ends_for_its_memory_is_no_error(monkeypatch):
    monkeypatch.setattr(measure_module, "_serve", dies_of_memory)
    assert [cost.step_s for cost in measure_plan(plan_of(grid={}, seeds=[0])).values()] == [float("inf")]


@pytest.mark.parametrize(
    ("serve", "code", "data"),
    [(crashes, "measurement_crashed", {"exit_code": -11}), (cannot_read_its_data, "no_corpus", {"corpus": "mine"})],
)
def test_a_process_that_crashes_or_cannot_read_its_data_is_an_error(monkeypatch, serve, code, data):
    monkeypatch.setattr(measure_module, "_serve", serve)
    with pytest.raises(UserError) as error:
        measure_plan(plan_of(grid={}, seeds=[0]))
    assert (error.value.code, error.value.data | data) == (code, error.value.data)


def test_the_memory_that_is_left_in_a_container(monkeypatch, tmp_path):
    free = measure_module.psutil.virtual_memory().available
    monkeypatch.setattr(measure_module, "CGROUP", tmp_path)
    assert measure_module._left_bytes() == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 150000\nactive_file 50000\n")
    assert measure_module._left_bytes() == 1_000_000 - 700_000 + 200_000
    (tmp_path / "memory.max").write_text("max\n")
    assert measure_module._left_bytes() > 1_000_000
