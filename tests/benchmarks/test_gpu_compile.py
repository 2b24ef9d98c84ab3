"""Kernels compiled without being launched: for a GPU that this machine lacks, and in other processes."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and compiles nothing", allow_module_level=True)


from cope_benchmarks import compile_all, gpu, gpu_small
from cope_benchmarks.compile_all import compiling_for, main
from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_compile import Compiling, compile_kernels, one_sequence
from cope_benchmarks.gpu_problems import Problem
from triton.compiler import CompiledKernel

from cope_sweep.kernels import triton_attention
from cope_sweep.kernels.triton_attention import launch
from cope_sweep.kernels.tuning import KERNELS

SIMPLE = Problem(batch=3, heads=4, tokens=64, p_max=None, alibi=True, projection=True, lengths=(64, 3, 9))


def launch_nothing(problem, monkeypatch):
    """Go all the way to the launch of each kernel, by a Triton that has compiled nothing yet in this process."""
    launched = []
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: None)
    run = property(lambda self: lambda *_, **options: launched.append(self.name))
    monkeypatch.setattr(CompiledKernel, "run", run, raising=False)
    for kernel in launch.KERNELS.values():
        kernel.device_caches.clear()
    leaves, weight = problem.leaves()
    computed_by(triton_attention.attend, problem.build, leaves, weight)
    assert launched == list(KERNELS)


@pytest.mark.slow
def test_all_kernels_of_a_problem_are_compiled_for_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling_for(90):
        compile_kernels(SIMPLE, None, "cpu")
        ptx = {path.stem: path.read_text() for path in tmp_path.glob("*/*.ptx")}
        assert set(ptx) == set(KERNELS)
        assert all(".target sm_90a" in text for text in ptx.values())
        launch_nothing(SIMPLE, monkeypatch)  # of three sequences and four heads
    assert len(list(tmp_path.glob("*/*.ptx"))) == len(KERNELS), "launches compiled other kernels"


def test_a_problem_of_one_sequence_has_the_same_kernels():
    small = one_sequence(SIMPLE)
    assert (small.batch, small.heads, small.lengths) == (1, 2, (64,))
    assert (small.tokens, small.projection, small.alibi) == (SIMPLE.tokens, True, True)


@pytest.mark.slow
def test_kernels_that_cannot_be_compiled_ahead_do_not_stop_the_measurement(monkeypatch):
    # There is no GPU, so that the other process fails.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Compiling({"some": [(SIMPLE, None)]}, "cuda") as compiling:
        compiling.wait("some")
        [future] = compiling._futures["some"]
        assert future.exception() is not None
        compiling.wait("unknown")
    with Compiling({"some": [(SIMPLE, None)]}, "cpu") as compiling:
        compiling.wait("some")


def test_failures_are_printed_and_counted(monkeypatch, capsys):
    def compile_or_fail(problem, configurations, device):
        if problem.alibi:
            raise ValueError("first line\nout of registers")

    monkeypatch.setattr(compile_all, "compile_kernels", compile_or_fail)
    monkeypatch.setattr(gpu_small, "PROBLEMS", (SIMPLE, Problem()))
    assert main(["small"]) == 1
    output = capsys.readouterr().out
    assert f"small: {SIMPLE.name}: ValueError: out of registers\n" in output
    assert "sm_90: 2 problems, 1 failed" in output
    monkeypatch.setattr(gpu, "CASES", gpu.CASES[:2])
    assert main(["bench", "--capability", "80"]) == 0
    assert "sm_80: 2 problems, 0 failed" in capsys.readouterr().out
