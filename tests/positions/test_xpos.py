import pytest
import torch

from cope_sweep.positions import RoPE
from cope_sweep.positions.xpos import XPos
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestXPos(EncodingContract):
    specs = [XPos(), XPos(scale=4.0, layers=(1,))]
    extrapolates = True


@pytest.mark.parametrize("scale", [16.0, 24.0])  # torch divides integers exactly in float32 only by powers of 2
def test_a_product_decays_with_the_distance_in_each_pair(scale):
    """K = 4: ζ = 0.4/1.4 and 0.9/1.4; at distance 8 with scale 16 their square roots."""
    q, k = naive.normal(1, 1, 1, 4), naive.normal(1, 1, 1, 4, seed=2)
    xpos = XPos(scale=scale)
    decayed = xpos.rotate({}, q, 1008) * xpos.rotate({}, k, 1000, keys=True)
    plain = RoPE().rotate({}, q, 1008) * RoPE().rotate({}, k, 1000)
    zeta = torch.tensor([0.4 / 1.4, 0.9 / 1.4] * 2, dtype=torch.float64)
    torch.testing.assert_close(decayed[0, 0, 0], plain[0, 0, 0] * zeta ** (8 / scale))
