import math

import pytest
import torch
from torch.nn.functional import softplus

from cope_sweep.kernels import Inputs, LayerEncoding, attend, using, which
from cope_sweep.model import Transformer
from cope_sweep.positions import ALiBi, CoPE, Dims
from cope_sweep.positions.fox import FoX
from cope_sweep.positions.grape_ap import GrapeAP
from cope_sweep.positions.pope import PoPE
from cope_sweep.positions.relative import Relative
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestPoPE(EncodingContract):
    specs = [PoPE(), PoPE(start="uniform", layers=(1,)), PoPE(channels=3), ["pope", "cope"], ["pope", "fox"]]
    extrapolates = True


def wide(encoding, delta, q, k, start=0):
    return (
        encoding.rotate({"delta": delta}, q, start),
        encoding.rotate({"delta": delta}, k, start, keys=True),
    )


@pytest.mark.parametrize("channels", [None, 3])
def test_logits_are_the_sums_of_the_equation(channels):
    q, k = naive.normal(1, 2, 5, 4), naive.normal(1, 2, 5, 4, seed=2)
    n = 4 if channels is None else channels
    delta = naive.normal(2, n, seed=3) * 4  # some are outside the interval
    encoding = PoPE(base=50, channels=channels)
    turned_q, turned_k = wide(encoding, delta, q, k)
    assert turned_q.shape[-1] == n + 4
    logits = turned_q @ turned_k.mT
    for h in range(2):
        for i in range(5):
            for j in range(5):
                expected = sum(float(q[0, h, i, c] * k[0, h, j, c]) for c in range(n, 4))
                for c in range(n):
                    magnitudes = math.log1p(math.exp(q[0, h, i, c])) * math.log1p(math.exp(k[0, h, j, c]))
                    phase = min(max(float(delta[h, c]), -2 * math.pi), 0)
                    expected += magnitudes * math.cos((j - i) * 50 ** (-c / n) + phase)
                assert logits[0, h, i, j] == pytest.approx(expected, abs=1e-12)


def test_a_logit_depends_on_the_distance_alone():
    q, k, delta = naive.normal(1, 2, 3, 4), naive.normal(1, 2, 3, 4, seed=2), naive.normal(2, 4, seed=3)
    near, far = (wide(PoPE(), delta, q, k, start) for start in (0, 1000))
    torch.testing.assert_close(near[0] @ near[1].mT, far[0] @ far[1].mT, rtol=1e-9, atol=1e-9)


def test_products_are_divided_by_the_root_of_the_head_dimension():
    """Not by that of the 2·K components that are multiplied."""
    q, k, v = (naive.normal(1, 2, 5, 4, seed=seed) for seed in (1, 2, 3))
    delta = naive.normal(2, 4, seed=4)
    turned = wide(PoPE(), delta, q, k)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = (turned[0] @ turned[1].mT / 2).masked_fill(~mask, -math.inf).softmax(-1) @ v
    inputs = Inputs(q, k, v, *turned, [None])
    for implementation in ("auto", "reference", "blocked"):
        actual = attend(inputs, [LayerEncoding(PoPE(), {"delta": delta})], implementation=implementation)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "others", [[], [FoX()], [ALiBi()], [CoPE(p_max=5)], [CoPE(p_max=5, gate="separate")], [Relative(positions=9)],
     [GrapeAP(size=12)]],
    ids=lambda others: others[0].kind if others else "alone",
)  # fmt: skip
def test_the_native_kernel_gives_the_output_and_gradients_of_the_reference(others):
    """Values, tables and gates are as wide as the keys there, with zeros."""
    dims = Dims(16, 2, 1, 200)
    encodings = [PoPE(), *others]
    assert which(encodings, dims)[0] == "native" or which([CoPE()], dims)[0] != "native"
    leaves = [naive.normal(2, 2, 200, 8, seed=seed) for seed in (1, 2, 3)]
    parameters = [
        {name: naive.normal(*declared.shape, seed=9) for name, declared in encoding.parameters(dims).items()}
        for encoding in encodings
    ]
    h = naive.normal(2, 200, 16, seed=5)
    weight = naive.normal(2, 2, 200, 8, seed=6)

    def output_and_gradients(dtype, implementation):
        q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in leaves)
        own = [
            {name: x.detach().to(dtype, copy=True).requires_grad_() for name, x in each.items()} for each in parameters
        ]
        features = []
        for encoding, values in zip(encodings, own, strict=True):
            of_tokens = encoding.features(values, h.to(dtype))
            features.append(None if of_tokens is None else of_tokens.view(2, 200, 2, -1).transpose(1, 2))
        turned = wide(encodings[0], own[0]["delta"], q, k)
        positions = [LayerEncoding(encoding, values) for encoding, values in zip(encodings, own, strict=True)]
        out = attend(Inputs(q, k, v, *turned, features), positions, implementation=implementation)
        assert out.shape == (2, 2, 200, 8)
        (out * weight.to(dtype)).sum().backward()
        return [out.detach(), *(x.grad for x in (q, k, v)), *(x.grad for each in own for x in each.values())]

    expected = output_and_gradients(torch.float64, "reference")
    for one, other in zip(output_and_gradients(torch.float32, "native"), expected, strict=True):
        assert (one.double() - other).abs().mean() <= 2e-3 * max(1.0, float(other.abs().mean()))


