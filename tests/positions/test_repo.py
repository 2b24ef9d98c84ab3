import math

import pytest
import torch

from cope_sweep.config.estimate import parameter_count
from cope_sweep.model import Transformer
from cope_sweep.positions import Dims, RoPE
from cope_sweep.positions.repo import RePo
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestRePo(EncodingContract):
    specs = [RePo(), RePo(hidden=3, layers=(1,)), ["repo", "cope"]]
    extrapolates = True
    order_matters = False  # in one layer it does not; see below

    def test_one_layer_ignores_the_order_of_earlier_tokens(self):
        model = self.model("repo", layers=1)
        tokens = torch.tensor([[0, 3, 4, 1, 5]])
        swapped = torch.tensor([[0, 4, 3, 1, 5]])
        torch.testing.assert_close(model(tokens)[:, -1], model(swapped)[:, -1])


class TestRoPEBelow(EncodingContract):
    """The released model's layers: RoPE in the lower ones, RePo above, with one base."""

    specs = [[RoPE(base=5e5, layers=(0,)), RePo(layers=(1,))]]
    extrapolates = True


def random_parameters(dims, **fields):
    declared = RePo(**fields).parameters(dims).items()
    return {name: naive.normal(*each.shape, seed=n + 1) for n, (name, each) in enumerate(declared)}


@pytest.mark.parametrize("start", [0, 3])
def test_angles_are_positions_that_each_token_decides(start):
    parameters, h = random_parameters(Dims(8, 2, 1, 9), hidden=3), naive.normal(1, 5, 8, seed=5)
    encoding, x = RePo(hidden=3), naive.normal(1, 2, 5 - start, 4, seed=6)
    features = encoding.features(parameters, h).view(1, 5, 2, 1).transpose(1, 2)
    turned = encoding.rotate(parameters, x, start, features)
    for t in range(start, 5):
        hidden = []
        for m in range(3):
            gate, content = (float(parameters[name][m] @ h[0, t]) for name in ("gate", "content"))
            hidden.append(gate / (1 + math.exp(-gate)) * content)
        for head in range(2):
            z = sum(float(parameters["position"][head, m]) * hidden[m] for m in range(3))
            for c in range(2):
                angle = z * 500_000 ** (-c / 2)
                a, b = x[0, head, t - start, c], x[0, head, t - start, c + 2]
                assert turned[0, head, t - start, c] == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
                assert turned[0, head, t - start, c + 2] == pytest.approx(b * math.cos(angle) + a * math.sin(angle))


def test_positions_that_count_tokens_are_rope():
    x, z = naive.normal(1, 2, 7, 4), torch.arange(7, dtype=torch.float64).view(1, 1, 7, 1).expand(1, 2, 7, 1)
    torch.testing.assert_close(RePo(base=100).rotate({}, x, 0, z), RoPE(base=100).rotate({}, x, 0))


def test_a_logit_depends_on_its_two_tokens_alone():
    dims = Dims(8, 2, 1, 9)
    parameters, encoding = random_parameters(dims), RePo()
    q, k, h = naive.normal(1, 2, 6, 4), naive.normal(1, 2, 6, 4, seed=2), naive.normal(1, 6, 8, seed=3)
    changed = h.clone()
    changed[:, [0, 1, 3, 4]] += 1

    def logits(inputs):
        features = encoding.features(parameters, inputs).view(1, 6, 2, 1).transpose(1, 2)
        return encoding.rotate(parameters, q, 0, features) @ encoding.rotate(parameters, k, 0, features).mT

    torch.testing.assert_close(logits(changed)[..., 5, 2], logits(h)[..., 5, 2])
    assert not torch.allclose(logits(changed)[..., 5, 3], logits(h)[..., 5, 3])


def test_parameters_and_their_start():
    """W_g and W_c (D/8, D), W_z (H, D/8), without biases, from N(0, 0.02²) cut at 3 standard deviations."""
    sizes = {"model.dim": 128, "model.heads": 4, "model.layers": 3}
    plain = parameter_count(tiny_run(**{"model.position": [], **sizes}))
    run = tiny_run(**{"model.position": [{"kind": "repo", "layers": [1, 2]}], **sizes})
    assert parameter_count(run) - plain == 2 * (2 * 16 * 128 + 4 * 16)
    for layer in Transformer(run).position[0].layers.values():
        gate = layer["gate"].detach()
        assert float(gate.abs().max()) <= 0.06
        assert float(gate.std()) == pytest.approx(0.02, rel=0.05)
    assert RePo().parameters(Dims(4, 1, 1, 9))["gate"].shape == (1, 4)


def test_the_start_depends_on_the_seed_alone():
    run = tiny_run(**{"model.position": ["repo"]})
    first, again = (Transformer(run).position[0].layers["0"]["gate"] for _ in range(2))
    assert torch.equal(first, again)
