"""The Triton kernels on a GPU: output and every gradient against float64, at the sizes and layouts of models.

On a machine without a GPU, TRITON_INTERPRET=1 runs the same cases at tiny sizes in Triton's interpreter, so that the
tests themselves are proved; without it they are skipped. `make gpu` runs this file first, and `make gpu DEVICE=cpu` so.
Needs torch, Triton and pytest only.
"""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device here, and TRITON_INTERPRET is not 1", allow_module_level=True)
pytest.importorskip("triton")

from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_problems import DTYPES, Problem

from cope_sweep.kernels import triton_attention
from cope_sweep.kernels.triton_attention import launch, workspace

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
ON_GPU = DEVICE == "cuda"


BASE = Problem(batch=2, heads=4, tokens=512, projection=True)
SAME = {"batch": 1, "heads": 2}
BY_NAME = {
    **{f"{dtype}, head dim {size}": replace(BASE, dtype=dtype, head_dim=size) for dtype in DTYPES for size in (32, 64, 128, 256)},
    **{f"head dim {size}": replace(BASE, head_dim=size) for size in (8, 24, 80, 96)},
    **{f"p_max {p}": replace(BASE, p_max=p) for p in (1, 2, 16, 257, "full")},
    **{f"mean gate {gate}": replace(BASE, mean_gate=gate) for gate in (0.02, 0.1, 0.25, 0.75, 0.9, 0.98)},
    **{f"{dtype}, gates saturated at {gate}": replace(BASE, mean_gate=gate, dtype=dtype) for dtype in DTYPES for gate in (1e-7, 1 - 1e-7)},
    **{f"{tokens} tokens": replace(BASE, **SAME, tokens=tokens) for tokens in (1, 2, 31, 127, 129, 1023, 2048)},
    "contiguous": replace(BASE, projection=False),
    "a table for each head": replace(BASE, per_head=True),
    "keys before a rotation": replace(BASE, gate="keys", projection=False),
    "values as gate keys": replace(BASE, gate="values"),
    "separate gate keys": replace(BASE, gate="separate"),
    "separate gate keys, float32": replace(BASE, gate="separate", dtype="float32"),
    "gate bias": replace(BASE, gate_bias=True),
    "gate bias, separate gate keys": replace(BASE, gate_bias=True, gate="separate"),
    "gate bias, cope-mlp": replace(BASE, gate_bias=True, p_max=None, knots=7),
    "relative": replace(BASE, p_max=None, relative="full"),
    "relative, near only": replace(BASE, p_max=None, relative=40),
    "cope and relative, capped": replace(BASE, relative=40, far="last"),
    "alibi": replace(BASE, p_max=None, alibi=True),
    "cope and alibi": replace(BASE, alibi=True),
    "cope-alibi": replace(BASE, p_max=None, slope=True),
    "cope and cope-alibi": replace(BASE, slope=True),
    "t5": replace(BASE, p_max=None, buckets=64),
    "cope-mlp": replace(BASE, p_max=None, knots=7),
    "cope-mlp, 64 units": replace(BASE, p_max=None, knots=64, gate="separate"),
    "cope-mlp, float32": replace(BASE, p_max=None, knots=20, dtype="float32"),
    "no position": replace(BASE, p_max=None),
    "dropout": replace(BASE, dropout=0.1),
    "dropout, float32": replace(BASE, dropout=0.5, dtype="float32"),
    "padding": replace(BASE, batch=4, lengths=(512, 0, 1, 300)),
    "padding and relative": replace(BASE, lengths=(17, 500), relative="full"),
    "cached keys": replace(BASE, tokens=40, cached=700, projection=False),
    "cached keys, padding": replace(BASE, tokens=260, cached=252, lengths=(512, 300), projection=False),
    "tables in float32": replace(BASE, float32_tables=True),
    "tables in float32, relative": replace(BASE, p_max=None, relative=40, per_head=True, float32_tables=True),
    **{f"{dtype}, p_max full": replace(BASE, dtype=dtype, p_max="full") for dtype in ("float16", "float32")},
    **{f"{dtype}, mean gate {gate}": replace(BASE, dtype=dtype, mean_gate=gate) for dtype in ("float16", "float32") for gate in (0.02, 0.98)},
    **{f"{dtype}, padding": replace(BASE, dtype=dtype, lengths=(17, 500)) for dtype in ("float16", "float32")},
    "dropout, float16": replace(BASE, dropout=0.1, dtype="float16"),
    "gates of one half": replace(BASE, mean_gate=0.5, tokens=1024),
    "unaligned rows": replace(BASE, heads=3, head_dim=5),
    "head dim 1": replace(BASE, heads=3, head_dim=1),
    "all at once": replace(
        BASE, slope=True, relative=30, far="last", alibi=True, gate="values", dropout=0.2, lengths=(512, 400)
    ),
}  # fmt: skip
BELOW_A_UNIT = "float32, gates saturated at 1e-07"
"""The kernels' positions are multiples of 2⁻¹⁸, to which such gates are rounded: the gradient of e, which is as small as they
are, was off by 1.9 × what float32 explains on an H200."""
LONG = {
    "4096 tokens": replace(BASE, **SAME, tokens=4096),
    "4096 tokens, never saturating": replace(BASE, **SAME, tokens=4096, p_max="full"),
    "4096 tokens, never saturating, float32": replace(BASE, **SAME, tokens=4096, p_max="full", dtype="float32"),
    "4096 tokens, gates near 0": replace(BASE, **SAME, tokens=4096, mean_gate=0.02),
    "4096 tokens, padding": replace(BASE, heads=2, tokens=4096, lengths=(4096, 1000)),
    "4096 tokens, head dim 128": replace(BASE, **SAME, tokens=4096, head_dim=128),
    "4096 tokens, relative": replace(BASE, **SAME, tokens=4096, p_max=None, relative="full"),
    "4096 tokens, never saturating, padding, dropout": replace(
        BASE, heads=2, tokens=4096, p_max="full", lengths=(4096, 1000), dropout=0.1
    ),
    "16384 tokens, gates near 0, dropout": replace(BASE, **SAME, tokens=16384, mean_gate=0.02, dropout=0.1),
    "16384 tokens, float32": replace(BASE, batch=1, heads=1, tokens=16384, dtype="float32"),
    "16384 keys for 17 queries": replace(BASE, **SAME, tokens=17, cached=16367, projection=False),
    "16384 tokens": replace(BASE, **SAME, tokens=16384),
    "16384 tokens, float16, separate gate keys": replace(BASE, **SAME, tokens=16384, dtype="float16", gate="separate"),
    "16384 tokens, never saturating": replace(BASE, batch=1, heads=1, tokens=16384, p_max="full"),
}
IN_THE_INTERPRETER = (
    "float32, head dim 32", "float16, head dim 32", "bfloat16, head dim 128", "head dim 24", "p_max 1", "p_max full",
    "mean gate 0.02", "mean gate 0.98", "bfloat16, gates saturated at 1e-07", "bfloat16, gates saturated at 0.9999999",
    "a table for each head", "keys before a rotation", "separate gate keys", "gate bias", "relative", "cope and relative, capped",
    "alibi", "cope-alibi", "t5", "cope-mlp", "padding", "cached keys, padding", "tables in float32", "all at once",
)  # fmt: skip
"""The others differ from these by their size alone."""
CASES = {**BY_NAME, **LONG} if ON_GPU else {name: BY_NAME[name].tiny() for name in IN_THE_INTERPRETER}


