"""Kernels that are wrong on this machine are found at their first use, and are not used."""

import logging

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, attend, dispatch, native, operator, reference, self_check, which
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.positions import CoPE, Dims

CPU = torch.device("cpu")
MLP = ("segment_slope", "segment_intercept", "knots")
SHARE = ("share_distance", "share_query", "share_slope", "share_intercept", "share_knots")
KINDS = [
    (),
    ("e",),
    ("e", "gate_k"),
    ("e", "base_q"),
    ("e", "gate_bias"),
    ("e", "gate_k", "gate_bias"),
    (*MLP, "gate_bias"),
    ("m", "gate_bias"),
    ("e", "base_q", "gate_k", "relative"),
    MLP,
    (*MLP, "relative", "base_q"),
    (*MLP, "gate_k"),
    ("m", "distance_bias", "distance_slope"),
    ("e", "m", "relative"),
    ("key_bias",),
    ("e", "base_q", "gate_k", "key_bias"),
    ("base_q", "gate_k", "m", "log_gates"),
    SHARE,
    ("stick_breaking",),
    ("distance_slope", "stick_breaking", "keep_remainder"),
]
DIMS = Dims(8, 2, 1, 40)


@pytest.fixture(autouse=True)
def new_process():
    """Nothing was checked or logged in this process."""
    self_check._checked.cache_clear()
    dispatch._cached_log.cache_clear()
    yield
    self_check._checked.cache_clear()
    dispatch._cached_log.cache_clear()


@pytest.fixture
def checks(monkeypatch):
    """What is checked."""
    found = []
    original = self_check.relative_errors
    monkeypatch.setattr(self_check, "relative_errors", lambda *key: [found.append(key), original(*key)][1])
    return found


def problem(tokens=40):
    q, k, v, e = (torch.randn(1, 2, tokens, 4, generator=torch.Generator().manual_seed(n)) for n in range(4))
    tensors = [x.requires_grad_() for x in (q, k, v, e[0, 0, :5].clone())]
    return tensors, (Inputs.plain(*tensors[:3]), [LayerEncoding(CoPE(p_max=5), {"e": tensors[3]})])


def assert_equals_reference(attend):
    tensors, given = problem()
    expected, out = reference(*given), attend(*given)
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), tensors) for x in (out, expected)), strict=True):
        torch.testing.assert_close(one, other)


def wrong(monkeypatch, function, place, factor=1.1):
    """The native kernel's function multiplies one of its results by a factor."""
    original = getattr(native, function)

    def changed(*arguments):
        original(*arguments)
        results = arguments[-1] if function == "backward" else arguments[1:]
        results[place].mul_(factor)

    monkeypatch.setattr(native, function, changed)


@pytest.mark.parametrize("more", [(), ("lengths", "dropout")], ids=["", "dropout and lengths"])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("dtype", self_check.TOLERANCES, ids=str)
def test_every_kind_of_problem_is_made_and_passes(monkeypatch, dtype, kind, more):
    given = []
    original = operator.attention
    monkeypatch.setattr(
        operator, "attention", lambda problem, kernel: [given.append(problem), original(problem, kernel)][1]
    )
    errors = self_check.relative_errors("native", CPU, dtype, 32, kind + more)
    names = [name for name in self_check._OPTIONAL if getattr(given[0], name) is not None]
    names += [name for name in ("dropout", *self_check._FLAGS) if getattr(given[0], name)]
    assert {*names} == {*kind, *more}
    assert given[0].q.dtype == dtype
    assert max(errors.values()) < self_check.TOLERANCES[dtype] / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_that_cancel_in_half_precision_are_not_wrong(dtype):
    """FIRE's factor and c: at head dim 12, beside FoX and dropout, they are sums in which nearly all cancels."""
    names = (*SHARE, "key_bias", "dropout", "lengths")
    errors = self_check.relative_errors("native", CPU, dtype, 12, names)
    assert max(errors.values()) < self_check.TOLERANCES[dtype] / 2


