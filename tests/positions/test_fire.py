import math

import pytest

from cope_sweep.positions.fire import FIRE
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestFIRE(EncodingContract):
    specs = [FIRE(), FIRE(hidden=3, threshold=2.0, activation="leaky_relu"), ["fire", "rope"], FIRE(cut=3)]
    extrapolates = True


@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("cut", [None, 4])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_the_bias_is_a_net_of_the_distance_as_a_share_of_the_position(activation, cut, queries):
    attention = naive.attention(tokens=9, queries=queries)
    parameters = {"w1": naive.normal(3), "b1": naive.normal(3, seed=2), "w2": naive.normal(2, 3, seed=3)}
    parameters |= {"b2": naive.normal(2, seed=4), "c": naive.normal(1, seed=5), "factor": naive.normal(1, seed=6)}
    score = FIRE(hidden=3, threshold=4, activation=activation, cut=cut).score(parameters, attention)
    c, threshold = float(parameters["c"]), abs(4 * float(parameters["factor"]))
    below = 0.01 if activation == "leaky_relu" else 0.0
    for h, row, i, j in naive.pairs(attention):
        share = math.log(abs(c * min(i - j, (cut or 9) - 1)) + 1) / (math.log(abs(c * max(i, threshold)) + 1) + 1e-6)
        units = [float(w) * share + float(b) for w, b in zip(parameters["w1"], parameters["b1"], strict=True)]
        units = [unit if unit > 0 else below * unit for unit in units]
        expected = sum(float(w) * unit for w, unit in zip(parameters["w2"][h], units, strict=True))
        assert score[0, h, row, j] == pytest.approx(expected + float(parameters["b2"][h]), abs=1e-12)
