import math

import pytest
import torch

from cope_sweep.positions.temperature import Temperature
from cope_sweep.testing import EncodingContract


class TestTemperature(EncodingContract):
    specs = [
        Temperature(floor=2),
        ["rope", Temperature(floor=3, scale=0.5, steps=False)],
        ["cope", Temperature(floor=4, layers=(1,))],
    ]
    extrapolates = True


def test_queries_grow_once_in_floor_tokens():
    """n₀ = 4: tokens 0 to 2 as they were, 3 to 6 times 1 + 0.1·ln 2, 7 to 10 times 1 + 0.1·ln 3."""
    q = torch.ones(1, 1, 11, 2, dtype=torch.float64)
    grown = Temperature(floor=4).rotate({}, q, 0)[0, 0]
    expected = [1] * 3 + [1 + 0.1 * math.log(2)] * 4 + [1 + 0.1 * math.log(3)] * 4
    assert grown[:, 0].tolist() == grown[:, 1].tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(Temperature(floor=4).rotate({}, q[:, :, 5:], 5)[0, 0], grown[5:])


def test_without_steps_they_grow_with_each_token():
    q = torch.ones(1, 1, 6, 2, dtype=torch.float64)
    grown = Temperature(floor=4, scale=0.5, steps=False).rotate({}, q, 0)[0, 0, :, 0].tolist()
    assert grown == pytest.approx([1, 1, 1, 1, 1 + 0.5 * math.log(5 / 4), 1 + 0.5 * math.log(6 / 4)], abs=1e-12)


def test_keys_stay():
    k = torch.randn(1, 1, 5, 2)
    assert Temperature(floor=1).rotate({}, k, 0, keys=True) is k
