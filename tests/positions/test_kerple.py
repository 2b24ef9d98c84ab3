import math

import pytest
import torch

from cope_sweep.model import Transformer
from cope_sweep.positions.kerple import Kerple
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestKerple(EncodingContract):
    specs = [Kerple(), ["kerple", "cope"]]
    extrapolates = True


def test_the_penalty_is_the_logarithm_of_the_distance():
    attention = naive.attention(queries=2)
    p, a = torch.tensor([1.5, -3.0]), torch.tensor([0.5, 2.0])
    score = Kerple().score({"p": p, "a": a}, attention)
    for h, row, i, j in naive.pairs(attention):
        expected = -(1.5, 0.01)[h] * math.log(1 + (0.5, 2.0)[h] * (i - j))
        assert score.expand(1, 2, -1, -1)[0, h, row, j] == pytest.approx(expected, rel=1e-6)


def test_parameters_start_where_the_paper_has_them():
    model = Transformer(tiny_run(**{"model.position": ["kerple"], "model.dim": 256, "model.heads": 128}))
    p, a = (model.get_parameter(f"position.0.layers.0.{name}") for name in "pa")
    assert 0 <= p.min() < 0.2
    assert 1.8 < p.max() <= 2
    assert 0 <= a.min() < 0.1
    assert 0.9 < a.max() <= 1
