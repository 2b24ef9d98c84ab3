import math

import pytest
import torch

from cope_sweep.config.run import default_of_field
from cope_sweep.model import Transformer
from cope_sweep.positions import Dims, RoPE
from cope_sweep.positions.darope import DaRoPE
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive

LONG = math.log((1 - 1e-6) / 1e-6)
"""β beyond the length: 13.8155."""


class TestDaRoPE(EncodingContract):
    specs = [
        DaRoPE(length=12),
        DaRoPE(slow="none", layers=(1,)),
        [DaRoPE(length=4), "cope"],
        DaRoPE(length=12, reading="guessed"),
    ]
    extrapolates = True


def test_pairs_that_turn_within_the_length_are_those_of_rope():
    """K = 4 and base 100: rates 1 and 0.1, so 2π/20 is between them, and the second pair is slow."""
    x = naive.normal(1, 1, 3, 4)
    turned = DaRoPE(length=20, base=100, slow="none").rotate({}, x, 5)
    expected = RoPE(base=100).rotate({}, x, 5)
    torch.testing.assert_close(turned[..., [0, 2]], expected[..., [0, 2]])
    torch.testing.assert_close(turned[..., [1, 3]], x[..., [1, 3]])


def slow_angles(encoding, tokens, features, alpha):
    """The angle of the slow pair of base 100 and length 20, of each head, from a vector that it turns."""
    x = torch.zeros(1, len(alpha), tokens.stop - tokens.start, 4, dtype=torch.float64)
    x[..., 1] = 1
    turned = encoding.rotate({"alpha": alpha}, x, tokens.start, features)
    return torch.atan2(turned[0, ..., 3], turned[0, ..., 1])


@pytest.mark.parametrize("tokens", [range(3), range(18, 22), range(40, 42)])
def test_the_angle_of_a_slow_pair_follows_the_features(tokens):
    features = naive.normal(1, 2, 42, 1, seed=2)
    alpha = torch.tensor([1.0, 0.5], dtype=torch.float64)
    angles = slow_angles(DaRoPE(length=20, base=100), tokens, features, alpha)
    for h in range(2):
        for row, token in enumerate(tokens):
            middle = min(max(token + 0.5, 20e-6), 20 - 20e-6)
            logit = float(features[0, h, token, 0]) + float(alpha[h]) * math.log(middle / (20 - middle))
            assert float(angles[h, row]) == pytest.approx(0.1 * 20 / (1 + math.exp(-logit)), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beyond_the_length_slow_pairs_stand_still_whatever_the_precision(dtype):
    """β is 13.8155 there, and ln(2L − 1) at the last token inside: in bfloat16 1 − 10⁻⁶ would be 1, and β infinite."""
    encoding, one = DaRoPE(length=20, base=100), torch.ones(1, dtype=dtype)
    features = torch.full((1, 1, 31, 1), -LONG).to(dtype)
    # w·x = −β: half a turn of the way, so that σ is not flat.
    x = torch.zeros(1, 1, 3, 4, dtype=dtype)
    x[..., 1] = 1
    turned = encoding.rotate({"alpha": one}, x, 28, features).double()
    rounded = float(features[0, 0, 0, 0])
    expected = 2 / (1 + math.exp(-(rounded + LONG)))
    torch.testing.assert_close(
        torch.atan2(turned[0, 0, :, 3], turned[0, 0, :, 1]),
        torch.full((3,), expected, dtype=torch.float64),
        rtol=0,
        atol=1e-6 if dtype == torch.float32 else 1e-2,
    )
    assert encoding._beta(torch.tensor([[19], [20], [10**6]]), torch.float64).flatten().tolist() == pytest.approx(
        [math.log(39), LONG, LONG], rel=1e-9
    )


def test_without_content_it_is_rope_half_a_token_later():
    x, features = naive.normal(1, 1, 8, 4), torch.zeros(1, 1, 8, 1, dtype=torch.float64)
    angle = (torch.arange(8) + 0.5).double() * 0.1
    for reading in ("text", "guessed"):
        encoding = DaRoPE(length=20, base=100, reading=reading)
        turned = encoding.rotate({"alpha": torch.ones(1, dtype=torch.float64)}, x, 0, features)
        torch.testing.assert_close(turned[0, 0, :, 1], x[0, 0, :, 1] * angle.cos() - x[0, 0, :, 3] * angle.sin())


def test_the_start_of_the_text():
    run = tiny_run(**{"model.position": ["darope"], "model.dim": 256, "model.heads": 4, "model.layers": 2})
    position = Transformer(run).position[0]
    for layer in position.layers.values():
        assert set(layer) == {"angle_weight", "alpha"}  # no bias
        assert layer["alpha"].tolist() == [0.5] * 4
        assert layer["angle_weight"].shape == (4, 256)
        assert float(layer["angle_weight"].detach().std()) == pytest.approx(0.1, rel=0.1)
    declared = DaRoPE(alpha=1, std=0).parameters(Dims(8, 2, 1, 9, linear_bound=0.5))
    assert (declared["alpha"].centre, declared["angle_weight"].std, declared["angle_weight"].bound) == (1, 0, None)


def test_the_guessed_reading_keeps_its_ids_and_its_start():
    """The ids, and the sum of the initial parameters, are those of the code before the text was read."""
    guessed = tiny_run(**{"model.position": [{"kind": "darope", "length": 12, "reading": "guessed"}]})
    text = tiny_run(**{"model.position": [{"kind": "darope", "length": 12}]})
    hope = tiny_run(**{"model.position": [{"kind": "darope", "length": 12, "slow": "none"}]})
    assert guessed.run_id == "18457838b6dc5024"
    assert hope.run_id == "12837a75c9842bd9"
    assert [run.versions["darope"] for run in (guessed, text, hope)] == [1, 2, 1]
    assert len({guessed.run_id, text.run_id, hope.run_id}) == 3
    layer = Transformer(guessed).position[0].layers["0"]
    assert layer["alpha"].tolist() == [1.0] * len(layer["alpha"])
    assert set(layer) == {"angle_weight", "angle_bias", "alpha"}
    assert float(layer["angle_weight"].detach().abs().sum()) == pytest.approx(0.33288381, rel=1e-6)


def test_runs_that_are_older_than_the_text_have_the_guessed_reading():
    spec = {"model.position": "darope", "model.position.darope.length": 12, "model.position.darope.slow": "contextual"}
    assert default_of_field("model.position.darope.reading", spec) == "guessed"
    assert default_of_field("model.position.darope.reading", spec | {"model.position.darope.slow": "none"}) == "text"
    assert default_of_field("model.position.darope.alpha", spec) == 0.5


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"slow": "none", "alpha": 1}, "darope.alpha"),
        ({"slow": "none", "reading": "guessed"}, "darope.reading"),
        ({"reading": "guessed", "std": 0.2}, "darope.std"),
    ],
)
def test_a_field_that_cannot_act_is_an_error(fields, key):
    with raises("no_effect", key=key):
        tiny_run(**{"model.position": [{"kind": "darope", **fields}]})


def test_a_model_has_one_reading():
    """A model's version of a kind is one number."""
    two = [{"kind": "darope", "layers": [0]}, {"kind": "darope", "layers": [1], "reading": "guessed"}]
    with raises("invalid_value", key="darope.reading", kind="darope"):
        tiny_run(**{"model.position": two, "model.layers": 2})
