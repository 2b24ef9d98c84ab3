"""The Triton kernels as NumPy, on the CPU, against a reference in float64: output and every gradient.

Skipped where Triton does not interpret: `test_triton.py` runs this file in a process of its own, with TRITON_INTERPRET=1,
which must be set before Triton is imported.

Shapes: B batch, H heads, T queries (the last of S), K head dim, P positions, R distances.
"""

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_triton.py runs it so", allow_module_level=True)
pytest.importorskip("triton")

from cope_sweep.kernels import Problem, problem_of, triton_attention
from cope_sweep.kernels.dropout import keep
from cope_sweep.kernels.triton_attention import Tiles, attention
from cope_sweep.positions import ALiBi, CoPE, CoPEALiBi, Relative
from cope_sweep.positions.terms import DistanceBias
from tests.kernels import cases

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of the largest entry, or of 1."""


@dataclass(frozen=True)
class Case:
    B: int = 1
    H: int = 1
    T: int = 37
    S: int | None = None
    K: int = 16
    P: int | None = 8
    slope: bool = False
    own_gates: bool = False
    R: int | None = None
    far_last: bool = False
    distance_slope: bool = False
    lengths: tuple[int, ...] | None = None
    dropout: float = 0.0
    sharpness: float = 1.0
    shift: float = 0.0
    """Added to all gates' logits."""
    dtype: torch.dtype = torch.float32


CASES = {
    "cope": Case(H=2),
    "one token": Case(T=1),
    "two tokens": Case(T=2, P=2),
    "whole blocks": Case(T=48, P=4),
    "never saturates": Case(P=64),
    "saturates at once": Case(P=1),
    "saturates late": Case(T=48, P=4, shift=-4.0),
    "two embeddings": Case(P=2),
    "odd head dim": Case(K=24),
    "tiny head dim": Case(K=5),
    "large head dim": Case(K=80, T=20),
    "all gates 0": Case(shift=-40.0),
    "all gates 1": Case(shift=40.0, P=20),
    "all gates a half": Case(sharpness=0.0, P=12),
    "gates 0 or 1": Case(sharpness=60.0, P=6),
    "gates of their own": Case(own_gates=True, K=12),
    "gates of their own, saturated": Case(own_gates=True, P=3, T=48),
    "relative": Case(P=None, R=37),
    "relative, one": Case(P=None, R=1),
    "relative, near only": Case(P=None, R=5),
    "relative, capped": Case(P=None, R=5, far_last=True),
    "relative, capped at one": Case(P=None, R=1, far_last=True),
    "cope and relative": Case(P=4, R=7),
    "cope and relative, capped": Case(P=4, R=7, far_last=True, T=48),
    "cope-alibi": Case(P=None, slope=True),
    "cope-alibi, gates of its own": Case(P=None, slope=True, own_gates=True, H=2),
    "cope and cope-alibi": Case(P=5, slope=True),
    "alibi": Case(P=None, distance_slope=True, H=2),
    "cope and alibi": Case(P=3, distance_slope=True),
    "no position": Case(P=None),
    "padding": Case(B=3, lengths=(0, 37, 18), R=6),
    "padding of cope-alibi": Case(B=2, lengths=(5, 33), P=None, slope=True),
    "dropout": Case(dropout=0.3, H=2),
    "dropout, saturated": Case(dropout=0.6, P=3, T=48, B=2),
    "fewer queries than keys": Case(T=5, S=39, P=4),
    "fewer queries, padded": Case(B=2, T=20, S=39, P=4, lengths=(30, 39), R=9),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16, P=3, own_gates=True),
    "everything": Case(
        H=2, T=24, P=6, slope=True, own_gates=True, R=7, far_last=True, distance_slope=True, dropout=0.2
    ),
}

DIFFERENTIABLE = ("q", "k", "v", "gate_q", "gate_k", "z", "m", "relative")


