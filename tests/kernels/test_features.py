"""Fused attention with what an encoding computes from the layer's input, and with weights in place of the softmax.

Outputs and the gradients of all tensors, the encoding's parameters included, against the reference in float64. The
random problems of `cases.py` have neither features nor other weights.
"""

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, attend, make_problem, query_blocks, which
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.native import build
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Dims, Relative
from cope_sweep.positions.dape import DAPE
from cope_sweep.positions.fire import FIRE
from cope_sweep.positions.fox import FoX
from cope_sweep.positions.grape_ap import GrapeAP
from cope_sweep.positions.inkling import Inkling
from cope_sweep.positions.kerple import Kerple
from cope_sweep.positions.path import PaTH
from cope_sweep.positions.stick_breaking import StickBreaking
from cope_sweep.positions.tra import TRA
from cope_sweep.positions.wall import Wall
from cope_sweep.positions.window import Window

TOLERANCES = {torch.float64: 1e-11, torch.float32: 3e-4, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""The largest norm of an error, relative to that of the result, or to 1 for a gradient that cancels."""

FUSED = [
    [FoX()],
    [FoX(), CoPE(p_max=9)],
    [Kerple()],
    [GrapeAP()],
    [GrapeAP(reading="released", size=6), ALiBi()],
    [FIRE(hidden=9)],
    [FIRE(hidden=5, threshold=20.0, activation="leaky_relu"), T5(), FoX()],
    [StickBreaking()],
    [StickBreaking(remainder="self"), ALiBi(), Relative(positions=70)],
    [Window(size=1)],
    [Window(size=20)],
    [Window(size=64), FoX()],
    [Window(size=500), CoPE(p_max=9)],
    [Window(size=30), CoPE(p_max="full")],
    [CoPEALiBi(slopes="learned"), Window(size=70)],
    [Window(size=40), T5()],
    [Kerple(), Window(size=90)],
    [StickBreaking(), Window(size=33)],
    [Inkling(curves=5, distances=40)],
    [Inkling(distances="full"), T5()],
    [Inkling(curves=3, distances=1024), Window(size=40), FoX()],
]
"""What the native kernels compute."""
OTHERS = [
    [TRA()],
    [PaTH()],
    [PaTH(), FoX()],
    [DAPE(bias="fire")],
    [FoX(scaled=False)],
    [GrapeAP(), CoPE(p_max=9)],
    [GrapeAP(), Relative(positions=70)],
    [GrapeAP(size=24)],
    [StickBreaking(), FoX()],
    [StickBreaking(), CoPE(p_max=9)],
    [CoPEMLP(hidden=5, activation="gelu")],
    [Window(size=50, chunks=True)],
    [PaTH(), Window(size=40)],
    [TRA(), Window(size=40)],
    [PaTH(), FoX(scale_positions=True)],
    [Wall()],
    [Wall(), FoX(start=8)],
    [Inkling(curves=17, distances=30)],
    [Inkling(curves=4, distances=30), CoPE(p_max=9)],
]
"""What is computed in blocks of queries."""

SIZES = [
    {"queries": 150},
    {"queries": 40, "tokens": 230},
    {"queries": 130, "lengths": (130, 7)},
    {"queries": 100, "dropout": 0.3, "lengths": (90, 64)},
    {"queries": 80, "logit_std": 5.0},
]


def ids(encodings):
    return "+".join(each.kind for each in encodings)


def results(encodings, implementation, dtype, *, queries, tokens=None, lengths=None, dropout=0.0, logit_std=1.0):
    """The output, and the gradient of each tensor, by name. Parameters are float32 where the inputs are bfloat16."""
    B, H, K, S = 2, 2, 16, tokens or queries
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng).bfloat16().double()

    dims, h_BSD = Dims(H * K, H, 1, S), normal(B, S, H * K)
    leaves = {"q": normal(B, H, queries, K) * logit_std, "k": normal(B, H, S, K), "v": normal(B, H, S, K)}
    for index, encoding in enumerate(encodings):
        parameters = {n: each.centre + normal(*each.shape) / 2 for n, each in encoding.parameters(dims).items()}
        features_BSX = encoding.features(parameters, h_BSD)
        if encoding.kind == "fox":  # gates near 1, as trained: sums of hundreds would leave few bits for the logits
            features_BSX = 3 + features_BSX
        leaves |= {f"{index}.{name}": x for name, x in parameters.items()}
        if features_BSX is not None:
            leaves[f"features{index}"] = features_BSX.view(B, S, H, -1).transpose(1, 2).bfloat16().double()
    weight_BHTK = normal(B, H, queries, K)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: x.to(wide if "." in name else dtype).requires_grad_() for name, x in leaves.items()}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    features = [leaves.get(f"features{index}") for index in range(len(encodings))]
    inputs = Inputs(q, k, v, q, k, features, lengths_B=lengths and torch.tensor(lengths))
    positions = [
        LayerEncoding(encoding, {n.partition(".")[2]: x for n, x in leaves.items() if n.startswith(f"{index}.")})
        for index, encoding in enumerate(encodings)
    ]
    out = attend(inputs, positions, dropout, torch.arange(B) + 5, implementation)
    gradients = torch.autograd.grad((out * weight_BHTK.to(dtype)).sum(), list(leaves.values()), allow_unused=True)
    return {"output": out.detach()} | {n: x for n, x in zip(leaves, gradients, strict=True) if x is not None}


NATIVE, BLOCKED = ("native", torch.float32), ("blocked", torch.float64)


def assert_equals_reference(encodings, *computed, **sizes):
    """Each of the implementations and types, with the reference computed once."""
    expected = results(encodings, "reference", torch.float64, **sizes)
    for implementation, dtype in computed:
        actual = results(encodings, implementation, dtype, **sizes)
        assert actual.keys() == expected.keys()
        for name, exact in expected.items():
            error = ((actual[name].double() - exact).norm() / exact.norm().clamp(min=1)).item()
            assert error <= TOLERANCES[dtype], (implementation, dtype, name, error)


@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
@pytest.mark.parametrize("encodings", FUSED, ids=ids)
def test_native_kernels_and_blocks_of_queries_equal_the_reference(encodings, sizes, poisoned_memory):
    assert which(encodings, Dims(32, 2, 1, 300)) == ("native", None)
    assert_equals_reference(encodings, NATIVE, BLOCKED, **sizes)


OTHER_TARGETS = [*build.TARGETS][[*build.TARGETS].index(build.best_target()) + 1 :]
"""Instruction sets that this processor has beside the best one, which the test above uses."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=pytest.mark.thorough) if target == "portable" else target for target in OTHER_TARGETS],
)
@pytest.mark.parametrize("encodings", FUSED, ids=ids)
def test_other_instruction_sets(encodings, target, poisoned_memory, monkeypatch):
    monkeypatch.setattr(build, "best_target", lambda: target)
    for sizes in SIZES[1], SIZES[3]:
        assert_equals_reference(encodings, NATIVE, **sizes)


