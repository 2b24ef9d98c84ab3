import math

import pytest
import torch

from cope_sweep.positions.selective_rope import SelectiveRoPE
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestSelectiveRoPE(EncodingContract):
    specs = [SelectiveRoPE(rank=3), SelectiveRoPE(unit="head", layers=(1,)), ["selective_rope", "cope"]]
    extrapolates = True


@pytest.mark.parametrize(("start", "tokens"), [(0, 6), (4, 2)])
def test_angles_are_running_sums_of_convolved_numbers(start, tokens):
    x, features, taps = naive.normal(1, 2, tokens, 4), naive.normal(1, 2, 6, 2, seed=2), naive.normal(4, 4, seed=3)
    turned = SelectiveRoPE().rotate({"taps": taps}, x, start, features)
    for h in range(2):
        for c in range(2):
            angle = 0.0
            for t in range(start + tokens):
                phi = sum(taps[2 * h + c, 3 - back] * features[0, h, t - back, c] for back in range(4) if t >= back)
                angle += 500_000 ** (-2 * c / 4) * float(phi)
                if t < start:
                    continue
                a, b = x[0, h, t - start, c], x[0, h, t - start, c + 2]
                assert turned[0, h, t - start, c] == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
                assert turned[0, h, t - start, c + 2] == pytest.approx(b * math.cos(angle) + a * math.sin(angle))


@pytest.mark.parametrize("unit", ["input", "head"])
def test_features_do_not_depend_on_the_length_of_the_input(unit):
    parameters = {"down": naive.normal(3, 8), "up": naive.normal(2, 2, 3)}
    h = naive.normal(1, 5, 8)
    encoding = SelectiveRoPE(unit=unit)
    features = encoding.features(parameters, h)
    # 10⁻⁶ beside |x|² changes the last digits.
    torch.testing.assert_close(encoding.features(parameters, 7 * h), features, rtol=1e-5, atol=1e-5)
    scaled = torch.cat((7 * h[..., :4], h[..., 4:]), dim=-1)
    assert torch.allclose(encoding.features(parameters, scaled), features, atol=1e-5) == (unit == "head")
