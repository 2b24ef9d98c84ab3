import pytest
import torch

from cope_sweep.positions import CoPE, CoPEALiBi, Dims
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestCoPEALiBi(EncodingContract):
    specs = [CoPEALiBi(), CoPEALiBi(slopes="learned", gate="separate")]
    extrapolates = True


@pytest.mark.parametrize("sign", [-1, 1])
def test_score_is_the_position_times_the_slope(sign):
    attention = naive.attention(heads=2, tokens=6, head_dim=3)
    score = CoPEALiBi(slopes=(1.0, 0.25), slope_sign=sign).score({}, attention)
    p = CoPE().positions({}, attention)
    torch.testing.assert_close(score[0, 0], sign * p[0, 0])
    torch.testing.assert_close(score[0, 1], sign * p[0, 1] / 4)


def test_learned_slopes_are_per_head_and_layer_start_at_0_and_have_no_sign():
    declared = CoPEALiBi(slopes="learned").parameters(Dims(8, 4, 3, 9))["m"]
    assert declared.shape == (4,)
    assert declared.per_layer
    assert declared.std == 0
    attention = naive.attention(heads=2, tokens=4, head_dim=3)
    m = torch.tensor([2.0, -1.0], dtype=torch.float64)
    score = CoPEALiBi(slopes="learned", slope_sign=-1).score({"m": m}, attention)
    torch.testing.assert_close(score, m[:, None, None] * CoPE().positions({}, attention))
