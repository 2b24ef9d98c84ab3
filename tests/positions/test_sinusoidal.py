import math

import torch

from cope_sweep.positions import Sinusoidal
from cope_sweep.testing import EncodingContract


class TestSinusoidal(EncodingContract):
    specs = [Sinusoidal(), Sinusoidal(amplitude=0.3, base=50.0)]
    extrapolates = True


def test_sinusoids_of_two_positions():
    got = Sinusoidal(base=100).embed({}, torch.zeros(1, 2, 4, dtype=torch.float64), start=3)[0]
    expected = [[f(t / s) for s in (1, 10) for f in (math.sin, math.cos)] for t in (3, 4)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_amplitude_is_a_factor():
    x = torch.zeros(1, 5, 4)
    torch.testing.assert_close(Sinusoidal(amplitude=0.1).embed({}, x, 0), 0.1 * Sinusoidal().embed({}, x, 0))
