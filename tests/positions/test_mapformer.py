"""MapFormer-WM and MapFormer-EM."""

import math

import pytest
import torch

from cope_sweep.config.estimate import parameter_count
from cope_sweep.kernels import Inputs, LayerEncoding, attend
from cope_sweep.model import Transformer
from cope_sweep.positions import Dims, RoPE
from cope_sweep.positions.carope import CARoPE
from cope_sweep.positions.mapformer_em import MapFormerEM
from cope_sweep.positions.mapformer_wm import MapFormerWM
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestMapFormerWM(EncodingContract):
    specs = [MapFormerWM(), MapFormerWM(rank=1, dimensions=2, layers=(1,)), ["mapformer_wm", "cope"]]
    extrapolates = True


class TestMapFormerEM(EncodingContract):
    specs = [
        MapFormerEM(),
        MapFormerEM(product="s", layers=(1,)),
        MapFormerEM(shared=True, dimensions=2),
        ["mapformer_em", "rope"],
    ]
    extrapolates = True


def random_parameters(encoding, dims, seed=1):
    declared = encoding.parameters(dims).items()
    return {name: naive.normal(*each.shape, seed=seed + n) for n, (name, each) in enumerate(declared)}


def features_of(encoding, parameters, h, heads=2):
    return encoding.features(parameters, h).view(1, h.shape[1], heads, -1).transpose(1, 2)


def angles_by_loops(parameters, h):
    """ω·Σ W_out·W_in·x of each head, token and pair, as lists."""
    tokens = h.shape[1]
    heads, pairs, _ = parameters["out"].shape
    angles = torch.zeros(heads, tokens, pairs, dtype=torch.float64)
    for head in range(heads):
        for c in range(pairs):
            total = 0.0
            for t in range(tokens):
                total += float(parameters["out"][head, c] @ (parameters["into"][head] @ h[0, t]))
                angles[head, t, c] = parameters["omega"][head, c] * total
    return angles


@pytest.mark.parametrize(("start", "tokens"), [(0, 6), (4, 2)])
def test_pairs_are_turned_by_running_sums_of_steps(start, tokens):
    encoding = MapFormerWM(rank=3)
    parameters, h = random_parameters(encoding, Dims(8, 2, 1, 9)), naive.normal(1, 6, 8, seed=8)
    x = naive.normal(1, 2, tokens, 4, seed=9)
    turned = encoding.rotate(parameters, x, start, features_of(encoding, parameters, h))
    angles = angles_by_loops(parameters, h)
    for head in range(2):
        for c in range(2):
            for row in range(tokens):
                angle, a, b = angles[head, start + row, c], x[0, head, row, c], x[0, head, row, c + 2]
                assert turned[0, head, row, c] == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
                assert turned[0, head, row, c + 2] == pytest.approx(b * math.cos(angle) + a * math.sin(angle))


def test_steps_of_one_are_rope():
    encoding, base = MapFormerWM(rank=1), 100.0
    rates = RoPE(base=base).rates(4)
    parameters = {
        "out": torch.ones(2, 2, 1, dtype=torch.float64),
        "omega": rates.expand(2, 2),
    }
    x, ones = naive.normal(1, 2, 7, 4), torch.ones(1, 2, 7, 1, dtype=torch.float64)
    turned_q, turned_k = (encoding.rotate(parameters, each, 0, ones) for each in (x, x.flip(2)))
    expected_q, expected_k = (RoPE(base=base).rotate({}, each, 0) for each in (x, x.flip(2)))
    torch.testing.assert_close(turned_q @ turned_k.mT, expected_q @ expected_k.mT)


def test_the_initial_frequencies_are_those_of_the_text():
    """ω_max = 2π, n = 64, 32 pairs: 6.283, 5.494, … 0.0982."""
    frequencies = MapFormerWM().frequencies(32)
    assert frequencies[:2] == pytest.approx((6.283, 5.494), abs=5e-4)
    assert frequencies[-1] == pytest.approx(2 * math.pi / 64)
    assert MapFormerWM(distance=1024, fastest=2.0).frequencies(9)[-1] == pytest.approx(2 * math.pi / 1024)
    assert MapFormerWM(distance=16, dimensions=2).frequencies(8) == pytest.approx(
        2 * [2 * math.pi * 16 ** (-c / 3) for c in range(4)]
    )
    assert MapFormerWM().frequencies(1) == (2 * math.pi,)


def test_parameters_and_their_start():
    """W_in (H, r, D), W_out (H, C, r), ω (H, C) in each layer, all learned, without biases."""
    sizes = {"model.dim": 64, "model.heads": 2, "model.layers": 2}
    plain = parameter_count(tiny_run(**{"model.position": [], **sizes}))
    walking = 2 * (2 * 2 * 64 + 2 * 16 * 2 + 2 * 16)
    vectors = 2 * 2 * 32
    for position, expected in (
        ({"kind": "mapformer_wm"}, walking),
        ({"kind": "mapformer_em"}, walking + 2 * vectors),
        ({"kind": "mapformer_em", "shared": True}, walking + vectors),
    ):
        assert parameter_count(tiny_run(**{"model.position": [position], **sizes})) - plain == expected
    run = tiny_run(**{"model.position": ["mapformer_em"], **sizes})
    for layer in Transformer(run).position[0].layers.values():
        torch.testing.assert_close(
            layer["omega"].detach(), torch.tensor(MapFormerWM().frequencies(16)).expand(2, 16), rtol=0, atol=1e-6
        )
        assert layer["omega"].requires_grad
        assert float(layer["into"].detach().std()) == pytest.approx(0.02, rel=0.2)
        assert float(layer["q0"].detach().std()) == pytest.approx(1, rel=0.3)
    torch_like = MapFormerWM(start="torch", rank=4).parameters(Dims(64, 2, 1, 9, linear_bound=0.5))
    assert (torch_like["into"].bound, torch_like["out"].bound) == (1 / 8, 1 / 2)
    assert MapFormerWM().parameters(Dims(64, 2, 1, 9, linear_bound=0.5))["into"].bound == 0.5


