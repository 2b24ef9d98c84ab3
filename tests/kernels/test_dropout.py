"""The dropout mask: its rate, its independence, and that all implementations apply the same one."""

import pytest
import torch

from cope_sweep.kernels import Inputs, attend
from cope_sweep.kernels.dropout import draw_seed, dropout_mask, threshold

HEADS, QUERIES, KEYS = torch.arange(4), torch.arange(128), torch.arange(256)


def mask(p=0.3, seed=7, heads=HEADS, queries=QUERIES, keys=KEYS):
    return dropout_mask(torch.tensor(seed), p, heads, queries, keys)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_weights_is_p(p):
    dropped = 1 - mask(p).double().mean().item()
    n = 4 * 128 * 256
    assert abs(dropped - p) <= 5 * (p * (1 - p) / n) ** 0.5  # five standard deviations of a binomial share


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_heads_queries_and_keys_have_masks_of_their_own(dim):
    kept = mask(0.5)
    first, second = kept.narrow(dim, 0, 1).double(), kept.narrow(dim, 1, 1).double()
    agreement = (first == second).double().mean().item()
    assert abs(agreement - 0.5) <= 5 * (0.25 / first.numel()) ** 0.5


def test_another_seed_gives_another_mask_and_the_same_seed_the_same():
    assert torch.equal(mask(seed=7), mask(seed=7))
    agreement = (mask(0.5, seed=7) == mask(0.5, seed=8)).double().mean().item()
    assert abs(agreement - 0.5) <= 5 * (0.25 / mask().numel()) ** 0.5


def test_a_block_of_the_mask_is_the_mask_of_the_block():
    block = mask(heads=HEADS[1:3], queries=QUERIES[40:], keys=KEYS[100:130])
    assert torch.equal(block, mask()[1:3, 40:, 100:130])


def test_the_mask_is_that_of_the_mixers_in_plain_integers():
    """SplitMix64 of (head, query), then lowbias32 with the key."""

    def kept(seed, head, query, key, p):
        x = (seed + ((head << 32) | query) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        x = ((x ^ (x >> 31)) + key * 0x9E3779B9) % 2**32
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return (x ^ (x >> 16)) >= p * 2**32

    computed = mask(seed=2**61 + 5)
    for head, query, key in [(0, 0, 0), (3, 127, 255), (1, 64, 9), (2, 5, 200), (0, 1, 1), (3, 0, 77)]:
        assert computed[head, query, key].item() == kept(2**61 + 5, head, query, key, 0.3)


def test_the_threshold_fits_32_bits():
    assert [threshold(0), threshold(0.5), threshold(1)] == [0, 2**31, 2**32 - 1]


def test_seeds_come_from_torch_s_generator():
    torch.manual_seed(3)
    first = draw_seed(), draw_seed()
    torch.manual_seed(3)
    assert (draw_seed(), draw_seed()) == first
    assert first[0] != first[1]


@pytest.mark.parametrize("implementation", ["blocked", "native"])
def test_the_implementations_apply_the_same_mask(implementation):
    q, k, v = torch.randn(3, 2, 2, 40, 4, generator=torch.Generator().manual_seed(0))
    outputs = []
    for name in ("reference", implementation):
        torch.manual_seed(11)
        outputs.append(attend(Inputs.plain(q, k, v), [], 0.4, name))
    # A mask that differs in one weight changes outputs by far more than rounding does.
    torch.testing.assert_close(outputs[1], outputs[0])


def test_outputs_are_scaled_so_that_their_mean_stays():
    q, k = torch.zeros(2, 1, 1, 2000, 4)
    v = torch.ones(1, 1, 2000, 4)
    torch.manual_seed(0)
    out = attend(Inputs.plain(q, k, v), [], 0.5, "blocked")[0, 0, 1000:, 0]
    # A row is the mean of n ≥ 1000 weights, each 0 or 2: the deviation of the mean of 1000 rows is below 1/√(1000·1000).
    assert out.mean().item() == pytest.approx(1, abs=5e-3)
