import pytest
import torch

from cope_sweep.config import parameter_count
from cope_sweep.model import Transformer
from cope_sweep.positions.inkling import Inkling
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestInkling(EncodingContract):
    specs = [
        Inkling(curves=3, distances=5),
        Inkling(curves=4, distances="full", layers=(1,)),
        [Inkling(curves=9, distances=30), "rope"],
        [Inkling(curves=2, distances=7), "cope"],
    ]
    extrapolates = True


@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("reach", [1, 3, 6, 20])
def test_the_bias_is_a_mixture_of_curves(reach, queries):
    attention, curves = naive.attention(queries=queries, features=3), naive.normal(3, reach)
    score = Inkling(curves=3, distances=reach).score({"curves": curves}, attention)
    r = attention.features_BHSF[0]
    for h, row, i, j in naive.pairs(attention):
        expected = sum(r[h, i, m] * curves[m, i - j] for m in range(3)) if i - j < reach else 0.0
        assert score[0, h, row, j] == pytest.approx(float(expected), abs=1e-12)


def test_two_curves_by_hand():
    """Near keys and far keys: one query chooses the first curve, the other half of the second."""
    attention = naive.attention(heads=1, tokens=3, queries=2, features=2)
    attention.features_BHSF[0, 0, 1:] = torch.tensor([[1.0, 0.0], [0.0, 0.5]])
    curves = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=torch.float64)
    score = Inkling(curves=2, distances=2).score({"curves": curves}, attention)[0, 0]
    assert score[0, :2].tolist() == [2, 1]
    assert score[1].tolist() == [0, 4, 2]


def test_the_start_and_the_number_of_parameters():
    run, plain = (tiny_run(**{"model.position": each, "model.dim": 64}) for each in (["inkling"], []))
    assert parameter_count(run) - parameter_count(plain) == 2 * 16 * 64 + 16 * 1024
    start = Transformer(run).position[0].layers["0"]
    assert {name: tuple(x.shape) for name, x in start.items()} == {"read_weight": (32, 64), "curves": (16, 1024)}
    for x in start.values():
        assert x.std().item() == pytest.approx(0.02, rel=0.05)
