import math

import pytest
import torch

from cope_sweep.positions import T5, Attention
from cope_sweep.testing import EncodingContract


class TestT5(EncodingContract):
    specs = [
        T5(buckets=4, max_distance=6),
        T5(buckets=4, max_distance=6, share_layers=False),
        T5(buckets=4, max_distance=6, cut=3),
    ]
    extrapolates = True


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (4, 3)])
def test_buckets_by_raffel_et_al_s_rule(buckets, furthest):
    """The causal rule of T5, one distance at a time: exact below half, then logarithmic, then the last."""
    exact = buckets // 2
    for distance in range(300):
        expected = distance
        if distance >= exact:
            scaled = math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
            expected = min(exact + int(scaled + 1e-6), buckets - 1)
        # At an exact power the float32 logarithm can be on either side of the boundary.
        got = int(T5(buckets=buckets, max_distance=furthest).bucket(torch.tensor([distance]))[0])
        assert got == expected or (distance > exact and abs(scaled - round(scaled)) < 1e-4)


def test_looks_up_the_bias_of_each_head():
    b = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    q = torch.zeros(1, 2, 1, 4)
    bias = T5(buckets=4, max_distance=6).score(
        {"b": b}, Attention(q, q, q, torch.zeros(1, 2, 1, 8), torch.ones(1, 8, dtype=torch.bool))
    )
    # Distances 7 … 0; 2, 3 → bucket 2 (log 3/2 ÷ log 3 · 2 = 0.7); 4, 5 → 3; larger ones → 3.
    assert bias[0, 0, 0].tolist() == [4, 4, 4, 4, 3, 3, 2, 1]
    assert bias[0, 1, 0].tolist() == [40, 40, 40, 40, 30, 30, 20, 10]


def test_from_the_cut_on_all_distances_have_the_bias_of_the_last_one_before():
    distance = torch.arange(12)
    cut = T5(buckets=8, max_distance=20, cut=5).bucket(distance)
    assert (
        cut.tolist() == T5(buckets=8, max_distance=20).bucket(distance.clamp(max=4)).tolist() == [0, 1, 2, 3] + [4] * 8
    )


def test_a_term_is_no_longer_than_the_sequence_however_far_its_buckets_reach():
    q, parameters = torch.zeros(1, 2, 9, 4), {"b": torch.randn(32, 2)}
    term = T5(max_distance=10**6).term(parameters, q, 9, None)
    assert torch.equal(term.b_HR, parameters["b"][T5(max_distance=10**6).bucket(torch.arange(9))].T)
    assert T5(max_distance=20).term(parameters, q, 100, None).b_HR.shape == (2, 21)
