import math

import pytest
import torch

from cope_sweep.model import Transformer, attention, next_token_loss, transformer
from cope_sweep.tasks import IGNORED
from tests.helpers.tiny import tiny_run

GPT2 = {"model.family": "gpt2"}
LLAMA = {"model.family": "llama", "model.tied": False, "model.position": ["absolute", "rope"], "seed": 2}
POST_NORM = {"model.family": "post_norm", "model.position": ["absolute", "rope"], "seed": 2}
PINNED = {"model.layers": 3, "model.dim": 16, "model.ffn_dim": 24}


def model(**overrides):
    return Transformer(tiny_run(**overrides))


@pytest.mark.parametrize(
    ("overrides", "first_values"),
    [
        (GPT2, {"embedding.weight": -0.022516796, "blocks.2.feed_forward.down.weight": -0.011530604}),
        (
            LLAMA,
            {
                "embedding.weight": -0.020816023,
                "blocks.2.feed_forward.down.weight": -0.004074436,
                "head.weight": -0.008528194,
            },
        ),
        (POST_NORM, {"embedding.weight": -0.260200292, "blocks.2.feed_forward.down.weight": -0.184098199}),
    ],
)
def test_initial_weights_of_a_seed_are_pinned(overrides, first_values):
    """Runs that were trained before started from these: declarations and their order decide the random numbers."""
    state = model(**PINNED | overrides).state_dict()
    assert {name: state[name].flatten()[0].item() for name in first_values} == pytest.approx(first_values, rel=1e-6)


def test_names_and_order_of_parameters_are_pinned():
    """Checkpoints name parameters; resume files number them in this order."""
    names = [
        name for name, _ in model(**{"model.tied": False, "model.position": ["cope", "absolute"]}).named_parameters()
    ]
    block = [
        f"{part}.{kind}"
        for part in (
            "attention.qkv",
            "attention.out",
            "attention_norm",
            "feed_forward.up",
            "feed_forward.down",
            "ffn_norm",
        )
        for kind in ("weight", "bias")
    ]
    blocks = [f"blocks.0.{name}" for name in block]
    positions = ["position.0.layers.0.e", "position.1.shared.e"]
    assert names == ["embedding.weight", *blocks, "norm.weight", "norm.bias", "head.weight", *positions]


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
def test_dropout_applies_to_the_embeddings(family):
    """With dropout, an element that the first block receives is 0, or its embedding divided by the share kept."""
    net, received = model(**{"model.family": family, "model.dropout": 0.4, "model.position": ["absolute"]}), []
    with torch.no_grad():
        net.position[0].shared["e"].normal_()
    net.blocks[0].register_forward_pre_hook(lambda _, inputs: received.append(inputs[0].detach()))
    tokens = torch.randint(0, 6, (16, 8), generator=torch.Generator().manual_seed(0))
    net.eval()(tokens)
    net.train()(tokens)
    embedded, dropped = received
    zero = dropped == 0
    assert zero.float().mean().item() == pytest.approx(0.4, abs=0.08)  # 1,024 draws: five standard deviations
    torch.testing.assert_close(dropped[~zero], embedded[~zero] / 0.6)


def test_the_places_of_a_model_have_dropout_masks_of_their_own(monkeypatch):
    """Post-norm has one for the embedding, and three and that of attention in each layer. Each has its own seeds."""
    seen, apply, attend = [], transformer.apply_dropout, attention.attend
    monkeypatch.setattr(transformer, "apply_dropout", lambda x, p, seeds: seen.append(seeds) or apply(x, p, seeds))
    monkeypatch.setattr(attention, "attend", lambda *given: seen.append(given[-1]) or attend(*given))
    net = model(**{"model.family": "post_norm", "model.dropout": 0.4, "model.layers": 3}).train()
    net.hidden(torch.zeros(2, 5, dtype=torch.int64), seeds_B=torch.tensor([5, 6]))
    assert len(seen) == 1 + 3 * 4
    assert len({int(seed) for seeds in seen for seed in seeds}) == 2 * len(seen)


def test_dropout_masks_of_a_sequence_do_not_depend_on_the_others_or_on_the_global_generator():
    net = model(**{"model.dropout": 0.4, "model.position": ["cope"], "model.layers": 2}).train()
    tokens, seeds = torch.randint(0, 6, (4, 30)), torch.tensor([5, 6, 7, 8])
    before = torch.get_rng_state()
    whole = net.hidden(tokens, seeds_B=seeds)
    assert torch.equal(torch.get_rng_state(), before)
    parts = [net.hidden(tokens[i : i + 3], seeds_B=seeds[i : i + 3]) for i in (0, 3)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.allclose(net.hidden(tokens, seeds_B=seeds + 1), whole)
    assert not torch.allclose(net.hidden(tokens[:1].expand(2, -1), seeds_B=seeds[:2]).diff(dim=0), torch.tensor(0.0))


def test_without_seeds_dropout_masks_come_from_torch_s_generator():
    net, tokens = model(**{"model.dropout": 0.4}).train(), torch.zeros(2, 5, dtype=torch.int64)
    torch.manual_seed(0)
    first, second = net(tokens), net(tokens)
    torch.manual_seed(0)
    assert torch.equal(net(tokens), first)
    assert not torch.allclose(first, second)
    assert torch.equal(net.eval()(tokens), net.hidden(tokens, seeds_B=torch.tensor([1, 2])) @ net.head.weight.T)


def test_encodings_leave_the_other_weights_as_they_are():
    plain, with_absolute = (
        model(**{"model.tied": False}),
        model(**{"model.tied": False, "model.position": ["absolute"]}),
    )
    state = with_absolute.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


def test_layers_share_a_table_or_have_their_own():
    shared = model(**{"model.layers": 3, "model.position": [{"kind": "cope", "share_layers": True}]})
    own = model(**{"model.layers": 3, "model.position": ["cope"]})
    assert [name for name, _ in shared.position.named_parameters()] == ["0.shared.e"]
    assert [name for name, _ in own.position.named_parameters()] == [f"0.layers.{i}.e" for i in range(3)]


def test_the_loss_is_summed_over_targets_only():
    logits = torch.zeros(1, 3, 4)
    targets = torch.tensor([[IGNORED, 1, 2]])
    assert next_token_loss(logits, targets).item() == pytest.approx(2 * math.log(4))
