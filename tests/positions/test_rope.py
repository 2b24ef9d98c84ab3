import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cope_sweep.model import Transformer
from cope_sweep.positions import RoPE, rope
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run


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


def test_angles_are_exact_at_far_positions():
    """For float32 inputs, too: the second pair of position 10⁵ + 1, computed by `math` in float64."""
    rotated_pair = RoPE(base=100).rotate({}, torch.tensor([[[[0.0, 1.0, 0.0, 0.0]]]]), 100_001)[0, 0, 0]
    angle = 100_001 * 100**-0.5
    expected = torch.tensor([0.0, math.cos(angle), 0.0, math.sin(angle)])
    # A float32 angle has an error of up to 5e-4 here; a float32 sine has one of 6e-8.
    torch.testing.assert_close(rotated_pair, expected, rtol=0, atol=1e-6)


@pytest.fixture
def kept():
    """The angles that are kept, none at first."""
    rope._kept_cos_and_sin.cache_clear()
    yield rope._kept_cos_and_sin.cache_info
    rope._kept_cos_and_sin.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("start", "tokens", "head_dim"), [(0, 1, 2), (0, 513, 64), (77, 1, 6), (9000, 31, 32)])
def test_kept_angles_have_the_bits_of_computed_ones(kept, dtype, start, tokens, head_dim):
    x = torch.randn(1, 2, tokens, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    rate = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(start, start + tokens)[:, None] * rate
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    a, b = x.chunk(2, dim=-1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    for _ in range(2):
        assert torch.equal(RoPE().rotate({}, x, start), expected)
    assert (kept().misses, kept().hits) == (1, 1)


def test_layers_queries_and_keys_share_their_angles(kept):
    built = Transformer(tiny_run(**{"model.position": ["rope"], "model.layers": 3}))
    built(torch.zeros(1, 5, dtype=torch.int64))
    assert (kept().misses, kept().hits) == (1, 5)


def test_angles_of_inference_serve_training(kept):
    x = torch.ones(1, 1, 3, 4)
    with torch.inference_mode():
        RoPE().rotate({}, x, 0)
    leaf = x.clone().requires_grad_()
    RoPE().rotate({}, leaf, 0).sum().backward()
    assert kept().hits == 1
    assert leaf.grad.isfinite().all()


def test_fake_tensors_are_not_kept(kept):
    with FakeTensorMode():
        RoPE().rotate({}, torch.empty(1, 1, 3, 4), 0)
    assert kept().currsize == 0


def angles(head_dim=8, **fields):
    """Angles of the pairs at position 1, from where `rotate` puts the unit vectors."""
    unit = torch.eye(head_dim, dtype=torch.float64)[: head_dim // 2, None]  # the first components of the pairs
    turned = RoPE(**fields).rotate({}, unit[None], 1)[0, :, 0]
    pairs = range(head_dim // 2)
    return [math.atan2(turned[c, c + head_dim // 2], turned[c, c]) for c in pairs], turned.norm(dim=-1).tolist()


def test_partial_rope_rotates_the_fastest_pairs():
    assert angles(base=16, rotated=0.5)[0] == pytest.approx([1, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("share", "head_dim", "pairs", "version"),
    [(0.75, 4, 1, 2), (0.75, 8, 3, 1), (0.25, 4, 0, 1), (0.25, 12, 1, 2), (1.0, 6, 3, 1)],
)
def test_partial_rope_rotates_whole_pairs_only(share, head_dim, pairs, version):
    """⌊p·K/2⌋, as in the authors' code: `int(share * head_dim // 2)`. A new version where the nearest number is more."""
    rope = RoPE(rotated=share)
    assert rope.rates(head_dim).count_nonzero() == pairs
    run = tiny_run(**{"model.position": [rope.dump()], "model.dim": 2 * head_dim, "model.heads": 2})
    assert run.versions["rope"] == version


def test_interpolation_divides_all_angles():
    assert angles(base=16, scaling="pi", factor=4)[0] == pytest.approx([0.25, 0.125, 0.0625, 0.03125])


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest():
    found, _ = angles(base=16, scaling="ntk", factor=4)
    assert found[0] == pytest.approx(1)
    assert found[-1] == pytest.approx(0.125 / 4)


def test_yarn_interpolates_pairs_with_few_turns_and_scales_queries_and_keys():
    """Trained on 100 tokens, base 10⁴: 15.9, 1.59, 0.159 and 0.0159 turns; the ramp from 1 to 32 keeps 0.481 of the first."""
    found, lengths = angles(scaling="yarn", factor=2, trained=100)
    first, second = (100 * rate / (2 * math.pi) for rate in (1, 0.1))
    kept = [(turns - 1) / 31 for turns in (first, second)] + [0, 0]
    rates = [10.0**-c for c in range(4)]
    expected = [rate * share + rate / 2 * (1 - share) for rate, share in zip(rates, kept, strict=True)]
    assert found == pytest.approx(expected)
    assert lengths == pytest.approx([0.1 * math.log(2) + 1] * 4)


def test_longer_evaluation_is_a_variant_of_the_same_run():
    variant = {"YaRN": {"rope.scaling": "yarn", "rope.factor": 4, "rope.trained": 8}}
    run = tiny_run(**{"model.position": ["rope"], "evaluate.variants": variant})
    assert run.variant("YaRN")[0] == RoPE(scaling="yarn", factor=4, trained=8)
