import pytest
import torch

from cope_sweep.positions import Attention, Dims, Relative
from tests.positions.contract import EncodingContract


class TestRelative(EncodingContract):
    position = ["relative"]


class TestRelativeCapped(EncodingContract):
    position = [{"kind": "relative", "positions": 3, "far": "last", "share_layers": True}]


class TestRelativeWithCoPE(EncodingContract):
    position = [{"kind": "cope", "p_max": 4}, {"kind": "relative", "positions": 5}]


@pytest.mark.parametrize("far", ["none", "last"])
@pytest.mark.parametrize("queries", [1, 4, 7])
def test_is_q_times_e_of_the_distance(far, queries):
    S, K, rows = 7, 3, 4
    rng = torch.Generator().manual_seed(0)
    q, e = torch.randn(2, 2, queries, K, generator=rng), torch.randn(rows, K, generator=rng)
    visible = torch.ones(queries, S, dtype=torch.bool).tril(S - queries)
    bias = Relative(positions=rows, far=far).score({"e": e}, Attention(q, q, q, torch.zeros(2, 2, queries, S), visible))
    for row in range(queries):
        i = S - queries + row
        for j in range(i + 1):
            expected = q[:, :, row] @ e[min(i - j, rows - 1)] if i - j < rows or far == "last" else torch.zeros(2, 2)
            torch.testing.assert_close(bias[:, :, row, j], expected)


def test_sizes():
    dims = Dims(dim=12, heads=3, layers=2, context=100)
    assert Relative().parameters(dims)["e"].shape == (100, 4)
    assert Relative(positions=7).parameters(dims)["e"].shape == (7, 4)
    assert Relative().parameters(dims)["e"].per_layer
    assert not Relative(share_layers=True).parameters(dims)["e"].per_layer
