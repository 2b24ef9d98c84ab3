import math

import pytest
import torch

from cope_sweep.positions import RoPE
from cope_sweep.positions.darope import DaRoPE
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestDaRoPE(EncodingContract):
    specs = [DaRoPE(length=12), DaRoPE(slow="none", layers=(1,)), [DaRoPE(length=4), "cope"]]
    extrapolates = True


def test_pairs_that_turn_within_the_length_are_those_of_rope():
    """K = 4 and base 100: rates 1 and 0.1, so 2π/20 is between them, and the second pair is slow."""
    x = naive.normal(1, 1, 3, 4)
    turned = DaRoPE(length=20, base=100, slow="none").rotate({}, x, 5)
    expected = RoPE(base=100).rotate({}, x, 5)
    torch.testing.assert_close(turned[..., [0, 2]], expected[..., [0, 2]])
    torch.testing.assert_close(turned[..., [1, 3]], x[..., [1, 3]])


def test_the_angle_of_a_slow_pair_follows_the_features():
    x, features = naive.normal(1, 2, 2, 4), naive.normal(1, 2, 25, 1, seed=2)
    alpha = torch.tensor([1.0, 0.5], dtype=torch.float64)
    turned = DaRoPE(length=20, base=100).rotate({"alpha": alpha}, x, 22, features)
    for h in range(2):
        for row, token in enumerate((22, 23)):
            share = min(max((token + 0.5) / 20, 0.5 / 20), 1 - 0.5 / 20)
            logit = float(features[0, h, token, 0]) + float(alpha[h]) * math.log(share / (1 - share))
            angle = 0.1 * 20 / (1 + math.exp(-logit))
            a, b = x[0, h, row, 1], x[0, h, row, 3]
            expected = float(a) * math.cos(angle) - float(b) * math.sin(angle)
            assert float(turned[0, h, row, 1]) == pytest.approx(expected, rel=1e-12)


def test_it_starts_as_rope_half_a_token_later():
    x, features = naive.normal(1, 1, 8, 4), torch.zeros(1, 1, 8, 1, dtype=torch.float64)
    turned = DaRoPE(length=20, base=100).rotate({"alpha": torch.ones(1, dtype=torch.float64)}, x, 0, features)
    angle = (torch.arange(8) + 0.5).double() * 0.1
    torch.testing.assert_close(turned[0, 0, :, 1], x[0, 0, :, 1] * angle.cos() - x[0, 0, :, 3] * angle.sin())