def test_each_kind_of_problem_is_checked_once_in_a_process(checks):
    for _ in range(2):
        assert_equals_reference(attend)
    assert [key[-1] for key in checks] == [("e",)]
    with torch.no_grad():
        attend(*problem()[1], dropout=0.1)
    assert checks[-1][-1] == ("e", "dropout")


@pytest.mark.parametrize(
    ("function", "place", "named"),
    [
        ("forward", 0, "output by 0.1"),
        ("backward", 1, "gradient of k by 0.1"),
        ("backward", 5, "gradient of 0.e by 0.1"),
    ],
)
def test_a_wrong_kernel_is_not_used_and_named_once(monkeypatch, caplog, function, place, named):
    wrong(monkeypatch, function, place)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_equals_reference(attend)
    [warning] = caplog.messages
    assert "native is not used" in warning
    assert named in warning
    name, reason = which([CoPE(p_max=5)], DIMS)
    assert name == "reference"
    assert named in reason


def test_a_kernel_that_was_asked_for_is_checked_too(monkeypatch):
    wrong(monkeypatch, "backward", 2)
    assert_equals_reference(lambda *given: attend(*given, implementation="native"))
    assert which([CoPE(p_max=5)], DIMS, implementation="native")[0] == "blocked"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_wrong(monkeypatch, value):
    wrong(monkeypatch, "forward", 0, value)
    assert_equals_reference(attend)


def test_a_kernel_that_fails_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(native, "backward", lambda *_: 1 / 0)
    assert_equals_reference(attend)
    assert "ended with ZeroDivisionError: division by zero; falling back to PyTorch (reference)" in caplog.text


def test_only_the_kinds_of_problems_that_are_wrong_fall_back(monkeypatch):
    original = native.backward

    def changed(given, *rest):
        original(given, *rest)
        if given.gate_k is not None:
            rest[-1][4].zero_()

    monkeypatch.setattr(native, "backward", changed)
    assert which([CoPE(p_max=5)], DIMS) == ("native", None)
    assert which([CoPE(p_max=5, gate="separate")], DIMS)[0] == "reference"


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_check_is_independent_of_the_caller_s_modes(checks, mode):
    with mode():
        x = torch.empty(1, 2, 40, 4)
        assert self_check.why_not("native", Arguments(x, x, x), CPU) is None
    assert len(checks) == 1


def test_the_check_draws_no_random_numbers():
    before = torch.get_rng_state()
    attend(*problem()[1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic", "is_wrong"),
    [(False, True), (True, False), *(pytest.param(each, each, marks=pytest.mark.thorough) for each in (False, True))],
)
def test_compiled_code_uses_only_kernels_that_passed(monkeypatch, is_wrong, dynamic):
    if is_wrong:
        wrong(monkeypatch, "forward", 0)
    torch.compiler.reset()
    assert_equals_reference(torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager"))
    assert which([CoPE(p_max=5)], DIMS)[0] == ("reference" if is_wrong else "native")


def test_a_wrong_triton_kernel_is_not_used(monkeypatch):
    """As on a machine with a GPU whose kernels are wrong: `test_triton_interpreted.py` checks real ones."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    checked = []

    def errors(*key):
        checked.append(key)
        return {"output": 0.001, "gradient of k": 0.2}

    monkeypatch.setattr(self_check, "relative_errors", errors)
    dims = Dims(64, 2, 1, 300)
    name, reason = which([CoPE(gate="separate")], dims, device="cuda", dtype=torch.bfloat16, dropout=0.1)
    assert name == "blocked"
    assert reason == (
        "triton is not used, its results on this Some GPU are wrong (relative errors in a small problem: gradient of k by "
        "0.2); falling back to PyTorch (blocked)"
    )
    assert checked == [("triton", torch.device("cuda", 0), torch.bfloat16, 32, ("gate_k", "e", "dropout"))]
