import math

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, attention_weights, visible
from cope_sweep.model import Transformer
from cope_sweep.positions import Dims
from cope_sweep.positions.fox import FoX
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestFoX(EncodingContract):
    specs = [
        FoX(),
        FoX(scaled=False),
        FoX(scale_positions=True, start=2.0),
        [FoX(layers=(1,)), "cope"],
        ["fox", "rope", "t5"],
    ]
    extrapolates = True


@pytest.mark.parametrize("queries", [None, 2])
def test_the_bias_sums_the_logarithms_of_the_gates_after_the_key(queries):
    attention = naive.attention(queries=queries, features=1)
    score = FoX().score({}, attention)
    gates = attention.features_BHSF[0, :, :, 0]
    for h, row, i, j in naive.pairs(attention):
        expected = sum(naive.log_sigmoid(gates[h, token]) for token in range(j + 1, i + 1))
        assert score[0, h, row, j] == pytest.approx(expected, abs=1e-12)


def test_a_head_that_keeps_half_halves_the_weight_per_token():
    """All gates ½ and q = 0: the weights are 2^−(i − j) of their sum, worked by hand for three tokens."""
    zeros = torch.zeros(1, 1, 3, 2, dtype=torch.float64)
    inputs = Inputs(zeros, zeros, zeros, zeros, zeros, [torch.zeros(1, 1, 3, 1, dtype=torch.float64)])
    weights = attention_weights(inputs, [LayerEncoding(FoX())], visible(3, 3, torch.device("cpu")))
    assert weights[0, 0, 2].tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7])


def test_cable_as_released_does_not_divide_by_the_root_of_the_head_dimension():
    attention = naive.attention(features=1)
    undivided = attention.logits_BHQS + FoX(scaled=False).score({}, attention)
    expected = attention.q_BHQK @ attention.k_BHSK.mT + FoX().score({}, attention)
    torch.testing.assert_close(undivided, expected)


def test_a_decay_of_thousands_is_exact_in_half_precision():
    """2,000 gates of −1.3133: in bfloat16 the sum would be off by up to 8, and the weights of near keys by e⁸."""
    gates = torch.full((1, 1, 2000, 1), -1.0, dtype=torch.bfloat16)
    bias = FoX().term({}, torch.zeros(1, 1, 2000, 2, dtype=torch.bfloat16), 2000, gates).b_BHS
    assert bias.dtype == torch.float32
    assert (bias[0, 0, -1] - bias[0, 0, -2]).item() == pytest.approx(math.log1p(math.e), abs=1e-3)


def test_gates_start_with_a_bias():
    dims = Dims(64, 4, 1, 128)
    assert FoX().parameters(dims) == FoX(start=0).parameters(dims)
    declared = FoX(start=8).parameters(dims)
    assert (declared["forget_bias"].centre, declared["forget_bias"].std) == (8, 0)
    assert declared["forget_weight"] == FoX().parameters(dims)["forget_weight"]
    run = tiny_run(**{"model.position": [{"kind": "fox", "start": 8}]})
    assert Transformer(run).position[0].layers["0"]["forget_bias"].tolist() == [8, 8]


@pytest.mark.parametrize("queries", [None, 2])
def test_the_sum_of_gates_can_be_divided_by_the_root_of_the_head_dimension(queries):
    attention = naive.attention(queries=queries, features=1)
    half = FoX().score({}, attention) / 2  # √4
    torch.testing.assert_close(FoX(scale_positions=True).score({}, attention), half)
    whole, divided = (
        each.term({}, attention.q_BHQK, 6, attention.features_BHSF).b_BHS for each in (FoX(), FoX(scale_positions=True))
    )
    torch.testing.assert_close(divided, whole / 2)
