import math

import pytest
import torch

from cope_sweep.positions.alibi import standard_slopes
from cope_sweep.positions.grape_ap import GrapeAP
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestGrapeAP(EncodingContract):
    specs = [GrapeAP(), GrapeAP(reading="released", size=6), ["grape_ap", "rope"]]
    extrapolates = True


@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("reading", ["text", "released"])
def test_the_bias_sums_the_gates_of_the_keys_after_the_key(reading, queries):
    attention = naive.attention(tokens=5, queries=queries, features=4)
    score = GrapeAP(reading=reading).score({}, attention)
    p = attention.features_BHSF[0]
    normed = p / p.square().mean(-1, keepdim=True).sqrt()

    def rotated(x, angle):
        turned = x.clone()
        for a, b in ((0, 2), (1, 3)) if reading == "released" else ((0, 1), (2, 3)):
            turned[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
            turned[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
        return turned

    sign = -1 if reading == "released" else 1
    for h, row, i, j in naive.pairs(attention):
        query = p[h, i] if reading == "released" else normed[h, i]
        terms = [naive.log_sigmoid(query @ rotated(normed[h, t], sign * t) / 4) for t in range(j + 1, i + 1)]
        assert score[0, h, row, j] == pytest.approx(standard_slopes(2)[h] * sum(terms), abs=1e-12)


def test_an_odd_head_dimension_needs_a_size():
    odd = {"model.dim": 6, "model.heads": 2}
    with raises("invalid_value", key="grape_ap.size", head_dim=3):
        tiny_run(**odd, **{"model.position": ["grape_ap"]})
    tiny_run(**odd, **{"model.position": [{"kind": "grape_ap", "size": 4}]})


def test_without_features_all_gates_are_one_half():
    attention = naive.attention(tokens=3, features=4)
    attention.features_BHSF.zero_()
    bias = GrapeAP().score({}, attention)[0, 0, 2]
    torch.testing.assert_close(bias, torch.tensor([2, 1, 0]).double() * -math.log(2) * standard_slopes(2)[0])
