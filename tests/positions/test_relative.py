import pytest
import torch
from pydantic import ValidationError

from cope_sweep.model import Transformer
from cope_sweep.positions import Attention, CoPE, Dims, Relative
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run


class TestRelative(EncodingContract):
    specs = [
        Relative(),
        Relative(positions=3, far="last", share_layers=True),
        [CoPE(p_max=4), Relative(positions=5)],
        Relative(positions=4, far="last", per_head=True, scale_positions=True, std="1/sqrt(d)"),
        Relative(positions=4, far="last", per_head=True, cut=2),
        Relative(positions=5, cut=3),
    ]
    extrapolates = True


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


def test_each_head_has_its_own_table():
    """By hand: q·e[h, i − j]/√4 with q = (1, 0, 0, 0), so that the bias is half the first component of e."""
    e = torch.zeros(2, 2, 4)
    e[:, :, 0] = torch.tensor([[2.0, 4.0], [6.0, 8.0]])
    q = torch.zeros(1, 2, 3, 4)
    q[..., 0] = 1
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    spec = Relative(positions=2, far="last", per_head=True, scale_positions=True)
    bias = spec.score({"e": e}, Attention(q, q, q, torch.zeros(1, 2, 3, 3), visible)) * visible
    assert bias[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    assert bias[0, 1].tolist() == [[3, 0, 0], [4, 3, 0], [4, 4, 3]]


@pytest.mark.parametrize(("std", "expected"), [("1/sqrt(d)", 64**-0.5), (0.3, 0.3), (0, 0)])
def test_initialisations(std, expected):
    """The released one is N(0, 1/K) with K the head dimension, in one table for all layers."""
    relative = {"kind": "relative", "scale_positions": True, "share_layers": True, "std": std}
    run = tiny_run(**{"model.dim": 128, "model.heads": 2, "model.layers": 2, "model.context": 500})
    run = run.model_validate(run.model_dump(mode="json") | {"model": run.model.model_dump() | {"position": [relative]}})
    (encoding,) = Transformer(run).position
    assert not encoding.layers
    assert encoding.shared["e"].shape == (500, 64)
    assert encoding.shared["e"].std().item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("std", ["1/sqrt(D)", -1.0, "0.5"])
def test_another_initialisation_is_refused(std):
    with pytest.raises(ValidationError):
        Relative(std=std)


def test_table_sizes():
    dims = Dims(dim=12, heads=3, layers=2, context=100)
    assert Relative(per_head=True).parameters(dims)["e"].shape == (3, 100, 4)
    assert Relative().parameters(dims)["e"].shape == (100, 4)
    assert Relative(positions=7).parameters(dims)["e"].shape == (7, 4)
    assert Relative().parameters(dims)["e"].per_layer
    assert not Relative(share_layers=True).parameters(dims)["e"].per_layer
