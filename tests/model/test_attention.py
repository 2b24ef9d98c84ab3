import math

import torch

from cope_sweep.model.attention import Inputs, Position, SelfAttention, attend, reference
from cope_sweep.positions import CoPE


def test_by_hand_two_tokens():
    # K = 1: logits 1·1 = 1 and 1·2 = 2 for the second query; the first sees only itself.
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
        for mine, other in zip(
            torch.autograd.grad((fused * weight).sum(), (q, k, v)),
            torch.autograd.grad((plain * weight).sum(), (q, k, v)),
            strict=True,
        ):
            torch.testing.assert_close(mine, other)


def test_gradients_agree_with_finite_differences():
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 4, 3, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(3))
    e = torch.randn(6, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, e: reference(Inputs.plain(q, k, v), [Position(CoPE(p_max=6), {"e": e})]),
        (q, k, v, e),
        eps=1e-7,
        atol=1e-5,
    )


def test_dropout_is_of_weights_and_only_in_training():
    torch.manual_seed(0)
    attention = SelfAttention(8, 2, dropout=0.5).eval()
    x = torch.randn(1, 5, 8)
    assert torch.equal(attention(x, []), attention(x, []))
    attention.train()
    assert not torch.equal(attention(x, []), attention(x, []))
