"""Training steps on a GPU, as far as a CPU can run them: compiled with a stand-in backend, and by several processes."""

import os
import time
from functools import partial

import pytest
import torch
from cope_benchmarks import step, step_cuda
from cope_benchmarks.step_cuda import ALTERNATIVES, COMPILED, MODELS, TINY, names_of, table
from cope_benchmarks.step_shared import together

from cope_sweep.train import compiled

BLOCKED = "CoPE(64), blocked"


def test_the_smallest_model_is_also_trained_by_several_processes():
    small, *others = MODELS
    together_names = ["CoPE(64), triton, 4 processes", "CoPE(64), triton, torch.compile, 4 processes"]
    assert names_of(small, "cuda") == [*ALTERNATIVES, *together_names]
    assert all(names_of(model, "cuda") == list(ALTERNATIVES) for model in others)
    assert "CoPE(64), triton, 2 processes" in names_of("tiny", "cpu")
    assert not any(COMPILED in name for name in names_of("tiny", "cpu"))


def test_all_models_are_measured_before_less_important_alternatives():
    todo = step_cuda._todo(list(MODELS), "cuda")
    assert todo[:6] == [(model, name) for name in (step.SDPA, "CoPE(64), triton") for model in MODELS]
    assert len(set(todo)) == len(todo) == 3 * len(ALTERNATIVES) + 2


@pytest.fixture
def compiled_blocked(monkeypatch):
    """An alternative that a CPU computes, and compiles without generating code."""
    name = BLOCKED + COMPILED
    monkeypatch.setitem(ALTERNATIVES, name, (step.COPE, step.attend_with("blocked")))
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    yield name
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_step_is_checked_timed_and_says_how_it_was_compiled(compiled_blocked):
    row = step_cuda._row(TINY["tiny"], compiled_blocked, "cpu", "CPU")
    assert row["step"]["median_ms"] > 0
    assert row["tokens_per_s"] == pytest.approx(1e3 * 17 / row["step"]["median_ms"], rel=1e-3)
    assert row["compiled"] == {"mode": "default", "graph_breaks": 0, "skipped_cuda_graphs": 0}


@pytest.mark.slow
def test_a_step_that_cannot_be_compiled_is_not_measured_as_if_it_were(compiled_blocked, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    with pytest.raises(Exception, match="no compiler here"):
        step_cuda._row(TINY["tiny"], compiled_blocked, "cpu", "CPU")
    assert torch._dynamo.config.suppress_errors  # in training, it would run uncompiled


@pytest.mark.slow
def test_steps_of_all_processes_count_together():
    per_s, peak_mib = together(partial(partial, time.sleep, 0.05), 2, "cpu", 0.5)
    assert 0 < per_s <= 2 / 0.05
    assert peak_mib is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"), [(partial(int, "x"), "ValueError: invalid literal"), (partial(os._exit, 3), "ended with 3")]
)
def test_a_process_that_fails_is_reported(make, message):
    with pytest.raises(RuntimeError, match=message):
        together(make, 1, "cpu", 0.0)


def test_the_table_says_what_was_compiled_and_how():
    def row(name, ms, **more):
        found = {"model": "m", "attention": name, "step": {"median_ms": ms}, "tokens_per_s": 1e3, "mfu": None}
        return {**found, "peak_mib": 7, **more}

    graphs = {"mode": "reduce-overhead", "graph_breaks": 0, "skipped_cuda_graphs": 2}
    rows = [
        row(step.SDPA, 2.0),
        row("a", 3.0, compiled=graphs),
        row("b", 1.0, compiled={"mode": "default", "graph_breaks": 0, "skipped_cuda_graphs": 0}),
    ]
    text = table({"device": "H200", "torch": "2.15", "triton": "3.9", "rows": rows, "left": []})
    assert "| m | a (CUDA graphs, 2 skipped cuda graphs) | 3.00 | 1.50 | 1,000 |" in text
    assert "| m | b | 1.00 | 0.50 |" in text
