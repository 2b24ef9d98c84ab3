import os
import signal

import pytest

from cope_sweep.config import estimates, expand
from cope_sweep.config.estimate import shape_of
from cope_sweep.errors import UserError
from cope_sweep.train import measure as measure_module
from cope_sweep.train.measure import measure_plan
from tests.config.ablations import TEXT, load
from tests.read.tables.ablations import plan_of

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


@pytest.mark.slow
def test_a_shape_that_needs_more_memory_than_there_is_does_not_fit_and_the_others_are_measured():
    plan = plan_of(grid={"model.ffn_dim": {"large": LARGE_FFN, "huge": 10**9, "small": 16}}, seeds=[0])
    large, huge, small = plan.runs
    costs = measure_plan(plan, steps=1, limit_bytes=1.2e9)
    assert not costs[shape_of(large)].fits
    assert costs[shape_of(large)].peak_memory_bytes > 1.2e9
    found = estimates(plan, {}, costs)
    assert [found[run.run_id].fits for run in (large, huge, small)] == [False, False, True]


def dies(signum):
    def serve(connection, *settings):
        connection.recv()
        os.kill(os.getpid(), signum)

    return serve


def raises(connection, *settings):
    connection.recv()
    connection.send(UserError("no such text"))


def dies_of_memory(connection, *settings):
    dies(signal.SIGKILL)(connection)


def crashes(connection, *settings):
    dies(signal.SIGSEGV)(connection)


def test_a_process_that_linux_ends_for_its_memory_is_no_error(monkeypatch):
    monkeypatch.setattr(measure_module, "_serve", dies_of_memory)
    plan = plan_of()
    assert [cost.step_s for cost in measure_plan(plan).values()] == [float("inf")] * 3


def test_a_process_that_crashes_is_an_error(monkeypatch):
    monkeypatch.setattr(measure_module, "_serve", crashes)
    with pytest.raises(UserError, match="ended with exit code -11"):
        measure_plan(plan_of())


def test_what_is_wrong_with_the_data_is_raised_here(monkeypatch):
    monkeypatch.setattr(measure_module, "_serve", raises)
    with pytest.raises(UserError, match="no such text"):
        measure_plan(plan_of())


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
