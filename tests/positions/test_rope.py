import math

import pytest
import torch
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

from cope_sweep.positions import RoPE, rope
from cope_sweep.testing import EncodingContract
from tests.tiny import tiny_run


class TestRoPE(EncodingContract):
    specs = [RoPE(), RoPE(base=100.0, layers=(1,))]
    extrapolates = True


def rotated(x, start=0, base=10_000.0):
    return RoPE(base=base).rotate({}, torch.tensor(x, dtype=torch.float64)[None, None], start)[0, 0]


def test_two_components_are_rotated_by_their_position_in_radians():
    turned = rotated([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    expected = [[1, 0], [math.cos(1), math.sin(1)], [-math.sin(2), math.cos(2)]]
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64))


def test_slower_pairs_are_rotated_by_powers_of_the_base():
    x = [[1.0, 1.0, 0.0, 0.0]]
    angles = [3.0, 3.0 * 100**-0.5]
    expected = [[math.cos(a) for a in angles] + [math.sin(a) for a in angles]]
    torch.testing.assert_close(rotated(x, start=3, base=100), torch.tensor(expected, dtype=torch.float64))


def test_scores_depend_on_distance_only():
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 8, generator=rng, dtype=torch.float64)
    near = rotated(q.tolist(), 5) @ rotated(k.tolist(), 2).T
    far = rotated(q.tolist(), 1005) @ rotated(k.tolist(), 1002).T
    other = rotated(q.tolist(), 5) @ rotated(k.tolist(), 1).T
    torch.testing.assert_close(near, far)
    assert not torch.allclose(near, other)


def test_angles_are_exact_at_far_positions():
    """For float32 inputs, too: the second pair of position 10⁵ + 1, computed by `math` in float64."""
    rotated_pair = RoPE(base=100).rotate({}, torch.tensor([[[[0.0, 1.0, 0.0, 0.0]]]]), 100_001)[0, 0, 0]
    angle = 100_001 * 100**-0.5
    expected = torch.tensor([0.0, math.cos(angle), 0.0, math.sin(angle)])
    # A float32 angle has an error of up to 5e-4 here; a float32 sine has one of 6e-8.
    torch.testing.assert_close(rotated_pair, expected, rtol=0, atol=1e-6)


def test_an_odd_head_dimension_is_an_error():
    with pytest.raises(ValidationError, match="head dimension 9/3 = 3 is odd"):
        tiny_run(**{"model.position": ["rope"], "model.dim": 9, "model.heads": 3})


def test_angles_are_computed_once_for_all_layers_and_steps(monkeypatch):
    rope._cached_cos_sin.cache_clear()
    x = torch.randn(1, 2, 7, 8)
    first = RoPE().rotate({}, x, 3)
    before = rope._cached_cos_sin.cache_info()
    assert torch.equal(RoPE().rotate({}, x, 3), first)
    after = rope._cached_cos_sin.cache_info()
    assert (before.misses, after.misses, after.hits) == (1, 1, 1)
    RoPE().rotate({}, x.bfloat16(), 3)
    assert rope._cached_cos_sin.cache_info().misses == 2


def test_angles_of_inference_serve_training():
    rope._cached_cos_sin.cache_clear()
    x = torch.randn(1, 1, 5, 8, requires_grad=True)
    with torch.inference_mode():
        RoPE().rotate({}, x.detach(), 0)
    RoPE().rotate({}, x, 0).sum().backward()
    assert x.grad is not None


def test_fake_tensors_stay_out_of_the_cache():
    rope._cached_cos_sin.cache_clear()
    with FakeTensorMode():
        assert RoPE().rotate({}, torch.randn(1, 1, 5, 8), 0).shape == (1, 1, 5, 8)
    assert rope._cached_cos_sin.cache_info().currsize == 0