def tensors(case, seed=0):
    """The case's inputs, in float64, of values that its type holds."""
    rng = torch.Generator().manual_seed(seed)
    S = case.S or case.T

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(case.dtype).double()

    x = {"q": draw(case.B, case.H, case.T, case.K), "k": draw(case.B, case.H, S, case.K)}
    x["q"] *= case.sharpness
    if case.shift:
        x["q"][..., 0], x["k"][..., 0] = case.shift * case.K**0.5, 1.0
    x["v"] = draw(case.B, case.H, S, case.K)
    if case.own_gates:
        x["gate_q"], x["gate_k"] = draw(case.B, case.H, case.T, case.K), draw(case.B, case.H, S, case.K)
    if case.P:
        x["z"] = draw(case.B, case.H, case.T, case.P)
    if case.slope:
        x["m"] = 0.1 * draw(case.H)
    if case.R:
        x["relative"] = draw(case.B, case.H, case.T, case.R)
    if case.distance_slope:
        x["distance_slope"] = -0.2 * draw(case.H).abs()
    return x


def reference(x, case, seed):
    """The equation, with nothing spared."""
    (B, H, T, K), S = x["q"].shape, x["k"].shape[2]
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    s = x["q"] @ x["k"].mT / K**0.5
    gate_logits = x["gate_q"] @ x["gate_k"].mT / K**0.5 if case.own_gates else s
    p = (gate_logits.sigmoid() * visible).flip(-1).cumsum(-1).flip(-1)
    if case.P:
        at = p.clamp(max=case.P - 1)
        floor = at.detach().floor()
        below, above = x["z"].gather(-1, floor.long()), x["z"].gather(-1, at.detach().ceil().long())
        s = s + below + (at - floor) * (above - below)
    if case.slope:
        s = s + x["m"][:, None, None] * p
    if case.R:
        bias = x["relative"].gather(-1, distance.clamp(0, case.R - 1).expand(B, H, T, S))
        s = s + (bias if case.far_last else bias * (distance < case.R))
    if case.distance_slope:
        s = s + x["distance_slope"][:, None, None] * distance
    a = s.masked_fill(~visible, -torch.inf).softmax(-1)
    if case.dropout:
        keys = torch.arange(S)
        kept = keep(seed, case.dropout, torch.arange(B * H), keys[S - T :], keys)
        a = a * kept.view(B, H, T, S) / (1 - case.dropout)
    o = a @ x["v"]
    if case.lengths is None:
        return o
    is_token = torch.arange(S - T, S) < torch.tensor(case.lengths)[:, None]
    return o.where(is_token[:, None, :, None], 0)


