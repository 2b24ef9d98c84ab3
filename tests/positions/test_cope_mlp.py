import pytest
import torch
from torch.nn.functional import gelu

from cope_sweep.positions import CoPE, CoPEMLP, Dims
from cope_sweep.positions.gelu_units import weighted_units
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestCoPEMLP(EncodingContract):
    specs = [
        CoPEMLP(hidden=5),
        CoPEMLP(hidden=3, layers=(0,), p_max=4, gate="values"),
        CoPEMLP(hidden=5, activation="gelu", scale_positions=True),
        [CoPEMLP(hidden=5, rotated_query=True), "rope"],
    ]
    extrapolates = True


@pytest.mark.parametrize(("activation", "function"), [("relu", torch.relu), ("gelu", gelu)])
def test_is_q_times_the_mlp_of_the_position(activation, function):
    attention = naive.attention(heads=2, tokens=6, head_dim=3)
    mlp = CoPEMLP(hidden=4, activation=activation)
    rng = torch.Generator().manual_seed(1)
    w = {n: torch.randn(p.shape, generator=rng).double() for n, p in mlp.parameters(Dims(6, 2, 1, 9)).items()}
    score = mlp.score(w, attention)
    p = CoPE().positions(attention)
    for h in range(2):
        for i in range(6):
            for j in range(i + 1):
                hidden = function(w["w1"] * p[0, h, i, j] + w["b1"])
                e = w["w2"] @ hidden + w["b2"]
                torch.testing.assert_close(score[0, h, i, j], attention.q_BHQK[0, h, i] @ e)


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
