import pytest
import torch

from cope_sweep.positions.stick_breaking import StickBreaking
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestStickBreaking(EncodingContract):
    specs = [StickBreaking(), StickBreaking(remainder="self"), [StickBreaking(layers=(0,)), "rope", "alibi"]]
    extrapolates = True


@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("remainder", ["drop", "self"])
def test_each_key_takes_its_share_of_what_nearer_keys_left(remainder, queries):
    attention = naive.attention(queries=queries)
    weights = StickBreaking(remainder=remainder).weights({}, attention, attention.logits_BHQS)
    shares = attention.logits_BHQS[0].sigmoid()
    expected = torch.zeros_like(weights[0])
    for h in range(2):
        for row in range(weights.shape[2]):
            left, i = 1.0, row + weights.shape[3] - weights.shape[2]
            for j in range(i - 1, -1, -1):
                expected[h, row, j] = left * shares[h, row, j]
                left *= 1 - shares[h, row, j]
            expected[h, row, i] = left if remainder == "self" else 0
    torch.testing.assert_close(weights[0], expected)
    if remainder == "self":
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_scores_of_others_change_the_shares():
    attention = naive.attention()
    shifted = StickBreaking().weights({}, attention, attention.logits_BHQS + 50)
    torch.testing.assert_close(shifted[0, :, 1:].diagonal(dim1=1, dim2=2), torch.ones(2, 5, dtype=torch.float64))
