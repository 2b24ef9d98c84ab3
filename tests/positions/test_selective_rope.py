import math

import pytest
import torch

from cope_sweep.nn import PositionalAttention
from cope_sweep.positions import Dims
from cope_sweep.positions.selective_rope import SelectiveRoPE
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestSelectiveRoPE(EncodingContract):
    specs = [
        SelectiveRoPE(rank=3),
        SelectiveRoPE(unit="head", layers=(1,)),
        ["selective_rope", "cope"],
        SelectiveRoPE(activation="silu", phase_gate=True, phase_bias=True),
    ]
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


@pytest.mark.parametrize(("silu", "gate", "bias"), [(True, False, False), (False, True, False), (True, True, True)])
def test_options_change_what_is_summed(silu, gate, bias):
    """SiLU after the convolution, then the bias, then the gate: σ(w·u + b) of the token, with u the unit vectors."""
    encoding = SelectiveRoPE(
        unit="head", activation="silu" if silu else "none", phase_gate=gate, phase_bias=bias, rank=3
    )
    parameters = {"down": naive.normal(3, 8), "up": naive.normal(2, 2, 3, seed=4), "taps": naive.normal(4, 4, seed=3)}
    parameters |= {"gate_weight": naive.normal(2, 8, seed=5), "gate_bias": naive.normal(2, seed=6)} if gate else {}
    parameters |= {"log_bias": naive.normal(2, 2, seed=7)} if bias else {}
    h, x = naive.normal(1, 5, 8, seed=8), torch.zeros(1, 2, 5, 4, dtype=torch.float64)
    x[..., :2] = 1
    features = encoding.features(parameters, h).view(1, 5, 2, -1).transpose(1, 2)
    turned = encoding.rotate(parameters, x, 0, features)
    unit = torch.cat([h[0, :, n : n + 4] / (h[0, :, n : n + 4].square().sum(-1, keepdim=True) + 1e-6).sqrt()
                      for n in (0, 4)], dim=-1)  # fmt: skip
    for head in range(2):
        for c in range(2):
            angle = 0.0
            before = [float(parameters["up"][head, c] @ parameters["down"] @ unit[t]) for t in range(5)]
            for t in range(5):
                phi = sum(float(parameters["taps"][2 * head + c, 3 - n]) * before[t - n] for n in range(4) if t >= n)
                if silu:
                    phi /= 1 + math.exp(-phi)
                if bias:
                    phi += math.exp(float(parameters["log_bias"][head, c]))
                if gate:
                    logit = float(parameters["gate_weight"][head] @ unit[t] + parameters["gate_bias"][head])
                    phi /= 1 + math.exp(-logit)
                angle += 500_000 ** (-c / 2) * phi
                assert turned[0, head, t, c] == pytest.approx(math.cos(angle), abs=1e-12)
                assert turned[0, head, t, c + 2] == pytest.approx(math.sin(angle), abs=1e-12)


def test_options_at_their_defaults_have_no_parameters_and_change_no_id():
    dims = Dims(8, 2, 1, 9)
    assert set(SelectiveRoPE().parameters(dims)) == {"down", "up", "taps"}
    fields = {"activation": "none", "phase_gate": False, "phase_bias": False}
    explicit, plain = (tiny_run(**{"model.position": [{"kind": "selective_rope", **each}]}) for each in (fields, {}))
    assert explicit.run_id == plain.run_id
    gated = SelectiveRoPE(phase_gate=True, phase_bias=True).parameters(dims)
    assert (gated["gate_weight"].shape, gated["gate_bias"].shape, gated["log_bias"].shape) == ((2, 8), (2,), (2, 2))
    assert (gated["log_bias"].std, gated["log_bias"].centre) == (0, 0)


def test_with_silu_an_angle_goes_back_by_at_most_the_smallest_value_of_silu():
    encoding = SelectiveRoPE(activation="silu")
    features, taps = 5 * naive.normal(1, 1, 400, 1), naive.normal(1, 4, seed=2)
    smallest = -0.2784645
    steps = encoding._phi({"taps": taps}, features)
    assert float(steps.min()) < -0.27
    assert float(steps.min()) >= smallest
    assert float(SelectiveRoPE()._phi({"taps": taps}, features).min()) < smallest


def test_slices_of_the_input_for_each_head_need_a_multiple_of_the_heads():
    with raises("invalid_value", key="selective_rope.unit", input_dim=7, heads=2):
        PositionalAttention([{"kind": "selective_rope", "unit": "head"}], heads=2, head_dim=4, hidden_dim=7)
