import math
from dataclasses import replace

import pytest
import torch

from cope_sweep.config import parameter_count
from cope_sweep.kernels import Inputs, LayerEncoding, attend
from cope_sweep.model import Transformer
from cope_sweep.positions import Dims, wall
from cope_sweep.positions.fox import FoX
from cope_sweep.positions.wall import Wall
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestWall(EncodingContract):
    specs = [Wall(), [Wall(layers=(1,)), "rope"], ["wall", FoX(start=8.0)]]
    extrapolates = True


def scores(attention):
    return attention.logits_BHQS + Wall().score({}, attention)


@pytest.mark.parametrize("queries", [None, 1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_each_channel_decays_by_the_gates_after_the_key(monkeypatch, chunk, queries):
    monkeypatch.setattr(wall, "CHUNK", chunk)
    attention = naive.attention(tokens=7, queries=queries, features=4)
    computed, gates = scores(attention), attention.features_BHSF[0]
    for h, row, i, j in naive.pairs(attention):
        expected = 0.0
        for n in range(4):
            decay = math.prod(1 / (1 + math.exp(-gates[h, t, n])) for t in range(j + 1, i + 1))
            expected += float(attention.q_BHQK[0, h, row, n] * attention.k_BHSK[0, h, j, n]) * decay
        assert computed[0, h, row, j] == pytest.approx(expected / 2, abs=1e-12)


def test_a_closed_gate_by_hand():
    """Gates of 0 in channel 0 and of 1 in channel 1 at the last token: it sees channel 1 of the keys before it alone."""
    attention = naive.attention(heads=1, tokens=3, head_dim=2, features=2)
    attention.features_BHSF[:] = torch.tensor([-1e4, 1e4])
    computed, q, k = scores(attention), attention.q_BHQK[0, 0, 2], attention.k_BHSK[0, 0]
    expected = torch.stack([q[1] * k[0, 1], q[1] * k[1, 1], q @ k[2]]) / math.sqrt(2)
    torch.testing.assert_close(computed[0, 0, 2], expected)


def test_open_gates_are_plain_attention():
    attention = naive.attention(features=4)
    attention.features_BHSF.fill_(1e4)
    torch.testing.assert_close(scores(attention), attention.logits_BHQS)


@pytest.mark.parametrize("chunk", [2, 32])
def test_closed_gates_overflow_nothing(monkeypatch, chunk):
    """A running sum of −6,000 in float32, where exp(−P) alone would be infinite."""
    monkeypatch.setattr(wall, "CHUNK", chunk)
    attention = naive.attention(tokens=200, features=4)
    q, k, gates = (
        x.float().requires_grad_() for x in (attention.q_BHQK, attention.k_BHSK, attention.features_BHSF - 30)
    )
    logits = attention.logits_BHQS.float()
    computed = logits + Wall().score(
        {}, replace(attention, q_BHQK=q, k_BHSK=k, logits_BHQS=logits, features_BHSF=gates)
    )
    own = (q * k).sum(-1) / 2
    torch.testing.assert_close(computed.diagonal(dim1=-2, dim2=-1), own)
    assert computed.tril(-1).abs().max() < 1e-11
    for gradient in torch.autograd.grad(computed.tril().square().sum(), (q, k, gates)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("chunk", [2, 32])
def test_gradients_agree_with_finite_differences(monkeypatch, chunk):
    monkeypatch.setattr(wall, "CHUNK", chunk)
    rng = torch.Generator().manual_seed(3)
    q, k, v, gates, scalar = (
        torch.randn(1, 2, 5, width, generator=rng, dtype=torch.float64, requires_grad=True) for width in (3, 3, 3, 3, 1)
    )

    def attention(q, k, v, gates, scalar):
        encodings = [LayerEncoding(Wall()), LayerEncoding(FoX())]
        return attend(Inputs(q, k, v, q, k, [gates, scalar]), encodings, implementation="reference")

    assert torch.autograd.gradcheck(attention, (q, k, v, gates, scalar))


def test_the_start_and_the_number_of_parameters():
    """As many weights as the projection of the queries; every gate is 0.99966."""
    run, plain = (tiny_run(**{"model.position": each, "model.dim": 64}) for each in (["wall"], []))
    assert parameter_count(run) - parameter_count(plain) == 64 * 64 + 64
    start = Transformer(run).position[0].layers["0"]
    assert start["gate_bias"].tolist() == [8] * 64
    assert start["gate_weight"].std().item() == pytest.approx(0.02, rel=0.05)
    uniform = Dims(64, 4, 1, 128, linear_bound=0.125)
    assert Wall().parameters(uniform)["gate_weight"].bound is None
