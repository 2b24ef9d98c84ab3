"""Random Float Sampling: positions that are sampled in training, and evenly spaced in evaluations."""

import math

import pytest
import torch

from cope_sweep.kernels import using
from cope_sweep.kernels.dropout import sequence_seeds
from cope_sweep.model import Transformer
from cope_sweep.model.packing import Packing
from cope_sweep.model.shares import even_shares, sampled_shares
from cope_sweep.positions import ALiBi, RoPE
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive

POSITIONS = {
    "rope": [{"kind": "rope", "sampled": 50.0}],
    "alibi": [{"kind": "alibi", "sampled": 50.0}],
    "both": [{"kind": "rope", "sampled": 300.0}, {"kind": "alibi", "sampled": 20.0, "layers": [1]}, "cope"],
}
each = pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)


def model(position, **fields):
    """In float64, with large weights of queries and keys, so that positions matter."""
    built = Transformer(tiny_run(**{"model.position": position, "model.layers": 2, **fields})).double()
    for name, x in built.named_parameters():
        if name.endswith("qkv.weight"):
            x.data.mul_(30)
    return built


def tokens(length=9, batch=3):
    return torch.randint(6, (batch, length), generator=torch.Generator().manual_seed(0))


def test_sampled_positions_are_sorted_and_uniform():
    shares = sampled_shares(sequence_seeds(3, range(2000)), 20)
    assert shares.shape == (2000, 20)
    assert shares.dtype == torch.float64
    assert (shares.diff(dim=1) > 0).all()
    assert shares.min() >= 0
    assert shares.max() < 1
    counts = torch.histc(shares.float(), 10, 0, 1)
    assert (counts - 4000).abs().max() < 5 * math.sqrt(4000)
    # The t-th of T sorted uniform numbers has the mean t/(T + 1).
    expected = torch.arange(1, 21) / 21
    torch.testing.assert_close(shares.mean(0), expected.double(), rtol=0, atol=0.015)


def test_even_positions_are_the_means_of_sampled_ones_in_each_length():
    shares = even_shares(torch.tensor([3, 1]), 3)
    torch.testing.assert_close(shares[0], torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    assert shares[1, 0] == 0.5


def test_positions_depend_on_the_sequence_alone():
    together = sampled_shares(sequence_seeds(5, range(8)), 30)
    assert torch.equal(together[3:6], sampled_shares(sequence_seeds(5, range(3, 6)), 30))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, sampled_shares(sequence_seeds(6, range(8)), 30))


def test_alibi_subtracts_the_distance_of_positions():
    attention = naive.attention(tokens=6, queries=4, features=1)
    bias = ALiBi(sampled=20, slopes=(0.5, 2.0)).score({}, attention)
    share = attention.features_BHSF[..., 0]
    for h, row, i, j in naive.pairs(attention):
        distance = 20 * float(share[0, h, i] - share[0, h, j])
        assert bias[0, h, row, j] == pytest.approx(-(0.5, 2.0)[h] * distance)


def test_rope_rotates_by_the_position():
    x, share = naive.normal(1, 2, 5, 4), naive.normal(1, 1, 5, 1, seed=2).abs().expand(1, 2, 5, 1)
    turned = RoPE(base=100, sampled=30).rotate({}, x, 0, share)
    for h in range(2):
        for t in range(5):
            for c, rate in enumerate((1, 0.1)):
                angle = 30 * rate * float(share[0, h, t])
                a, b = float(x[0, h, t, c]), float(x[0, h, t, c + 2])
                assert turned[0, h, t, c] == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
                assert turned[0, h, t, c + 2] == pytest.approx(b * math.cos(angle) + a * math.sin(angle))


@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_even_positions_over_the_length_are_those_of_tokens(kind):
    """With L = T + 1, neighbours are 1 apart, so that the model is the one without the option."""
    plain, sampled = model([kind]).eval(), model([{"kind": kind, "sampled": 10.0}]).eval()
    torch.testing.assert_close(sampled(tokens(9)), plain(tokens(9)))


@each
def test_training_draws_positions_and_evaluation_does_not(position):
    built = model(position)
    seeds = [sequence_seeds(seed, range(3)) for seed in (0, 0, 1)]
    first, again, other = (built.hidden(tokens(), seeds_B=each) for each in seeds)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    built.eval()
    assert torch.equal(*(built.hidden(tokens(), seeds_B=each) for each in seeds[1:]))
    built.train()
    drawn = [built.hidden(tokens()) for _ in range(2)]
    assert not torch.allclose(*drawn)


@each
def test_a_part_of_a_batch_and_computing_again_give_the_same(position):
    built, seeds = model(position), sequence_seeds(0, range(3))
    whole = built.hidden(tokens(), seeds_B=seeds)
    torch.testing.assert_close(built.hidden(tokens()[1:], seeds_B=seeds[1:]), whole[1:])
    gradients = []
    for built.checkpoint_activations in (False, True):
        built.zero_grad()
        built.loss(tokens(), tokens(), seeds).backward()
        gradients.append([x.grad.clone() for x in built.parameters()])
    assert all(map(torch.equal, *gradients))


@each
@pytest.mark.parametrize("implementation", ["blocked", "native", "auto"])
def test_all_paths_equal_the_reference(position, implementation):
    dtype = torch.float64 if implementation == "blocked" else torch.float32
    built, ids, seeds = model(position).to(dtype), tokens(150), sequence_seeds(0, range(3))

    def output_and_gradients():
        built.zero_grad()
        hidden = built.hidden(ids, seeds_B=seeds)
        hidden.square().mean().backward()
        return [hidden.detach(), *(x.grad.clone() for x in built.parameters() if x.grad is not None)]

    with using("reference"):
        expected = output_and_gradients()
    with using(implementation):
        actual = output_and_gradients()
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().mean() <= (1e-9 if dtype == torch.float64 else 5e-3) * max(1, other.abs().max())


@each
def test_later_tokens_change_nothing(position):
    built, changed = model(position).eval(), tokens()
    changed[:, 5:] = (changed[:, 5:] + 1) % 6
    assert torch.equal(built(tokens())[:, :5], built(changed)[:, :5])


@each
def test_a_batch_of_mixed_lengths_equals_single_sequences(position):
    built, lengths = model(position).eval(), [9, 4, 6]
    padded = built.hidden(tokens(), lengths_B=torch.tensor(lengths))
    packed = built.hidden(tokens(), packing=Packing(lengths))[0]
    singles = [built.hidden(tokens()[row : row + 1, :length])[0] for row, length in enumerate(lengths)]
    for row, single in enumerate(singles):
        torch.testing.assert_close(padded[row, : len(single)], single)
    torch.testing.assert_close(packed, torch.cat(singles))


@each
def test_cached_decoding_is_refused(position):
    built = model(position).eval()
    kind = position[0]["kind"]
    with raises("invalid_value", key=f"{kind}.sampled", kind=kind), torch.no_grad():
        built(tokens(), [{}, {}])


@pytest.mark.parametrize("sampled", [0, -1.0, math.inf])
def test_impossible_ranges_are_refused(sampled):
    with pytest.raises(ValueError, match="sampled"):
        RoPE(sampled=sampled)
