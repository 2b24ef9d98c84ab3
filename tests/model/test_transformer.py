import math

import pytest
import torch
import torch.nn.functional as F

from cope_sweep.model import Transformer, next_token_loss
from cope_sweep.tasks import IGNORED
from tests.tiny import tiny_run


def model(**overrides):
    return Transformer(tiny_run(**overrides))


def test_gpt2_s_initial_scales():
    gpt2 = model(**{"model.dim": 256, "model.heads": 4, "model.layers": 8, "task.vocabulary": 500})
    block = gpt2.blocks[3]
    for weight, std in (
        (gpt2.embedding.weight, 0.02),
        (block.attention.qkv.weight, 0.02),
        (block.feed_forward.up.weight, 0.02),
        (block.attention.out.weight, 0.02 / math.sqrt(16)),
        (block.feed_forward.down.weight, 0.02 / math.sqrt(16)),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert abs(weight.mean().item()) < 0.001
    assert not block.attention.qkv.bias.any()
    assert gpt2.head.weight is gpt2.embedding.weight


def test_the_post_norm_decoder_s_initial_scales():
    decoder = model(**{"model.family": "post_norm", "model.dim": 256, "model.heads": 4, "task.vocabulary": 500})
    assert decoder.embedding.weight.std().item() == pytest.approx(256**-0.5, rel=0.03)
    for linear in (
        decoder.blocks[0].attention.qkv,
        decoder.blocks[0].feed_forward.up,
        decoder.blocks[0].feed_forward.down,
    ):
        bound = linear.in_features**-0.5
        assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


def test_families_norm_where_they_should():
    x = torch.randint(0, 6, (2, 5))
    hidden = []
    for family in ("gpt2", "post_norm"):
        m = model(**{"model.family": family})
        with torch.no_grad():
            m.embedding.weight.mul_(50)  # far above the norms' ε
        m.head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
        m(x)
    # Both end in a norm whose gain is 1 at first: the last hidden states have mean 0, variance 1.
    for states in hidden:
        torch.testing.assert_close(states.mean(-1), torch.zeros(2, 5), atol=1e-5, rtol=0)
        torch.testing.assert_close(states.var(-1, unbiased=False), torch.ones(2, 5), atol=1e-2, rtol=0)


def test_a_block_is_what_its_equation_says():
    m = model().double()
    block, x = m.blocks[0], torch.randn(1, 5, 8, dtype=torch.float64)
    with_attention = x + block.attention(block.attention_norm(x), [])
    h = F.gelu(block.feed_forward.up(block.ffn_norm(with_attention)), approximate="tanh")
    torch.testing.assert_close(block(x, [], None), with_attention + block.feed_forward.down(h))


def test_the_same_seed_gives_the_same_weights_and_others_do_not():
    a, b, c = model(), model(), model(seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)


def test_encodings_leave_the_other_weights_as_they_are():
    plain, with_absolute = model(), model(**{"model.position": ["absolute"]})
    assert torch.equal(plain.blocks[0].feed_forward.up.weight, with_absolute.blocks[0].feed_forward.up.weight)


def test_layers_share_a_table_or_have_their_own():
    shared = model(**{"model.layers": 3, "model.position": [{"kind": "cope", "share_layers": True}]})
    own = model(**{"model.layers": 3, "model.position": ["cope"]})
    assert [name for name, _ in shared.position.named_parameters()] == ["0.shared.e"]
    assert [name for name, _ in own.position.named_parameters()] == [f"0.layers.{i}.e" for i in range(3)]


def test_the_initial_loss_is_that_of_even_odds():
    run = tiny_run(**{"task.vocabulary": 16})
    batch = run.task.sequences("train", 0, 0, 64)
    logits = Transformer(run)(torch.from_numpy(batch.inputs_NT))
    loss = next_token_loss(logits, torch.from_numpy(batch.targets_NT)) / (batch.targets_NT != IGNORED).sum()
    assert loss.item() == pytest.approx(math.log(16), rel=0.02)


def test_the_loss_counts_targets_only():
    logits = torch.zeros(1, 3, 4)
    targets = torch.tensor([[IGNORED, 1, 2]])
    assert next_token_loss(logits, targets).item() == pytest.approx(2 * math.log(4))