def test_gates_of_more_numbers_than_wide_queries_have_are_no_problem_of_the_fused_kernels():
    name, reason = which([PoPE(), GrapeAP(size=32)], Dims(16, 2, 1, 200))
    assert name == "reference"
    assert "theirs is 32" in reason


def test_phases_of_the_keys_start_at_zero_or_uniform():
    run = tiny_run(**{"model.position": ["pope"], "model.dim": 128, "model.heads": 2, "model.layers": 2})
    for layer in Transformer(run).position[0].layers.values():
        assert layer["delta"].shape == (2, 64)
        assert not layer["delta"].any()
    run = tiny_run(**{"model.position": [{"kind": "pope", "start": "uniform"}], "model.dim": 2048, "model.heads": 2})
    delta = Transformer(run).position[0].layers["0"]["delta"].detach()
    assert -2 * math.pi <= float(delta.min()) < -6
    assert -0.3 < float(delta.max()) <= 0
    assert float(delta.mean()) == pytest.approx(-math.pi, abs=0.2)


def test_the_gradient_of_the_clamp_is_whole_at_its_ends_and_zero_outside():
    delta = torch.tensor([[0.0, -2 * math.pi, 0.1, -7.0]], dtype=torch.float64, requires_grad=True)
    k = naive.normal(1, 1, 1, 4)
    PoPE().rotate({"delta": delta}, k, 0, keys=True)[..., 4:].sum().backward()  # sp(k)·sin δ
    assert delta.grad[0].tolist() == pytest.approx([*softplus(k)[0, 0, 0, :2].tolist(), 0, 0])


def test_phases_that_start_at_zero_learn():
    run = tiny_run(**{"model.position": ["pope"], "model.layers": 1})
    model = Transformer(run)
    model(torch.randint(0, 3, (4, 6), generator=torch.Generator().manual_seed(0))).square().sum().backward()
    assert (model.position[0].layers["0"]["delta"].grad != 0).all()


def test_far_positions_keep_the_precision_of_float64_angles():
    x, delta = naive.normal(1, 1, 1, 8).float(), -naive.normal(1, 8, seed=2).abs().float()
    far = PoPE().rotate({"delta": delta}, x, 100_000, keys=True)
    exact = PoPE().rotate({"delta": delta.double()}, x.double(), 100_000, keys=True)
    torch.testing.assert_close(far.double(), exact, rtol=0, atol=1e-6)


def test_more_channels_than_a_head_has_are_an_error():
    with raises("invalid_value", key="pope.channels", head_dim=4):
        tiny_run(**{"model.position": [{"kind": "pope", "channels": 5}], "model.dim": 8, "model.heads": 2})


def test_layers_with_and_without_it_can_rotate():
    run = tiny_run(
        **{
            "model.layers": 2,
            "model.position": [{"kind": "rope", "layers": [0]}, {"kind": "pope", "layers": [1]}],
        }
    )
    tokens = torch.randint(0, 3, (2, 6))
    with using("reference"):
        expected = Transformer(run)(tokens)
    torch.testing.assert_close(Transformer(run)(tokens), expected)
