"""The native kernels against the reference in float64, on every target that this processor runs."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from cope_sweep.kernels import native, problem_of
from cope_sweep.kernels.native import abi, build, operator
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.cases import (
    SEED,
    Case,
    asked,
    assert_equals_reference,
    cases,
    long_cases,
    output_and_gradients,
    random_inputs,
)

TARGETS = ["avx512", "avx2", "portable"]
TARGETS = TARGETS[TARGETS.index(build.best_target()) :]

EVERY_KIND = [
    Case((), queries=70, head_dim=32),
    Case((CoPE(p_max=9),), queries=90, head_dim=33),
    Case((CoPE(p_max="full", per_head=True),), queries=150, before=20, head_dim=16),
    Case((CoPE(p_max=20, gate="separate"), Relative(positions=70)), queries=150, lengths=(150, 31)),
    Case((CoPE(p_max=20, gate="values"), T5(), ALiBi()), queries=100, rotated=True, dropout=0.2),
    Case((CoPE(p_max=1),), queries=65),
    Case((CoPEMLP(hidden=50),), queries=150, head_dim=7),
    Case((CoPEMLP(hidden=20, p_max=11), Relative(positions=5, far="last")), queries=150),
    Case((CoPEALiBi(slopes="learned"), CoPE(p_max=12)), queries=130, dropout=0.3, lengths=(64, 0)),
]


@pytest.fixture
def target(request, monkeypatch):
    monkeypatch.setattr(operator, "target", request.param)
    return request.param


def by_native(inputs, positions, dropout, seed):
    problem = problem_of(inputs, positions, dropout, seed)
    assert native.why_not(problem) is None
    return native.attend(problem)


def float32_problem(case):
    leaves, parameters = random_inputs(case)
    leaves = {n: x.float().requires_grad_() for n, x in leaves.items()}
    parameters = [{n: x.float().requires_grad_() for n, x in own.items()} for own in parameters]
    return problem_of(*asked(case, leaves, parameters), case.dropout, SEED)


def assert_near(case):
    """Tables with kinks: rounding may take a position across one, so only the mean is held tightly."""
    if case.smooth:
        assert_equals_reference(case, by_native, torch.float32, 1e-3, 1e-4)
    else:
        assert_equals_reference(case, by_native, torch.float32, 0.1, 1e-3)


@given(cases(most_tokens=300))
@settings(max_examples=50, deadline=None)
def test_equals_the_reference_in_output_and_every_gradient(case):
    assert_near(case)


@given(long_cases())
@settings(max_examples=10, deadline=None)
def test_long_sequences(case):
    assert_near(case)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("case", EVERY_KIND, ids=range(len(EVERY_KIND)))
def test_every_kind_on_every_target(case, target, monkeypatch):
    monkeypatch.setattr(abi, "poison_scratch", True)
    # Scratch begins as NaN, and so do torch's empty tensors: what was not written shows.
    torch.use_deterministic_algorithms(True)
    try:
        assert_near(replace(case, smooth=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shift", [-30.0, 30.0])
@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_gates_of_0_and_of_1(shift, target):
    for p_max in (1, 3, 40, 131):
        assert_near(Case((CoPE(p_max=p_max),), queries=130, shift=shift))


@pytest.mark.parametrize("gate", ["keys", "values"])
def test_more_unsaturated_tiles_than_are_held(gate):
    # HELD · TILE = 1024 keys.
    assert_near(Case((CoPE(p_max="full", gate=gate),), batch=1, queries=1200, head_dim=4, smooth=True))


@pytest.mark.parametrize("encoding", [CoPEMLP(hidden=20), CoPEALiBi(slopes="learned")], ids=lambda e: e.kind)
@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_a_bias_that_ends_as_a_straight_line(encoding, shift):
    """What the far keys' positions add to the gates' gradients is then known before they are walked."""
    assert_near(Case((encoding,), batch=1, queries=400, head_dim=8, shift=shift))


@pytest.mark.parametrize("case", EVERY_KIND, ids=range(len(EVERY_KIND)))
def test_the_same_bits_at_any_number_of_threads(case):
    # Tables come from torch's own products, which may depend on the number of threads: the operators must not.
    arguments = native.Arguments.of(float32_problem(replace(case, queries=300, lengths=None)), torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                out, lse = operator.attention(*arguments)
                results.append([out, lse, *operator.attention_backward(out.cos(), out, lse, *arguments)])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_and_goes(dtype):
    case = Case((CoPE(p_max=9),), queries=70)
    got = output_and_gradients(case, by_native, dtype)
    assert all(x.dtype == dtype for x in got.values())
    for name, wanted in output_and_gradients(case, by_native, torch.float32).items():
        assert (got[name] - wanted).abs().mean() <= 0.02 * max(1, wanted.abs().max())


def test_under_autocast_as_in_training():
    case = Case((CoPE(p_max=9), Relative(positions=7)), queries=70)
    with torch.autocast("cpu", torch.bfloat16):
        got = output_and_gradients(case, by_native, torch.float32)
    for name, wanted in output_and_gradients(case, by_native, torch.float32).items():
        torch.testing.assert_close(got[name], wanted)


def test_the_operator_is_a_good_citizen():
    case = Case((CoPE(p_max=9), Relative(positions=5), CoPEALiBi(slopes="learned")), queries=20, dropout=0.1)
    torch.library.opcheck(operator.attention, native.Arguments.of(float32_problem(case), torch.float32))


def test_compiled_by_torch_it_gives_the_same():
    case = Case((CoPE(p_max=9),), queries=40)
    leaves, parameters = random_inputs(case)
    leaves = {n: x.float().requires_grad_() for n, x in leaves.items()}
    inputs, positions = asked(case, leaves, [{n: x.float() for n, x in own.items()} for own in parameters])

    def attend(q):
        return by_native(replace(inputs, q_BHTK=q, rotated_q_BHTK=q), positions, 0.0, SEED).square().sum()

    plain, compiled = attend(leaves["q"]), torch.compile(attend, backend="aot_eager")(leaves["q"])
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(
        torch.autograd.grad(compiled, leaves["q"])[0], torch.autograd.grad(plain, leaves["q"])[0]
    )


def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quickly = "build._FLAGS[build._FLAGS.index('-O3')] = '-O0'"
    command = f"from cope_sweep.kernels.native import build; {quickly}; build.library('portable')"
    children = [subprocess.Popen([sys.executable, "-c", command]) for _ in range(2)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    assert len(list((tmp_path / "cope-sweep").iterdir())) == 1


def test_without_a_compiler_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.library("portable")


def test_what_it_cannot_compute_it_says():
    case = Case((CoPE(p_max=5), CoPEMLP(hidden=3)), queries=4)
    assert "CoPE-MLP" in native.why_not(float32_problem(case))
