import math

import pytest
import torch
import torch.nn.functional as F

from cope_sweep.config.estimate import parameter_count
from cope_sweep.kernels import using
from cope_sweep.model import Transformer
from cope_sweep.positions import Dims, RoPE
from cope_sweep.positions.carope import CARoPE
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestCARoPE(EncodingContract):
    specs = [CARoPE(base=100), CARoPE(bias=False, layers=(1,)), ["carope", "cope"]]
    extrapolates = True


@pytest.mark.parametrize(("start", "tokens"), [(0, 6), (4, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_angles_are_running_sums_of_powers(start, tokens, bias):
    parameters = {"frequency_weight": naive.normal(2, 12), "frequency_bias": naive.normal(2, seed=2)}
    h, x = naive.normal(1, 6, 12, seed=3), naive.normal(1, 2, tokens, 6, seed=4)
    encoding = CARoPE(bias=bias)
    features = encoding.features(parameters, h).view(1, 6, 2, 1).transpose(1, 2)
    turned = encoding.rotate(parameters, x, start, features)
    for head in range(2):
        for c in range(3):
            angle = 0.0
            for t in range(start + tokens):
                logit = float(parameters["frequency_weight"][head] @ h[0, t])
                logit += float(parameters["frequency_bias"][head]) if bias else 0
                angle += (1 / (math.log1p(math.exp(logit)) + 1)) ** c
                if t < start:
                    continue
                a, b = x[0, head, t - start, c], x[0, head, t - start, c + 3]
                assert turned[0, head, t - start, c] == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
                assert turned[0, head, t - start, c + 3] == pytest.approx(b * math.cos(angle) + a * math.sin(angle))


def test_it_starts_as_rope():
    """K = 64: the bias is −0.927. Logits depend on differences of angles, so a common angle of the first token is nothing."""
    declared = CARoPE().parameters(Dims(128, 2, 1, 9))
    assert declared["frequency_bias"].centre == pytest.approx(-0.927, abs=5e-4)
    sizes = {"model.layers": 2, "model.dim": 16, "model.heads": 2}
    ours, rope = (Transformer(tiny_run(**{"model.position": [kind], **sizes})).double() for kind in ("carope", "rope"))
    tokens = torch.randint(0, 3, (2, 7), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), rope(tokens), rtol=1e-6, atol=1e-6)
    with using("reference"):
        torch.testing.assert_close(ours(tokens), rope(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("base", "head_dim"), [(1e4, 2), (1e6, 4), (1e5, 8), (1 + 1e-15, 64)])
def test_it_starts_as_rope_with_any_base(base, head_dim):
    start = CARoPE(base=base).parameters(Dims(2 * head_dim, 2, 1, 9))["frequency_bias"].centre
    frequency = 1 / (F.softplus(torch.tensor(start, dtype=torch.float64)).item() + 1)
    assert frequency == pytest.approx(base ** (-2 / head_dim), rel=1e-12)


def test_without_a_bias_the_frequency_starts_near_a_fixed_number():
    """f = 1/(ln 2 + 1) = 0.591 where w·x is 0."""
    x = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    x[..., :2] = 1
    turned = CARoPE(bias=False).rotate({}, x, 0, torch.zeros(1, 1, 2, 1, dtype=torch.float64))
    angle = torch.atan2(turned[0, 0, :, 2:], turned[0, 0, :, :2])
    torch.testing.assert_close(angle[:, 0], torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert angle[:, 1].tolist() == pytest.approx([0.5906, 1.1812], abs=1e-4)


def test_a_token_can_slow_the_slower_pairs_and_neither_stop_nor_reverse_them():
    x = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    x[..., :2] = 1
    turned = CARoPE().rotate({}, x, 0, torch.tensor([-9.0, 9.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1))
    steps = torch.atan2(turned[0, 0, :, 2:], turned[0, 0, :, :2]).diff(dim=0)
    torch.testing.assert_close(steps[:, 0], torch.ones(2, dtype=torch.float64))  # the fastest pair turns by 1
    assert 0 < float(steps[0, 1]) < 0.11
    assert float(steps[1, 1]) == pytest.approx(0.5906, abs=1e-4)


def test_a_base_without_a_bias_is_an_error():
    with raises("no_effect", key="carope.base"):
        tiny_run(**{"model.position": [{"kind": "carope", "bias": False, "base": 100}]})


def test_parameters():
    sizes = {"model.dim": 16, "model.heads": 2, "model.layers": 2}
    plain = parameter_count(tiny_run(**{"model.position": [], **sizes}))
    for fields, expected in (({}, 2 * (2 * 16 + 2)), ({"bias": False}, 2 * 2 * 16)):
        run = tiny_run(**{"model.position": [{"kind": "carope", **fields}], **sizes})
        assert parameter_count(run) - plain == expected
    assert CARoPE(bias=False).parameters(Dims(16, 2, 1, 9))["frequency_weight"].std == 0.02
    assert RoPE().base == CARoPE().base
