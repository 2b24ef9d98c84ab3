import pytest
import torch

from cope_sweep.positions import ALiBi, Attention
from cope_sweep.positions.alibi import standard_slopes
from cope_sweep.testing import EncodingContract


class TestALiBi(EncodingContract):
    specs = [ALiBi(), ALiBi(slopes=(0.5, 3.0))]
    extrapolates = True


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2**-h for h in range(1, 9)]),
        # 6 = 4 + 2: the slopes of 4 heads, then the first and third of 8 (Press et al., released code).
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_standard_slopes(heads, slopes):
    assert standard_slopes(heads) == pytest.approx(slopes)


def test_subtracts_the_distance():
    q = torch.zeros(1, 2, 3, 4)
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    bias = ALiBi(slopes=(1.0, 0.5)).score({}, Attention(q, q, q, torch.zeros(1, 2, 3, 3), visible))
    assert bias[0, 0, 2].tolist() == [-2, -1, 0]
    assert bias[0, 1, 2].tolist() == [-1, -0.5, 0]