def attend(problem):
    return computed_by(problem.attend, *problem.leaves(DEVICE))


def assert_right(problem, at_most=1.0):
    leaves, weight = problem.leaves(DEVICE)
    assert triton_attention.why_not(problem.build(leaves), weight.device) is None
    computed = computed_by(problem.attend, leaves, weight)
    assert problem.expected(leaves, weight).wrong(computed, at_most) is None


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_float64(name):
    assert_right(CASES[name], at_most=3.0 if name == BELOW_A_UNIT else 1.0)


NEAR_AND_FAR = (
    "mean gate 0.02", "mean gate 0.98", "float32, head dim 32", "bfloat16, head dim 128", "cope and relative, capped", "t5", "cope-mlp",
    "padding", "cached keys, padding", "separate gate keys", "dropout", "cope and alibi", "p_max full", "4096 tokens",
    "4096 tokens, padding", "16384 tokens",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NEAR_AND_FAR if name in CASES])
def test_near_and_far_kernels_equal_float64(name, monkeypatch):
    monkeypatch.setattr(launch, "NEAR_AND_FAR", True)
    assert_right(CASES[name])


@pytest.mark.skipif(not ON_GPU, reason="compiled kernels only")
@pytest.mark.parametrize(
    "name", ["bfloat16, head dim 64", "4096 tokens", "dropout", "p_max full", "relative", "all at once"]
)
def test_gradients_have_the_same_bits_in_every_run(name):
    first, second = attend(CASES[name]), attend(CASES[name])
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.skipif(not ON_GPU, reason="a CUDA graph needs a GPU")
def test_forward_and_backward_are_captured_in_a_cuda_graph():
    problem = BASE
    leaves, weight = problem.leaves(DEVICE)
    expected = attend(problem)
    given = {name: x.detach().requires_grad_() for name, x in leaves.items()}

    def step():
        out = problem.attend(given)
        return [out, *torch.autograd.grad(out, list(given.values()), weight)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for value in results:
        value.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for name, value in zip(expected, results, strict=True):
        assert torch.equal(value, expected[name]), name


def test_launches_for_some_queries_of_a_head(monkeypatch):
    # So little scratch memory that a launch has some queries only, and gradients of keys are added up.
    monkeypatch.setattr(workspace, "MIN_ROWS", 256 if ON_GPU else 128)
    monkeypatch.setattr(workspace, "MIN_BYTES", 1)
    monkeypatch.setattr(launch, "_bytes", lambda _: 0)
    problem = replace(BASE, **SAME, tokens=1024, p_max="full") if ON_GPU else replace(BASE.tiny(), tokens=150, p_max=4)
    assert_right(problem)


@pytest.mark.skipif(not ON_GPU, reason="too many heads for the interpreter")
def test_more_heads_than_a_grid_has():
    assert_right(replace(BASE, batch=4100, heads=16, tokens=16, projection=False))


def test_a_gradient_with_strides_of_0():
    problem = BASE if ON_GPU else BASE.tiny()
    leaves, weight = problem.leaves(DEVICE)
    ones = torch.ones((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
    assert problem.wrong(leaves, ones, computed_by(problem.attend, leaves, ones)) is None


@pytest.mark.skipif(not ON_GPU, reason="memory of a GPU")
def test_memory_grows_with_the_tokens_and_not_with_the_table():
    def scratch(batch):
        """The memory of an attention, forward and backward, beside its inputs and results."""
        problem = replace(BASE, batch=batch, heads=16, tokens=4096, p_max="full")
        leaves, weight = problem.leaves(DEVICE)
        attend(problem)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        computed = computed_by(problem.attend, leaves, weight)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in computed.values())

    # Scratch memory is that of `MIN_ROWS` queries: 16 bytes for each of 4,097 entries, 1.0 GiB. The product q·e would alone
    # take 2 GiB for 64 heads and 4 GiB for 128.
    of_64_heads, of_128_heads = scratch(4), scratch(8)
    assert of_64_heads < 1.1 * 2**30
    assert of_128_heads < of_64_heads + 64 * 2**20