def walk(*steps):
    """Inputs of 8 components in which a token's only feature is its step."""
    h = torch.zeros(1, len(steps), 8, dtype=torch.float64)
    h[0, :, 0] = torch.tensor(steps, dtype=torch.float64)
    return h


def test_a_walk_that_returns_to_its_start_has_the_angles_of_its_start():
    encoding = MapFormerWM()
    parameters = random_parameters(encoding, Dims(8, 2, 1, 9))
    angles = encoding.angles(parameters, features_of(encoding, parameters, walk(0, 1, 1, -1, -1, -1, 1)))
    torch.testing.assert_close(angles[:, :, 0], torch.zeros_like(angles[:, :, 0]))
    for there, back in ((0, 4), (0, 6), (1, 3)):
        torch.testing.assert_close(angles[:, :, there], angles[:, :, back])
    assert not torch.allclose(angles[:, :, 1], angles[:, :, 5])  # to the right, and to the left


def test_encodings_whose_steps_have_one_sign_cannot_go_back():
    encoding, h = CARoPE(), walk(0, 1, 1, -1, -1)
    parameters = random_parameters(encoding, Dims(8, 2, 1, 9))
    x = torch.zeros(1, 2, 5, 4, dtype=torch.float64)
    x[..., :2] = 1
    turned = encoding.rotate(parameters, x, 0, features_of(encoding, parameters, h))
    angle = torch.atan2(turned[..., 3], turned[..., 1])  # of the slower pair
    assert (angle.diff(dim=2) % (2 * math.pi) < 1).all()  # forwards, by less than 1


def test_what_stands_before_the_key_does_not_matter():
    encoding = MapFormerWM()
    parameters = random_parameters(encoding, Dims(8, 2, 1, 9))
    q, k, h = naive.normal(1, 2, 6, 4), naive.normal(1, 2, 6, 4, seed=2), naive.normal(1, 6, 8, seed=3)
    before, between = h.clone(), h.clone()
    before[:, :3] += 1
    between[:, 4] += 1

    def logits(inputs):
        features = features_of(encoding, parameters, inputs)
        return encoding.rotate(parameters, q, 0, features)[0] @ encoding.rotate(parameters, k, 0, features)[0].mT

    torch.testing.assert_close(logits(before)[:, 5, 3], logits(h)[:, 5, 3])
    assert not torch.allclose(logits(between)[:, 5, 3], logits(h)[:, 5, 3])


def test_sums_are_in_float32_in_a_model_of_half_precision():
    encoding = MapFormerWM(rank=1)
    parameters = {"out": torch.ones(1, 2, 1).bfloat16(), "omega": torch.ones(1, 2).bfloat16()}
    angles = encoding.angles(parameters, torch.ones(1, 1, 2000, 1).bfloat16())
    assert angles.dtype == torch.float32
    assert angles[0, 0, -1].tolist() == [2000, 2000]  # in bfloat16 the sum ends at 256


@pytest.mark.parametrize("product", ["os", "s"])
@pytest.mark.parametrize("shared", [False, True])
def test_weights_are_the_softmax_of_content_times_positions(product, shared):
    encoding = MapFormerEM(product=product, shared=shared, rank=3)
    parameters, h = random_parameters(encoding, Dims(8, 2, 1, 9)), naive.normal(1, 6, 8, seed=11) / 4
    q, k, v = (naive.normal(1, 2, 6, 4, seed=seed) for seed in (21, 22, 23))
    out = attend(Inputs(q, k, v, q, k, [features_of(encoding, parameters, h)]), [LayerEncoding(encoding, parameters)])
    angles = angles_by_loops(parameters, h)
    for head in range(2):
        for i in range(6):
            logits = []
            for j in range(i + 1):
                content = float(q[0, head, i] @ k[0, head, j]) / 2
                q0, k0 = (parameters["p0" if shared else name][head] for name in ("q0", "k0"))
                position = 0.0
                for c in range(2):
                    difference = float(angles[head, j, c] - angles[head, i, c])
                    along = float(q0[c] * k0[c] + q0[c + 2] * k0[c + 2])
                    across = float(q0[c + 2] * k0[c] - q0[c] * k0[c + 2])
                    position += along * math.cos(difference) + across * math.sin(difference)
                position /= 2
                logits.append(position if product == "s" else content * position)
            weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
            torch.testing.assert_close(out[0, head, i], weights @ v[0, head, : i + 1])


def test_gradients_of_the_product_are_right():
    encoding = MapFormerEM(rank=1)
    parameters = random_parameters(encoding, Dims(4, 1, 1, 5))
    names, h = list(parameters), naive.normal(1, 5, 4, seed=7)
    q, k, v = (naive.normal(1, 1, 5, 4, seed=seed) for seed in (1, 2, 3))

    def output(h, q, k, v, *values):
        own = dict(zip(names, values, strict=True))
        features = features_of(encoding, own, h, heads=1)
        return attend(Inputs(q, k, v, q, k, [features]), [LayerEncoding(encoding, own)])

    tensors = [x.requires_grad_() for x in (h, q, k, v, *parameters.values())]
    assert torch.autograd.gradcheck(output, tensors)


def test_dimensions_that_do_not_divide_the_pairs_are_an_error():
    with raises("invalid_value", key="mapformer_wm.dimensions", value=3, pairs=2):
        tiny_run(**{"model.position": [{"kind": "mapformer_wm", "dimensions": 3}], "model.dim": 8, "model.heads": 2})