@pytest.mark.parametrize("encodings", FUSED, ids=ids)
def test_native_kernels_compute_half_precision(encodings):
    assert_equals_reference(encodings, ("native", torch.bfloat16), ("native", torch.float16), queries=150)


# Each block is computed by the reference, so large logits are computed as there.
@pytest.mark.parametrize("sizes", SIZES[:4], ids=range(4))
@pytest.mark.parametrize("encodings", OTHERS, ids=ids)
def test_blocks_of_queries_equal_the_reference(encodings, sizes):
    assert_equals_reference(encodings, BLOCKED, **sizes)


@pytest.mark.parametrize("elements", [1, 3000])
def test_the_size_of_a_block_does_not_matter(elements, monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_ELEMENTS", elements)
    for sizes in SIZES:
        assert_equals_reference([TRA(), ALiBi()], BLOCKED, **sizes)


def test_blocks_in_bfloat16_are_computed_in_float32():
    assert_equals_reference([TRA()], ("blocked", torch.bfloat16), queries=150)


@pytest.mark.parametrize("encodings", OTHERS, ids=ids)
def test_the_others_are_computed_in_blocks_and_the_reason_is_given(encodings):
    name, reason = which(encodings, Dims(32, 2, 1, 300))
    assert name == "blocked"
    assert "(blocked)" in reason
    assert which(encodings, Dims(32, 2, 1, 300), implementation="blocked") == ("blocked", None)


@pytest.mark.parametrize("encodings", FUSED, ids=ids)
def test_the_same_bits_at_any_number_of_threads(encodings):
    computed = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            computed.append(results(encodings, "native", torch.float32, queries=300))
    finally:
        torch.set_num_threads(before)
    for name, x in computed[0].items():
        if "." not in name and not name.startswith("features"):  # theirs are sums of torch
            assert all(torch.equal(other[name], x) for other in computed[1:]), name


def test_nothing_is_left_of_a_stick_long_before_the_first_key():
    """Keys of weight 0 are not visited: 2,000 tokens whose shares are about ½ take what the nearest 130 left."""
    sizes = {"queries": 70, "tokens": 2000}
    assert_equals_reference([StickBreaking(remainder="self")], NATIVE, **sizes)


def test_a_bias_that_ignores_the_query_is_no_score_of_stick_breaking():
    """c_i of FoX cancels in a softmax only."""
    q = torch.zeros(1, 2, 20, 4)
    inputs = Inputs(q, q, q, q, q, [None, torch.zeros(1, 2, 20, 1)])
    problem = make_problem(inputs, [LayerEncoding(StickBreaking()), LayerEncoding(FoX())], 0.0, None)
    assert "stands for a score in the softmax only" in problem
    assert isinstance(
        make_problem(inputs, [LayerEncoding(StickBreaking()), LayerEncoding(ALiBi())], 0.0, None), Arguments
    )


@pytest.mark.parametrize("encoding", [Kerple(), FIRE()], ids=lambda encoding: encoding.kind)
def test_biases_of_a_model_in_half_precision_are_computed_in_float32(encoding):
    """Distances above 256 are not exact in bfloat16."""
    parameters = {n: torch.full(x.shape, x.centre or 0.5) for n, x in encoding.parameters(Dims(8, 2, 1, 700)).items()}
    q = torch.zeros(1, 2, 700, 4, dtype=torch.bfloat16)
    exact = vars(encoding.term({n: x.bfloat16().float() for n, x in parameters.items()}, q, 700, None))
    half = vars(encoding.term({n: x.bfloat16() for n, x in parameters.items()}, q, 700, None))
    for name, x in exact.items():
        assert half[name].dtype == torch.float32
        torch.testing.assert_close(half[name], x)


@pytest.mark.parametrize(
    "sizes", SIZES[:4], ids=range(4)
)  # with large logits, the gradient of b₂ is 0 but for rounding
def test_cope_mlp_in_a_window(sizes, poisoned_memory):
    assert_equals_reference([CoPEMLP(hidden=5), Window(size=70), Relative(positions=9)], NATIVE, **sizes)


@pytest.mark.parametrize("encodings", [[Window(size=10)], [Window(size=10), CoPE(p_max=4)]], ids=ids)
def test_gradients_of_keys_outside_the_window_are_0(encodings):
    """Not subnormal numbers, with which products of matrices take many times as long."""
    q, k, v = (torch.randn(1, 1, 60, 16, requires_grad=True) for _ in range(3))
    positions = [
        LayerEncoding(each, {name: torch.ones(p.shape) for name, p in each.parameters(Dims(16, 1, 1, 60)).items()})
        for each in encodings
    ]
    attended = attend(Inputs(q, k, v, q, k, [None] * len(encodings)), positions, implementation="native")
    (attended[:, :, 40] * 1e-3).sum().backward()
    for x in (k, v):
        assert (x.grad[:, :, 31:41] != 0).all()
        assert (x.grad[:, :, :31] == 0).all()
        assert (x.grad[:, :, 41:] == 0).all()


def test_a_bias_in_float16_beside_a_window_is_computed_in_float32():
    q, b = torch.zeros(1, 2, 40, 8, dtype=torch.float16), torch.ones(32, 2, dtype=torch.float16)
    positions = [LayerEncoding(T5(), {"b": b}), LayerEncoding(Window(size=5))]
    problem = make_problem(Inputs(q, q, q, q, q, [None, None]), positions, 0.0, None)
    assert problem.distance_bias.dtype == torch.float32
    assert problem.distance_bias[0].tolist() == pytest.approx([1, 1, 1, 1, 1, -1e30])


@pytest.mark.parametrize("encodings", [[Window(size=10)], [Window(size=10), CoPE(p_max=4)]], ids=ids)
def test_tiles_before_the_window_are_not_visited(encodings):
    """A key that is not a number, 3 tiles before the query."""
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    k[:, :, 0] = torch.nan
    positions = [
        LayerEncoding(each, {name: torch.ones(p.shape) for name, p in each.parameters(Dims(16, 1, 1, 300)).items()})
        for each in encodings
    ]
    attended = attend(Inputs(q, k, v, q, k, [None] * len(encodings)), positions, implementation="native")
    assert attended[:, :, 128:].isfinite().all()
