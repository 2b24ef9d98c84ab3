import pytest
import torch

from cope_sweep.model import Transformer
from cope_sweep.positions.short_convolution import ShortConvolution
from cope_sweep.testing import EncodingContract
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestShortConvolution(EncodingContract):
    specs = [
        "short_convolution",
        [ShortConvolution(taps=4), "rope"],
        ["cope", ShortConvolution(taps=2, layers=(1,))],
        [{"kind": "cope", "gate": "separate"}, "short_convolution", "rope"],
    ]
    extrapolates = True


@pytest.mark.parametrize("taps", [1, 3, 12])
@pytest.mark.parametrize("keys", [False, True])
def test_each_channel_is_a_weighted_sum_of_the_last_tokens(taps, keys):
    x = naive.normal(2, 3, 8, 4).requires_grad_()
    own, other = naive.normal(12, taps).requires_grad_(), naive.normal(12, taps)
    parameters = {"key_taps": own, "query_taps": other} if keys else {"key_taps": other, "query_taps": own}
    mixed = ShortConvolution(taps=taps).mix(parameters, x, keys=keys)
    expected = torch.zeros(2, 3, 8, 4, dtype=torch.float64)
    for b, h, t, c in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        expected[b, h, t, c] = sum(
            own[4 * h + c, taps - 1 - back] * x[b, h, t - back, c] for back in range(min(taps, t + 1))
        )
    torch.testing.assert_close(mixed, expected)
    weight = naive.normal(2, 3, 8, 4)
    gradients = [torch.autograd.grad((each * weight).sum(), (x, own)) for each in (mixed, expected)]
    torch.testing.assert_close(*gradients)


def test_taps_for_the_own_token_alone_change_nothing():
    models = [Transformer(tiny_run(**{"model.position": each})) for each in (["cope"], ["cope", "short_convolution"])]
    own = torch.tensor([0.0, 0.0, 1.0])
    for name, taps in models[1].named_parameters():
        if name.endswith("taps"):
            taps.data.copy_(own.expand_as(taps))
    tokens = torch.randint(models[0].vocabulary_size, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(models[0](tokens), models[1](tokens))


def test_its_parameters_are_the_taps_of_queries_and_keys_in_each_layer():
    runs = [tiny_run(**{"model.position": each}) for each in ([], [{"kind": "short_convolution", "taps": 5}])]
    counts = [sum(x.numel() for x in Transformer(run).parameters()) for run in runs]
    assert counts[1] - counts[0] == 2 * 5 * runs[0].model.dim * runs[0].model.layers
