import torch

from cope_sweep.positions import Absolute, Dims
from cope_sweep.testing import EncodingContract


class TestAbsolute(EncodingContract):
    specs = [Absolute()]
    extrapolates = False


def test_adds_the_vector_of_each_position():
    e = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    x = torch.zeros(1, 2, 2)
    assert Absolute().embed({"e": e}, x, start=1).tolist() == [[[3.0, 4.0], [5.0, 6.0]]]


def test_has_one_table_of_context_by_dim():
    assert Absolute().parameters(Dims(dim=8, heads=2, layers=3, context=5))["e"].shape == (5, 8)
