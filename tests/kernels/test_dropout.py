"""Dropout masks: their rate, their independence, and that all implementations of attention apply the same one."""

import pytest
import torch

from cope_sweep.kernels import Inputs, attend
from cope_sweep.kernels.dropout import (
    apply_dropout,
    at_place,
    draw_seeds,
    dropout_mask,
    sequence_seeds,
    threshold,
)
from tests.kernels.cases import dropout_seeds

HEADS, QUERIES, KEYS = torch.arange(4), torch.arange(128), torch.arange(256)


def mask(p=0.3, seed=7, heads=HEADS, queries=QUERIES, keys=KEYS):
    return dropout_mask(p, torch.full((len(heads),), seed), heads, queries, keys)


def assert_independent(first, second):
    """Two masks of rate ½ agree in half of their elements, to five standard deviations."""
    agreement = (first == second).double().mean().item()
    assert abs(agreement - 0.5) <= 5 * (0.25 / first.numel()) ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_weights_is_p(p):
    dropped = 1 - mask(p).double().mean().item()
    n = 4 * 128 * 256
    assert abs(dropped - p) <= 5 * (p * (1 - p) / n) ** 0.5  # five standard deviations of a binomial share


def test_heads_queries_keys_sequences_runs_and_places_have_masks_of_their_own():
    kept = mask(0.5)
    for dim in (0, 1, 2):
        assert_independent(kept.narrow(dim, 0, 1), kept.narrow(dim, 1, 1))

    def masks(run_seed, number, place=0):
        seeds = at_place(sequence_seeds(run_seed, range(number, number + 1)), place)
        return dropout_mask(0.5, seeds, torch.tensor([0]), QUERIES, KEYS)

    one = masks(0, 0)
    assert torch.equal(one, masks(0, 0))
    for other in (masks(0, 1), masks(0, 64), masks(1, 0), masks(2**31 - 1, 0), masks(0, 0, 1), masks(0, 0, 16)):
        assert_independent(one, other)
    assert_independent(masks(0, 1, 2), masks(0, 2, 1))


def test_the_seeds_of_sequences_are_splitmix64_and_depend_on_their_numbers_alone():
    def mixed(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    seeds = sequence_seeds(5, range(1000))
    assert int(seeds[70]) % 2**64 == mixed((mixed(5) + 70 * 0x9E3779B97F4A7C15) % 2**64)
    assert torch.equal(sequence_seeds(5, range(70, 80)), seeds[70:80])
    assert len({int(seed) for seed in seeds}) == 1000


def test_a_place_that_has_no_number_is_refused():
    seeds = torch.zeros(1, dtype=torch.int64)
    at_place(seeds, 2**16 - 1)
    for place in (-1, 2**16):
        with pytest.raises(ValueError, match="65,536 places"):
            at_place(seeds, place)


def test_the_mask_is_that_of_the_mixers_in_plain_integers():
    """SplitMix64 of (place, head, query), then lowbias32 with the key."""

    def kept(seed, place, head, query, key, p):
        x = (seed + ((place << 48) | (head << 32) | query) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        x = ((x ^ (x >> 31)) + key * 0x9E3779B9) % 2**32
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return (x ^ (x >> 16)) >= p * 2**32

    for place in (0, 1, 77, 2**16 - 1):
        computed = mask(seed=int(at_place(torch.tensor([2**61 + 5]), place)))
        for head, query, key in [(0, 0, 0), (3, 127, 255), (1, 64, 9), (2, 5, 200), (0, 1, 1), (3, 0, 77)]:
            assert computed[head, query, key].item() == kept(2**61 + 5, place, head, query, key, 0.3)


def test_the_threshold_fits_32_bits():
    assert [threshold(0), threshold(0.5), threshold(1)] == [0, 2**31, 2**32 - 1]


def test_seeds_come_from_torch_s_generator():
    torch.manual_seed(3)
    first = draw_seeds(2), draw_seeds(2)
    torch.manual_seed(3)
    assert torch.equal(draw_seeds(2), first[0])
    assert len({*first[0].tolist(), *first[1].tolist()}) == 4


def test_dropout_keeps_the_expected_value_and_the_share_of_elements():
    x = torch.ones(20, 30, 64)
    dropped = apply_dropout(x, 0.1, dropout_seeds(20))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / 0.9))
    assert abs(kept.double().mean().item() - 0.9) <= 5 * (0.09 / x.numel()) ** 0.5
    assert dropped.mean().item() == pytest.approx(1, abs=5 * (0.09 / x.numel()) ** 0.5 / 0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_has_the_mask_of_the_output(dtype):
    x = torch.randn(3, 5, 8, dtype=dtype, requires_grad=True)
    out = apply_dropout(x, 0.4, dropout_seeds(3))
    out.backward(torch.ones_like(out))
    assert out.dtype == x.grad.dtype == dtype
    assert torch.equal(x.grad == 0, out == 0)
    torch.testing.assert_close(x.grad * x, out)


def test_the_elements_that_are_dropped_do_not_depend_on_the_other_sequences(monkeypatch):
    x, seeds = torch.randn(7, 5, 16), dropout_seeds(7)
    whole = apply_dropout(x, 0.5, seeds)
    assert torch.equal(torch.cat([apply_dropout(x[i : i + 2], 0.5, seeds[i : i + 2]) for i in range(0, 7, 2)]), whole)
    monkeypatch.setattr("cope_sweep.kernels.dropout.MASK_AT_ONCE", 3 * 16)
    assert torch.equal(apply_dropout(x, 0.5, seeds), whole)


@pytest.mark.parametrize("implementation", ["auto", "blocked", "native"])
def test_the_implementations_apply_the_same_mask(implementation):
    q, k, v = torch.randn(3, 2, 2, 40, 4, generator=torch.Generator().manual_seed(0))
    for seeds in (dropout_seeds(2), None):
        outputs = []
        for name in ("reference", implementation):
            torch.manual_seed(11)
            outputs.append(attend(Inputs.plain(q, k, v), [], 0.4, seeds, name))
        # A mask that differs in one weight changes outputs by far more than rounding does.
        torch.testing.assert_close(outputs[1], outputs[0])


def test_a_compiler_computes_the_same_elements():
    """Traced, where the mask is computed at once and not in parts."""
    x, seeds = torch.randn(3, 5, 16), dropout_seeds(3)
    compiled = torch.compile(apply_dropout, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, 0.3, seeds), apply_dropout(x, 0.3, seeds))
    torch.compiler.reset()
