import math

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, attention_weights, visible
from cope_sweep.positions import path
from cope_sweep.positions.fox import FoX
from cope_sweep.positions.path import EPS, PaTH
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestPaTH(EncodingContract):
    specs = [
        PaTH(rank=3),
        [PaTH(rank=2, layers=(1,)), "rope"],
        ["path", "fox"],
        ["path", FoX(scale_positions=True)],
        PaTH(convolution=False),
    ]
    extrapolates = True


@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_score_is_the_product_of_the_matrices_between_key_and_query(monkeypatch, chunk, queries):
    """Each matrix H_t is built, and they are multiplied one by one."""
    monkeypatch.setattr(path, "CHUNK", chunk)
    attention = naive.attention(tokens=7, queries=queries, features=5)
    taps = naive.normal(8, 3)
    scores = attention.logits_BHQS + PaTH().score({"taps": taps}, attention)
    features = attention.features_BHSF[0]
    for h, row, i, j in naive.pairs(attention):
        changed = attention.q_BHQK[0, h, row]
        for t in range(i, j, -1):
            mixed = sum(
                taps[4 * h : 4 * h + 4, 2 - back] * features[h, t - back, :4] for back in range(3) if t - back >= 0
            )
            w = mixed * mixed.sigmoid()
            w = w / (w.square().sum() + EPS).sqrt()
            beta = 2 / (1 + math.exp(-features[h, t, 4]))
            changed = changed - beta * w * (w @ changed)
        assert scores[0, h, row, j] == pytest.approx(float(changed @ attention.k_BHSK[0, h, j]) / 2, abs=1e-10)


def test_without_its_convolution_w_is_that_of_the_token_alone():
    attention = naive.attention(tokens=5, features=5)
    alone = torch.zeros(8, 3, dtype=torch.float64)
    alone[:, -1] = 1  # the taps of a convolution that only sees the token itself
    expected = PaTH().score({"taps": alone}, attention)
    torch.testing.assert_close(PaTH(convolution=False).score({}, attention), expected)


def test_a_reflection_by_hand():
    """One head of two numbers, w = (1, 0) and β = 2 at both tokens: each step between negates the first component."""
    attention = naive.attention(heads=1, tokens=3, head_dim=2, features=3)
    attention.features_BHSF[..., :2] = torch.tensor([1e4, 0.0])
    attention.features_BHSF[..., 2] = 1e4
    taps = torch.tensor([[0.0, 0.0, 1.0]] * 2, dtype=torch.float64)
    scores = attention.logits_BHQS + PaTH().score({"taps": taps}, attention)
    q, k = attention.q_BHQK[0, 0, 2], attention.k_BHSK[0, 0]
    negated = q * torch.tensor([-1.0, 1.0])
    expected = torch.stack([q @ k[0], negated @ k[1], q @ k[2]]) / math.sqrt(2)
    torch.testing.assert_close(scores[0, 0, 2], expected)


@pytest.mark.parametrize(("scaled", "divisor"), [(False, 1), (True, 2)])
def test_path_fox(scaled, divisor):
    """The weights by loops: the text adds the gates to k·H⋯H·q/√K, the code divides both by √K = 2."""
    attention = naive.attention(tokens=6, features=5)
    gates, taps = naive.normal(1, 2, 6, 1, seed=2), naive.normal(8, 3)
    q, k, features = attention.q_BHQK, attention.k_BHSK, attention.features_BHSF
    inputs = Inputs(q, k, k, q, k, [features, gates])
    encodings = [LayerEncoding(PaTH(), {"taps": taps}), LayerEncoding(FoX(scale_positions=scaled))]
    weights = attention_weights(inputs, encodings, visible(6, 6, torch.device("cpu")))
    for h in range(2):
        for i in range(6):
            powers, changed, decay = {}, q[0, h, i], 0.0
            for j in range(i, -1, -1):
                powers[j] = math.exp(float(changed @ k[0, h, j]) / 2 + decay / divisor)
                mixed = sum(taps[4 * h : 4 * h + 4, 2 - b] * features[0, h, j - b, :4] for b in range(3) if j >= b)
                w = mixed * mixed.sigmoid()
                w = w / (w.square().sum() + EPS).sqrt()
                changed = changed - 2 / (1 + math.exp(-features[0, h, j, 4])) * w * (w @ changed)
                decay += naive.log_sigmoid(gates[0, h, j, 0])
            expected = [powers.get(j, 0) / sum(powers.values()) for j in range(6)]
            assert weights[0, h, i].tolist() == pytest.approx(expected, abs=1e-10)
