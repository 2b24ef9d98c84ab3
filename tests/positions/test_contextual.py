"""Positions and look-ups with backward passes of their own, against numerical derivatives."""

import torch
from torch.autograd import gradcheck

from cope_sweep.kernels import visible
from cope_sweep.positions.contextual import count_knots, linear_pieces, sum_gates

CPU = torch.device("cpu")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_sum_gates():
    logits_BHQS = random(2, 1, 3, 5).requires_grad_()
    assert gradcheck(lambda x: sum_gates(x, visible(3, 5, CPU)), logits_BHQS)
    gates_BHQS = logits_BHQS.sigmoid().masked_fill(~visible(3, 5, CPU), 0)
    torch.testing.assert_close(sum_gates(logits_BHQS, visible(3, 5, CPU))[..., 1], gates_BHQS[..., 1:].sum(-1))


def test_linear_pieces():
    index_BHQS = torch.tensor([3, 2, 2, 0]).expand(2, 1, 3, 4)
    tensors = random(2, 1, 3, 6), random(2, 1, 3, 6, seed=1), random(2, 1, 3, 4, seed=2)
    base, slope, x = (each.requires_grad_() for each in tensors)
    assert gradcheck(lambda base, slope, x: linear_pieces(base, slope, index_BHQS, x), (base, slope, x))
    torch.testing.assert_close(linear_pieces(base, slope, index_BHQS, x)[0, 0, 1, 2], base[0, 0, 1, 2] + slope[0, 0, 1, 2] * x[0, 0, 1, 2])  # fmt: skip


def test_count_knots():
    p_BHQS = sum_gates(4 * random(2, 3, 9, 40), visible(9, 40, CPU))
    for knots_N in torch.tensor([0.5, 1, 1, 7.25, torch.inf]), torch.empty(0), p_BHQS[1, 1, 1, [20, 10]]:
        torch.testing.assert_close(
            count_knots(knots_N, p_BHQS), torch.searchsorted(knots_N.double(), p_BHQS, right=True)
        )
