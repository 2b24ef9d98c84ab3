import math

import pytest
import torch
from pydantic import ValidationError

from cope_sweep.positions import Sinusoidal
from tests.positions.contract import EncodingContract
from tests.tiny import tiny_run


class TestSinusoidal(EncodingContract):
    position = ["sinusoidal"]


def test_by_hand():
    got = Sinusoidal(base=100).embed({}, torch.zeros(1, 2, 4, dtype=torch.float64), start=3)[0]
    expected = [[f(t / s) for s in (1, 10) for f in (math.sin, math.cos)] for t in (3, 4)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_amplitude_scales_it():
    x = torch.zeros(1, 5, 4)
    torch.testing.assert_close(Sinusoidal(amplitude=0.1).embed({}, x, 0), 0.1 * Sinusoidal().embed({}, x, 0))


def test_an_odd_dimension_is_refused():
    with pytest.raises(ValidationError, match="model.dim = 9 is odd"):
        tiny_run(**{"model.position": ["sinusoidal"], "model.dim": 9, "model.heads": 3})
