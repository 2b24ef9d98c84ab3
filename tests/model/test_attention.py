import math
from typing import Literal

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, attend, observing, reference
from cope_sweep.model import Transformer
from cope_sweep.model.attention import self_attention
from cope_sweep.positions import CoPE
from cope_sweep.positions.base import AttentionEncoding
from cope_sweep.positions.registered import ENCODINGS
from tests.helpers.tiny import tiny_run


def test_two_tokens_by_hand():
    # K = 1: the second query has the logits 1·1 = 1 and 1·2 = 2; the first sees only itself.
    q = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 2.0], dtype=torch.float64).view(1, 1, 2, 1)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 1, 2, 1)
    a = 1 / (1 + math.e)
    expected = torch.tensor([10.0, 10 * a + 20 * (1 - a)], dtype=torch.float64).view(1, 1, 2, 1)
    torch.testing.assert_close(reference(Inputs.plain(q, k, v), []), expected)


def test_without_scores_the_fused_path_is_the_reference():
    rng = torch.Generator().manual_seed(0)
    for T in (1, 2, 7, 33):
        q, k, v = torch.randn(3, 2, 3, T, 5, generator=rng, dtype=torch.float64).requires_grad_().unbind()
        fused, plain = attend(Inputs.plain(q, k, v), []), reference(Inputs.plain(q, k, v), [])
        torch.testing.assert_close(fused, plain)
        weight = torch.randn(fused.shape, generator=rng, dtype=torch.float64)
        for actual, expected in zip(
            torch.autograd.grad((fused * weight).sum(), (q, k, v)),
            torch.autograd.grad((plain * weight).sum(), (q, k, v)),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected)


def test_gradients_agree_with_finite_differences():
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 4, 3, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(3))
    e = torch.randn(6, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, e: reference(Inputs.plain(q, k, v), [LayerEncoding(CoPE(p_max=6), {"e": e})]),
        (q, k, v, e),
        eps=1e-7,
        atol=1e-5,
    )


def random_parameters(dim=8, bias=True):
    rng = torch.Generator().manual_seed(0)
    shapes = {"attention.qkv.weight": (3 * dim, dim), "attention.out.weight": (dim, dim)}
    if bias:
        shapes |= {"attention.qkv.bias": (3 * dim,), "attention.out.bias": (dim,)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def test_dropout_sets_weights_to_zero_and_scales_the_others():
    x, parameters = torch.randn(1, 5, 8), random_parameters()
    plain = self_attention(parameters, x, [], heads=2)
    assert torch.equal(self_attention(parameters, x, [], heads=2, dropout=0.0), plain)
    torch.manual_seed(0)
    dropped = self_attention(parameters, x, [], heads=2, dropout=0.5)
    assert not torch.allclose(dropped, plain)
    # The first query attends to one token: each head's output is 0, or twice what it was.
    v = (x[0, 0] @ parameters["attention.qkv.weight"].T + parameters["attention.qkv.bias"])[16:]
    outputs = [
        torch.cat((a * v[:4], b * v[4:])) @ parameters["attention.out.weight"].T + parameters["attention.out.bias"]
        for a in (0, 2)
        for b in (0, 2)
    ]
    assert any(torch.allclose(dropped[0, 0], output, atol=1e-4) for output in outputs)


def test_biases_are_optional():
    x, parameters = torch.randn(2, 5, 8), random_parameters(bias=False)
    zeros = {"attention.qkv.bias": torch.zeros(24), "attention.out.bias": torch.zeros(8)}
    torch.testing.assert_close(
        self_attention(parameters, x, [], heads=2), self_attention(parameters | zeros, x, [], heads=2)
    )


@pytest.mark.parametrize("kind", list(ENCODINGS))
def test_no_tokens_give_no_logits(kind):
    """On every path: none is asked for the attention of no queries."""
    model = Transformer(tiny_run(**{"model.position": [kind]}))
    logits_BTV = model(torch.zeros(2, 0, dtype=torch.int64))
    logits_BTV.sum().backward()
    assert logits_BTV.shape[:2] == (2, 0)


def test_autocast_reaches_the_features_of_encodings_alone():
    called = {}

    class Noting(AttentionEncoding):
        kind: Literal["noting"] = "noting"

        def note(self, hook, result=None):
            called[hook] = torch.is_autocast_enabled("cpu")
            return result

        def features(self, parameters, h_BTD):
            return self.note("features")

        def mix(self, parameters, x_BHSK, *, keys):
            return self.note("mix", x_BHSK)

        def rotate(self, parameters, x_BHTK, start, features_BHSF=None, *, keys=False):
            return self.note("rotate", x_BHTK)

        def term(self, parameters, q_BHQK, keys, features_BHSF):
            return self.note("term")

        def score(self, parameters, attention):
            return self.note("score")

        def weights(self, parameters, attention, logits_BHQS):
            return self.note("weights", logits_BHQS)

    def observe(inputs, positions):
        called["observer"] = torch.is_autocast_enabled("cpu")  # it may call hooks, too

    with torch.autocast("cpu", torch.bfloat16), observing(observe):
        self_attention(random_parameters(), torch.randn(1, 20, 8), [LayerEncoding(Noting())], heads=2)
    assert called.pop("features") is True
    assert called == dict.fromkeys(("mix", "rotate", "observer", "term", "score", "weights"), False)