def compare(case, seed=0):
    x = tensors(case, seed)
    asked = [name for name in DIFFERENTIABLE if name in x]
    rng = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(x["q"].shape, generator=rng, dtype=torch.float64).to(case.dtype)
    dropout_seed = torch.tensor(2**61 + seed)

    exact = {name: value.clone().requires_grad_(name in asked) for name, value in x.items()}
    expected = reference(exact, case, dropout_seed)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), [exact[name] for name in asked])

    given = {name: value.to(case.dtype).requires_grad_(name in asked) for name, value in x.items()}
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    ours = attention(
        **given,
        lengths=lengths,
        seed=dropout_seed,
        scale=case.K**-0.5,
        dropout=case.dropout,
        far_last=case.far_last,
    )
    gradients = torch.autograd.grad((ours * weight).sum(), [given[name] for name in asked])
    for name, mine, theirs in zip(["o", *asked], [ours, *gradients], [expected, *expected_gradients], strict=True):
        assert mine.dtype == case.dtype
        assert mine.shape == theirs.shape
        error = (mine.double() - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
        assert error <= TOLERANCE[case.dtype], f"{name} is off by {error:.1e}"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory is NaN, so that what is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_reference_in_output_and_every_gradient(case):
    compare(case)


UNEVEN = Tiles(
    edge=16,
    forward={"BLOCK_T": 32, "BLOCK_S": 16, "PLAIN_S": 32},
    backward_rows={"BLOCK_T": 16, "PLAIN_S": 32},
    backward_keys={"BLOCK_T": 16, "BLOCK_S": 32, "PLAIN_T": 32},
)


@pytest.mark.parametrize("name", ["cope", "cope and relative, capped", "padding", "everything", "saturates late"])
def test_tiles_of_other_sizes(monkeypatch, name):
    monkeypatch.setattr(triton_attention, "SMALL", UNEVEN)
    compare(replace(CASES[name], H=1, T=75, lengths=CASES[name].lengths and (0, 75, 40)), seed=5)


@pytest.mark.parametrize("name", ["cope", "cope-alibi", "padding", "gates of their own, saturated"])
def test_backward_in_several_launches(monkeypatch, name):
    monkeypatch.setattr(triton_attention, "ROWS_PER_LAUNCH", 16)
    compare(CASES[name], seed=6)


def by_triton(inputs, positions, dropout, seed):
    problem = problem_of(inputs, positions, dropout, seed)
    assert triton_attention.why_not(problem) is None
    return triton_attention.attend(problem)


@pytest.mark.parametrize(
    ("encodings", "options"),
    [
        ((CoPE(p_max=4, gate="values"),), {"rotated": True}),
        ((CoPE(p_max=4, gate="separate", per_head=True),), {}),
        ((CoPE(p_max="full"),), {"rotated": True}),
        ((CoPE(p_max=5, gate_after_rotation=True, scale_positions=True),), {"rotated": True}),
        ((CoPE(p_max=3), Relative(positions=6, far="last")), {"dropout": 0.2}),
        ((CoPEALiBi(slopes="learned"), ALiBi()), {"lengths": (9, 20)}),
        ((Relative(),), {"before": 3}),
    ],
)
def test_computes_the_problems_that_encodings_pose(encodings, options):
    case = cases.Case(encodings, **{"queries": 20, **options})
    cases.assert_equals_reference(case, by_triton, torch.float32, 2e-5)


def test_tensors_need_not_be_contiguous():
    x = {name: value.float() for name, value in tensors(Case(T=20)).items()}
    turned = {name: value.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for name, value in x.items()}
    torch.testing.assert_close(attention(**turned, scale=0.3), attention(**x, scale=0.3))


def test_gradients_are_the_same_at_every_run():
    x = {name: value.float().requires_grad_() for name, value in tensors(CASES["cope"]).items()}
    first, second = (torch.autograd.grad(attention(**x, scale=0.3).square().sum(), x.values()) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_operators_obey_torchs_rules_of_operators():
    x = {name: value.float().requires_grad_() for name, value in tensors(Case(T=5)).items()}
    arguments = (x["q"], x["k"], x["v"], None, None, x["z"], *[None] * 5, 0.25, 0.0, False)
    torch.library.opcheck(
        torch.ops.cope_sweep.triton_attention, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q_BHTK": torch.zeros(1, 1, 3, 8, dtype=torch.float64)}, "float64"),
        ({"k_BHSK": torch.zeros(1, 1, 3, 8, dtype=torch.float16)}, "one type"),
        ({"v_BHSK": torch.zeros(1, 1, 3, 9)}, "one head dim"),
        ({"distance_bias": DistanceBias(torch.zeros(1, 3))}, "T5"),
        ({"look_up": SimpleNamespace(z_BHQP=torch.zeros(1, 1, 3, 4, dtype=torch.float64))}, "table"),
    ],
)
def test_says_why_not(change, reason):
    q = torch.zeros(1, 1, 3, 8)
    problem = Problem(q, q, q, 1.0)
    assert triton_attention.why_not(problem) is None
    assert reason in triton_attention.why_not(replace(problem, **change))
