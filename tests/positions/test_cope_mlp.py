import pytest
import torch
from torch.nn.functional import gelu

from cope_sweep.positions import Attention, CoPE, CoPEMLP, Dims
from cope_sweep.positions.gelu_units import weighted_units
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestCoPEMLP(EncodingContract):
    specs = [
        CoPEMLP(hidden=5),
        CoPEMLP(hidden=3, layers=(0,), p_max=4, gate="values"),
        CoPEMLP(hidden=5, activation="gelu", scale_positions=True),
        [CoPEMLP(hidden=5, rotated_query=True), "rope"],
        CoPEMLP(hidden=5, p_max=4, gate_bias=-1.0, gate_bias_learned=True),
    ]
    extrapolates = True


@pytest.mark.parametrize(("activation", "function"), [("relu", torch.relu), ("gelu", gelu)])
def test_is_q_times_the_mlp_of_the_position(activation, function):
    attention = naive.attention(heads=2, tokens=6, head_dim=3)
    mlp = CoPEMLP(hidden=4, activation=activation)
    rng = torch.Generator().manual_seed(1)
    w = {n: torch.randn(p.shape, generator=rng).double() for n, p in mlp.parameters(Dims(6, 2, 1, 9)).items()}
    score = mlp.score(w, attention)
    p = CoPE().positions({}, attention)
    for h in range(2):
        for i in range(6):
            for j in range(i + 1):
                hidden = function(w["w1"] * p[0, h, i, j] + w["b1"])
                e = w["w2"] @ hidden + w["b2"]
                torch.testing.assert_close(score[0, h, i, j], attention.q_BHQK[0, h, i] @ e)


def scores_and_leaves(seed, p_max=None):
    """A function from (logits, q, w1, b1, w2, b2) to the scores, the same by the equation, and random arguments."""
    B, H, Q, K, N = 2, 1, 5, 3, 6
    rng = torch.Generator().manual_seed(seed)
    shapes = ((B, H, Q, Q), (B, H, Q, K), (N,), (N,), (K, N), (K,))
    leaves = [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]
    mlp = CoPEMLP(hidden=N, p_max=p_max)
    visible = torch.ones(Q, Q, dtype=torch.bool).tril()

    def attention(logits, q):
        return Attention(q, q, q, logits, visible)

    def by_table(logits, q, w1, b1, w2, b2):
        return mlp.score({"w1": w1, "b1": b1, "w2": w2, "b2": b2}, attention(logits, q))

    def by_equation(logits, q, w1, b1, w2, b2):
        p = mlp.positions({}, attention(logits, q))[..., None]
        if p_max is not None:
            p = p.clamp(max=p_max - 1)
        return (torch.relu(w1 * p + b1) @ (q @ w2)[..., None])[..., 0] + (q @ b2)[..., None]

    return by_table, by_equation, leaves


@pytest.mark.parametrize("p_max", [None, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_table_has_the_values_and_gradients_of_the_equation(seed, p_max):
    """Its knots move with w₁ and b₁: their gradients, too, are those of the equation and of finite differences."""
    by_table, by_equation, leaves = scores_and_leaves(seed, p_max)
    weight = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(by_table(*leaves), by_equation(*leaves))
    expected, actual = (
        torch.autograd.grad((score(*leaves) * weight).sum(), leaves) for score in (by_equation, by_table)
    )
    torch.testing.assert_close(actual, expected)
    assert torch.autograd.gradcheck(by_table, leaves)


def test_positions_that_no_knot_divides_and_units_without_a_knot():
    """All units off, all on, w₁ = 0, equal knots, and a position of exactly a knot, which counts as right of it."""
    w1 = torch.tensor([1.0, -1.0, 0.0, 0.0, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    b1 = torch.tensor([5.0, -5.0, 1.0, -1.0, -1.0, -0.5], dtype=torch.float64, requires_grad=True)
    w2 = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]], dtype=torch.float64)
    q = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    logits = torch.zeros(1, 1, 3, 3, dtype=torch.float64)  # gates of ½
    attention = Attention(q, q, q, logits, torch.ones(3, 3, dtype=torch.bool).tril())
    parameters = {"w1": w1, "b1": b1, "w2": w2, "b2": torch.zeros(1, dtype=torch.float64)}
    score = CoPEMLP(hidden=6).score(parameters, attention)[0, 0, 2]
    # p = 1.5, 1, ½; the knots of the last two units are ½.
    torch.testing.assert_close(score, torch.tensor([6.5 + 4 + 32 + 32, 6 + 4 + 16 + 16, 5.5 + 4], dtype=torch.float64))
    slope, ones = torch.autograd.grad(score[2], (w1, b1))
    assert slope.tolist() == [0.5, 0.0, 2.0, 0.0, 8.0, 16.0]
    assert ones.tolist() == [1.0, 0.0, 4.0, 0.0, 16.0, 32.0]


def test_gradients_of_gelu_units():
    """Against finite differences and against autograd, in float64."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, 1, 3, 4), (2, 1, 3, 5), (5,), (5,))
    arguments = [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(weighted_units, arguments)
    p, c, w, b = arguments
    plain = (gelu(p[..., None] * w + b) @ c[..., None])[..., 0]
    torch.testing.assert_close(weighted_units(*arguments), plain)
    weights = torch.randn(2, 1, 3, 4, generator=rng, dtype=torch.float64)
    expected = torch.autograd.grad((plain * weights).sum(), arguments)
    actual = torch.autograd.grad((weighted_units(*arguments) * weights).sum(), arguments)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
